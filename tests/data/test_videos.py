"""Videos: which frames are taken, how large they become, and reading them from frames, animations and files."""

import builtins
import os

import av
import numpy as np
import pytest
from media_samples import as_bytes, colours, fixture, image_of, media_reader, video_of
from PIL import Image

from jaxforge.config.errors import ConfigError
from jaxforge.data.conversation import SampleError
from jaxforge.data.media import MediaShape
from jaxforge.data.videos import VideoFile, VideoHeader, plan_video

FAMILIES = ("qwen2_5_vit", "qwen3_vit")
# Frames of one colour each, as levels of grey: 0, 20, 40, ...
LEVELS = [20 * number for number in range(10)]


def planned(family, header, **data):
    reader = media_reader(family, **data)
    return plan_video(header, reader.encoder, reader.image, reader.video)


def grey_levels(reader, media, root):
    """The level of each frame that was read, patch by temporal patch: [[a, b], [c, d], ...]; each must be uniform."""
    runs, shape = reader.read(media, root), reader.shape(media, root)
    assert tuple((run.frames, *run.grid) for run in runs) == shape.grids
    levels = []
    for run in runs:
        pixels_PCFX = colours(run.patches_PC, reader).round()
        for frame in np.split(pixels_PCFX, run.frames):
            assert (np.ptp(frame, axis=(0, 1, 3)) <= 4).all()  # a lossy codec may be off by a little
            levels.append(frame.mean(axis=(0, 1, 3)).round().tolist())
    return levels


def frames_in(folder, levels, name="{}.png", size=(60, 90)):
    folder.mkdir(exist_ok=True)
    for number, level in enumerate(levels):
        (folder / name.format(number)).write_bytes(as_bytes(Image.new("L", size[::-1], level)))
    return folder


def animation(levels, format, duration):
    images = [Image.new("RGB", (90, 60), (level,) * 3) for level in levels]
    exact = {"lossless": True} if format == "WEBP" else {}
    return as_bytes(images[0], format, save_all=True, append_images=images[1:], duration=duration, **exact)


# ---- sampling and sizes, against transformers


@pytest.mark.parametrize(
    "case",
    fixture("videos.json")["sampled"],
    ids=lambda case: f"{case['family']}-{case['num_frames']}-{case['max_frames']}",
)
def test_the_frames_and_their_times_are_those_of_transformers(case):
    header = VideoHeader(case["num_frames"], case["fps"], 480, 640)
    plan = planned(case["family"], header, video_fps=float(case["video_fps"]), video_max_frames=case["max_frames"])
    # both fill a last temporal patch of 2 with its last frame
    expected = case["indexes"] + case["indexes"][-1:] * (len(case["indexes"]) % 2)
    assert plan.indexes == tuple(expected)
    assert plan.timestamps == pytest.approx(case["timestamps"], abs=1e-9)
    assert plan.seconds_per_patch == pytest.approx(case["seconds_per_patch"], rel=1e-12)


@pytest.mark.parametrize("case", fixture("videos.json")["sizes"], ids=lambda case: f"{case['family']}-{case['size']}")
def test_the_size_of_frames_is_that_of_transformers(case):
    frames, height, width = case["size"]
    # images may be as large as they like, so that the budget of videos alone decides
    plan = planned(case["family"], VideoHeader(frames, 2.0, height, width, is_sampled=True), max_pixels=2**40)
    reader = media_reader(case["family"])
    assert (reader.video.min_pixels, reader.video.max_pixels) == (case["min_pixels"], case["max_pixels"])
    assert plan.size == tuple(case["resized"])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_frame_is_no_larger_than_an_image_may_be(family):
    height, width = planned(family, VideoHeader(2, 2.0, 1080, 1920), max_pixels=100_000).size
    assert 80_000 < height * width <= 100_000


@pytest.mark.parametrize("family", FAMILIES)
def test_a_video_of_one_frame_fills_a_temporal_patch_with_it(family):
    assert planned(family, VideoHeader(1, 25.0, 100, 100)).indexes == (0, 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_frames_that_were_chosen_already_are_all_taken(family):
    assert planned(family, VideoHeader(5, 2.0, 100, 100, is_sampled=True)).indexes == (0, 1, 2, 3, 4, 4)
    # up to the most that are taken
    few = planned(family, VideoHeader(100, 2.0, 100, 100, is_sampled=True), video_max_frames=8).indexes
    assert len(few) == 8 and few[0] == 0 and few[-1] >= 87


@pytest.mark.parametrize("family", FAMILIES)
def test_a_long_narrow_video_is_refused(family):
    # F37
    with pytest.raises(SampleError, match="10x2270 pixels has an aspect ratio of 227") as error:
        planned(family, VideoHeader(4, 2.0, 10, 2270))
    assert error.value.kind == "aspect ratio"


# ---- frames


def test_a_qwen2_5_video_is_one_run_whose_time_advances_with_its_seconds(tmp_path):
    # F32: 2 frames a second, 2 frames in a temporal patch, 2 positions a second
    reader = media_reader("qwen2_5_vit", max_pixels=4096)
    clip = video_of(tuple(str(frames_in(tmp_path, LEVELS[:5]) / f"{number}.png") for number in range(5)))
    assert grey_levels(reader, clip, tmp_path) == [[0, 20], [40, 60], [80, 80]]
    (run,) = reader.read(clip, tmp_path)
    assert (run.frames, run.time_step) == (3, 2.0)
    # 60x90 pixels in at most 4096: 28x56, which is 2x4 patches
    assert reader.shape(clip, tmp_path) == MediaShape(((3, 2, 4),), None)
    assert reader.shape(clip, tmp_path).num_patches == len(run.patches_PC) == 24


def test_the_time_step_follows_the_frame_rate_and_the_encoder(tmp_path):
    # a frame a second, 2 in a temporal patch, 4 positions a second
    frames_in(tmp_path, LEVELS[:4])
    reader = media_reader("qwen2_5_vit", encoder=dict(tokens_per_second=4.0), video_fps=1.0)
    (run,) = reader.read(video_of(tuple(f"{number}.png" for number in range(4))), tmp_path)
    assert run.time_step == 8.0


def test_a_qwen3_video_is_a_run_with_a_time_for_each_temporal_patch(tmp_path):
    reader = media_reader("qwen3_vit", max_pixels=4096)
    clip = video_of(tuple(str(frames_in(tmp_path, LEVELS[:5]) / f"{number}.png") for number in range(5)))
    assert grey_levels(reader, clip, tmp_path) == [[0, 20], [40, 60], [80, 80]]
    runs = reader.read(clip, tmp_path)
    assert [(run.frames, run.time_step) for run in runs] == [(1, 0.0)] * 3
    # frames at 0, 0.5, 1, 1.5, 2 and again 2 seconds
    assert reader.shape(clip, tmp_path) == MediaShape(((1, 2, 4),) * 3, (0.25, 1.25, 2.0))


def test_a_folder_of_frames_is_read_in_the_order_of_its_numbers(tmp_path):
    folder = frames_in(tmp_path / "clip", LEVELS, "frame_{}.png")
    frames_in(folder, [200], "frame_10.png")
    (folder / "notes.txt").write_text("not a frame")
    (folder / "._frame_0.png").write_bytes(b"not one either")
    pairs = grey_levels(media_reader("qwen2_5_vit"), video_of("clip"), tmp_path)
    assert pairs == [[0, 20], [40, 60], [80, 100], [120, 140], [160, 180], [200, 200]]


def test_frames_of_different_sizes_are_refused(tmp_path):
    frames_in(tmp_path, [0, 0])
    (tmp_path / "1.png").write_bytes(as_bytes(Image.new("L", (90, 61))))
    with pytest.raises(SampleError, match=r"frame 1.png has 61x90 pixels, the first has 60x90; make them one size"):
        media_reader().read(video_of(("0.png", "1.png")), tmp_path)


@pytest.mark.parametrize("source", [("0.png", "gone.png"), (), "empty", "gone"])
def test_missing_frames_are_missing(source, tmp_path):
    frames_in(tmp_path, [0])
    (tmp_path / "empty").mkdir()
    with pytest.raises(SampleError) as error:
        media_reader().shape(video_of(source), tmp_path)
    assert error.value.kind == "missing media"


# ---- animations


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_an_animation_is_sampled_by_its_durations(format, tmp_path):
    # 10 frames of 125 ms are 1.25 seconds; 4 frames a second are 5 frames, of which Qwen2.5 takes 4: one in 2.5
    reader = media_reader("qwen2_5_vit", video_fps=4.0)
    clip = video_of(animation(LEVELS, format, duration=130 if format == "GIF" else 125))
    assert grey_levels(reader, clip, tmp_path) == [[0, 40], [100, 140]]


def test_an_animation_without_durations_takes_100_ms_a_frame(tmp_path):
    clip = video_of(animation(LEVELS, "GIF", duration=0))
    shape = media_reader("qwen3_vit", video_fps=4.0, max_pixels=4096).shape(clip, tmp_path)
    # 1 second at 4 frames a second: frames 0, 3, 6 and 9
    assert shape.timestamps == pytest.approx((0.15, 0.75))


def test_a_still_image_as_a_video_is_one_temporal_patch(tmp_path):
    assert grey_levels(media_reader(), video_of(as_bytes(Image.new("RGB", (90, 60), "white"))), tmp_path) == [
        [255, 255]
    ]


def test_a_truncated_animation_is_corrupt(tmp_path):
    clip = video_of(animation(LEVELS, "WEBP", duration=100)[:-30])
    with pytest.raises(SampleError) as error:
        media_reader(video_fps=10.0).read(clip, tmp_path)
    assert error.value.kind == "corrupt media"


# ---- video files


def encoded(path, codec="mpeg4", pixels="yuv420p", fps=5, levels=LEVELS, rotation=0, height=48, width=64):
    """A video of uniform frames, but for a white stripe along its top where it is to be turned."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=fps)
        stream.width, stream.height, stream.pix_fmt = width, height, pixels
        if rotation:
            stream.set_display_rotation(rotation)
        for level in levels:
            frame = np.full((height, width, 3), level, np.uint8)
            if rotation:
                frame[: height // 4] = 255
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return path


# the first two count their frames, the others leave that to their packets
@pytest.mark.parametrize("name, codec", [("a.mp4", "mpeg4"), ("a.avi", "mpeg4"), ("a.mkv", "mpeg4"), ("a.ts", "mpeg4")])
def test_a_video_file_is_sampled_by_its_frame_rate(name, codec, tmp_path):
    path = encoded(tmp_path / name, codec)
    # 10 frames at 5 a second are 2 seconds; 2 a second are 4 frames: one in 2.5
    expected = np.array([[0, 40], [100, 140]])
    for source in (name, str(path), path.read_bytes()):
        levels = grey_levels(media_reader("qwen2_5_vit"), video_of(source), tmp_path)
        assert np.abs(np.array(levels) - expected).max() <= 3  # lossy
    shape = media_reader("qwen3_vit").shape(video_of(name), tmp_path)
    # frames 0, 3, 6, 9 at 5 a second
    assert shape.timestamps == pytest.approx((0.3, 1.5))


def test_a_grey_encoder_reads_video_files_in_grey(tmp_path):
    encoded(tmp_path / "a.mp4")
    levels = grey_levels(media_reader(encoder=dict(in_channels=1)), video_of("a.mp4"), tmp_path)
    assert np.abs(np.array(levels) - [[0, 40], [100, 140]]).max() <= 3


@pytest.mark.parametrize("rotation", [90, -90, 180])
def test_a_video_is_turned_as_its_container_says(rotation, tmp_path):
    # the stripe along the top of what is stored; turned by 90 degrees counterclockwise, it is at the left
    encoded(tmp_path / "a.mp4", levels=[0] * 5, rotation=rotation, height=56, width=112)
    reader = media_reader("qwen2_5_vit", max_pixels=6272)
    down, across = (4, 8) if rotation == 180 else (8, 4)
    assert reader.shape(video_of("a.mp4"), tmp_path).grids == ((2, down, across),)
    (run,) = reader.read(video_of("a.mp4"), tmp_path)
    frame = slice(0, down * across)
    bright_P = colours(run.patches_PC, reader).mean(axis=(1, 2, 3))[frame] > 128
    row_P, column_P = run.positions_P2[frame].T
    expected_P = {90: column_P == 0, -90: column_P == 3, 180: row_P == 3}[rotation]
    assert np.array_equal(bright_P, expected_P)


def test_a_frame_too_few_is_filled_with_the_last(tmp_path):
    path = encoded(tmp_path / "a.mp4", levels=LEVELS[:5])
    frames = [int(np.asarray(frame).mean().round()) for frame in VideoFile(path, 3).frames([0, 2, 5])]
    assert np.abs(np.array(frames) - [0, 40, 80]).max() <= 3
    with pytest.raises(SampleError, match="ends before frame 6 of 5") as error:
        list(VideoFile(path, 3).frames([0, 2, 6, 9]))
    assert error.value.kind == "corrupt media"


@pytest.mark.parametrize("content", [b"", b"no video at all", b"\0\0\0\x18ftypisom" + bytes(100)])
def test_what_is_no_video_is_corrupt(content, tmp_path):
    (tmp_path / "a.mp4").write_bytes(content)
    with pytest.raises(SampleError, match="video a.mp4: ") as error:
        media_reader().shape(video_of("a.mp4"), tmp_path)
    assert error.value.kind == "corrupt media"


def test_a_truncated_video_is_corrupt(tmp_path):
    whole = encoded(tmp_path / "a.mkv").read_bytes()
    for keep in (len(whole) // 8, len(whole) // 4):
        with pytest.raises(SampleError) as error:
            media_reader().read(video_of(whole[:keep]), tmp_path)
        assert error.value.kind == "corrupt media"


def test_a_playlist_opens_no_other_file(tmp_path):
    secret = encoded(tmp_path / "secret.ts")
    root = tmp_path / "root"
    root.mkdir()
    playlist = f"#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:2,\n{secret}\n#EXT-X-ENDLIST\n"
    (root / "a.m3u8").write_text(playlist)
    (root / "b.mp4").write_text(f"ffconcat version 1.0\nfile '{secret}'\n")
    for name in ("a.m3u8", "b.mp4"):
        with pytest.raises(SampleError) as error:
            media_reader().shape(video_of(name), root)
        assert error.value.kind == "corrupt media"


def test_files_are_closed_again(tmp_path):
    encoded(tmp_path / "a.mp4")
    frames_in(tmp_path, LEVELS[:4])
    reader = media_reader()
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for source in ("a.mp4", ("0.png", "1.png", "2.png")):
        reader.shape(video_of(source), tmp_path), reader.read(video_of(source), tmp_path)
    reader.read(image_of("0.png"), tmp_path)
    assert not before or len(os.listdir("/proc/self/fd")) == before


def test_without_pyav_a_video_file_names_the_extra_to_install(tmp_path, monkeypatch):
    (tmp_path / "a.mp4").write_bytes(b"\0\0\0\x18ftypisom" + bytes(100))
    imported = builtins.__import__

    def without_av(name, *arguments, **named):
        if name == "av":
            raise ImportError("No module named 'av'")
        return imported(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", without_av)
    with pytest.raises(ConfigError, match=r"need PyAV.*install the extra jaxforge\[video\]"):
        media_reader().shape(video_of("a.mp4"), tmp_path)
    # frames and animations need none
    frames_in(tmp_path, [0, 0])
    assert media_reader().shape(video_of(("0.png", "1.png")), tmp_path).num_patches
