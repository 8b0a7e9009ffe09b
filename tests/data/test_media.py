"""Images from paths, data URIs and bytes to patches; whatever is wrong with one is a SampleError with its name."""

import base64
import concurrent.futures
import os
import random

import numpy as np
import pytest
from media_samples import FIXTURES, as_bytes, colours, fixture, image_of, media_config, media_reader, video_of
from PIL import Image
from synthetic_image import synthetic_image

from jaxforge.data import media as media_module
from jaxforge.data.conversation import Media, SampleError
from jaxforge.data.image_rules import image_rule, video_rule
from jaxforge.data.media import MediaReader, MediaShape
from jaxforge.data.packing import Document, pack_row
from jaxforge.data.rows import RowFormat

PIXEL_IMAGES = [(50, 75), (64, 64), (131, 40)]  # of scripts/make_processor_fixtures.py
PICTURE = as_bytes(synthetic_image(60, 90, 0))


def fails(kind, message, media, root, reader=None):
    """`shape` and `read` both refuse the medium so."""
    for method in (reader or media_reader()).shape, (reader or media_reader()).read:
        with pytest.raises(SampleError, match=message) as error:
            method(media, root)
        assert error.value.kind == kind


# ---- what an image becomes


@pytest.mark.parametrize("family, least", [("qwen2_5_vit", 56 * 56), ("qwen3_vit", 4096)])
@pytest.mark.parametrize("number, size", list(enumerate(PIXEL_IMAGES)))
def test_pixels_and_their_order_are_those_of_transformers(family, least, number, size, tmp_path):
    with np.load(FIXTURES / "patches.npz") as arrays:
        name = f"{family} {size[0]}x{size[1]}"
        expected_PC, grid = arrays[f"{name} pixels"], arrays[f"{name} grid"].tolist()
    reader, image = media_reader(family, min_pixels=least), image_of(as_bytes(synthetic_image(*size, number)))
    assert reader.shape(image, tmp_path) == MediaShape((tuple(grid),))
    (patches,) = reader.read(image, tmp_path)
    assert (patches.frames, *patches.grid) == tuple(grid)
    # The same Pillow resizes the same 8-bit pixels, so only the rounding of three fp32 operations differs: 5e-7 as
    # measured, where a level of 8 bits is 8e-3 or more.
    assert np.abs(patches.patches_PC - expected_PC).max() < 2e-6


@pytest.mark.parametrize(
    "case", fixture("image_sizes.json"), ids=lambda case: f"{case['family']}-{case['max_pixels']}-{case['size']}"
)
def test_the_shape_of_every_image_is_that_of_transformers(case, tmp_path):
    height, width = case["size"]
    reader = media_reader(case["family"], min_pixels=case["min_pixels"], max_pixels=case["max_pixels"])
    # one bit a pixel: large images are quickly made, and `shape` never decodes them
    image = image_of(as_bytes(Image.new("1", (width, height)), "TIFF"))
    if case["resized"] is None:
        fails("aspect ratio", f"{height}x{width} pixels has an aspect ratio of 227", image, tmp_path, reader)
    else:
        patch, (down, across) = reader.encoder.patch_size, case["resized"]
        shape = reader.shape(image, tmp_path)
        assert shape.grids == ((1, down // patch, across // patch),)
        assert shape.num_patches == down * across // patch**2


def test_an_image_of_one_colour_is_that_colour_in_every_patch(tmp_path):
    reader = media_reader()
    (patches,) = reader.read(image_of(as_bytes(Image.new("RGB", (90, 60), (200, 100, 50)))), tmp_path)
    seen = colours(patches.patches_PC, reader)
    assert np.abs(seen - np.reshape([200, 100, 50], (3, 1, 1))).max() < 1e-3


def test_a_grey_encoder_reads_grey(tmp_path):
    reader = media_reader(encoder=dict(in_channels=1))
    (patches,) = reader.read(image_of(as_bytes(Image.new("RGB", (90, 60), (200, 100, 50)))), tmp_path)
    # ITU-R 601: 0.299 red, 0.587 green, 0.114 blue
    assert np.abs(colours(patches.patches_PC, reader) - 124).max() < 1e-3


def test_a_turned_photograph_has_the_shape_of_what_one_sees(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    photo = image_of(as_bytes(synthetic_image(56, 112, 0), "JPEG", exif=exif))
    reader = media_reader()
    assert reader.shape(photo, tmp_path).grids == ((1, 8, 4),)
    assert reader.read(photo, tmp_path)[0].grid == (8, 4)


def test_no_part_of_an_image_is_lost_in_a_row(tmp_path):
    # F39: every patch of the image is in the row, and none of it is cut where the row is too small
    reader = media_reader()
    shape, (patches,) = reader.shape(image_of(PICTURE), tmp_path), reader.read(image_of(PICTURE), tmp_path)
    tokens = shape.num_patches // 4
    document = Document(np.ones(tokens, np.int32), np.ones(tokens, bool), np.ones(tokens, bool), (patches,))
    row = pack_row([document], RowFormat(tokens, shape.num_patches, merge=2, channels=patches.patches_PC.shape[1]))
    assert np.array_equal(row["patches"], patches.patches_PC)


def test_threads_read_the_same_as_one_after_another(tmp_path):
    reader = media_reader()
    images = [image_of(as_bytes(synthetic_image(60 + 7 * i, 90, i), format)) for i in range(4)
              for format in ("PNG", "JPEG", "WEBP", "GIF")]  # fmt: skip
    alone = [reader.read(image, tmp_path)[0].patches_PC for image in images]
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        for expected, read in zip(alone, threads.map(lambda image: reader.read(image, tmp_path), images), strict=True):
            assert np.array_equal(read[0].patches_PC, expected)


# ---- where images come from


def test_paths_start_from_the_root_and_may_be_absolute_inside_it(tmp_path):
    (tmp_path / "cats").mkdir()
    (tmp_path / "cats" / "a.png").write_bytes(PICTURE)
    reader, inline = media_reader(), media_reader().shape(image_of(PICTURE), tmp_path)
    for path in ("cats/a.png", "cats/../cats/a.png", str(tmp_path / "cats" / "a.png")):
        assert reader.shape(image_of(path), tmp_path) == inline


def test_the_media_root_of_the_config_replaces_the_data_files_folder(tmp_path):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(PICTURE)
    reader = media_reader(media_root=str(tmp_path / "pictures"))
    assert reader.shape(image_of("a.png"), tmp_path / "elsewhere").num_patches
    fails("refused media", "leaves the folder of media", image_of(str(tmp_path / "b.png")), tmp_path, reader)


def test_paths_that_leave_the_root_are_refused_though_they_exist(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "secret.png").write_bytes(PICTURE)
    for path in ("../secret.png", "x/../../secret.png", str(tmp_path / "secret.png")):
        fails("refused media", "secret.png: leaves the folder of media, .*root", image_of(path), root)


def test_a_root_whose_name_begins_alike_is_another_folder(tmp_path):
    (tmp_path / "root").mkdir()
    (tmp_path / "root2").mkdir()
    (tmp_path / "root2" / "a.png").write_bytes(PICTURE)
    fails("refused media", "leaves the folder", image_of("../root2/a.png"), tmp_path / "root")


def test_symbolic_links_are_followed_inside_the_root_only(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "secret.png").write_bytes(PICTURE)
    (root / "inside.png").write_bytes(PICTURE)
    (root / "good.png").symlink_to(root / "inside.png")
    (root / "bad.png").symlink_to(tmp_path / "secret.png")
    (root / "folder").symlink_to(tmp_path)
    assert media_reader().shape(image_of("good.png"), root).num_patches
    fails("refused media", "bad.png: leaves the folder", image_of("bad.png"), root)
    fails("refused media", "leaves the folder", image_of("folder/secret.png"), root)


def test_a_root_that_is_a_link_itself_is_fine(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.png").write_bytes(PICTURE)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert media_reader().shape(image_of("a.png"), tmp_path / "link").num_patches


@pytest.mark.parametrize(
    "address", ["http://example.org/a.png", "HTTPS://example.org/a.png", "file:///etc/passwd", "s3://b/a"]
)
def test_addresses_are_refused_with_a_way_out(address, tmp_path):
    fails("refused media", f"image {address}: is an address .*download it first", image_of(address), tmp_path)


@pytest.mark.parametrize("uri", ["data:image/png;base64,", "DATA:image/png;charset=utf-8;base64,"])
def test_a_data_uri_is_decoded(uri, tmp_path):
    reader = media_reader()
    whole = image_of(uri + base64.b64encode(PICTURE).decode())
    assert reader.shape(whole, tmp_path) == reader.shape(image_of(PICTURE), tmp_path)
    assert np.array_equal(
        reader.read(whole, tmp_path)[0].patches_PC, reader.read(image_of(PICTURE), tmp_path)[0].patches_PC
    )


def test_a_data_uri_may_be_broken_into_lines(tmp_path):
    lines = base64.encodebytes(PICTURE).decode()
    assert media_reader().shape(image_of("data:image/png;base64," + lines), tmp_path).num_patches


@pytest.mark.parametrize(
    "uri, kind, message",
    [
        ("data:text/html;base64,AAAA", "refused media", "no image or video in base64"),
        ("data:image/png,abc", "refused media", "no image or video in base64"),
        ("data:image/png;base64,a*b=", "corrupt media", "is not base64"),
        ("data:image/png;base64,AAAA", "corrupt media", "cannot identify image file"),
        ("data:image/png;base64,", "corrupt media", "cannot identify image file"),
    ],
)
def test_other_data_uris_are_refused(uri, kind, message, tmp_path):
    fails(kind, message, image_of(uri), tmp_path)


def test_a_data_uri_has_a_largest_size(tmp_path, monkeypatch):
    monkeypatch.setattr(media_module, "MAX_DATA_URI", 1000)
    uri = "data:image/png;base64," + "A" * 1000
    fails("refused media", "has 1022 characters, more than 1000; give it as a file", image_of(uri), tmp_path)


# ---- what is wrong with them


def test_base64_without_its_head_is_named_as_that_and_not_printed(tmp_path):
    bare = base64.b64encode(bytes(range(256)) * 100).decode()
    fails(
        "refused media",
        r"^image .{60}\.\.\.: has 34136 characters.*data:image/png;base64, .{1,20}$",
        image_of(bare),
        tmp_path,
    )


def test_a_missing_file_is_missing(tmp_path):
    fails("missing media", "image cats/a.png: is not in .*copy it there", image_of("cats/a.png"), tmp_path)
    (tmp_path / "dangling.png").symlink_to(tmp_path / "nowhere.png")
    fails("missing media", "dangling.png: is not in", image_of("dangling.png"), tmp_path)


def test_what_is_no_plain_file_is_refused_without_waiting_for_it(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    fails("refused media", "pipe.png: is no regular file", image_of("pipe.png"), tmp_path)
    fails("refused media", "is a folder", image_of("."), tmp_path)


@pytest.mark.parametrize("source", ["", "a\0b.png"])
def test_what_is_no_path_is_refused(source, tmp_path):
    fails("refused media", "is no path", image_of(source), tmp_path)


@pytest.mark.parametrize("name", ["x" * 300 + ".png", "loop.png"])
def test_a_path_that_the_file_system_refuses_is_a_sample_error(name, tmp_path):
    (tmp_path / "loop.png").symlink_to(tmp_path / "loop.png")
    with pytest.raises(SampleError):
        media_reader().shape(image_of(name), tmp_path)


def test_a_corrupt_photograph_is_corrupt(tmp_path):
    # F41: its header is whole, so its shape is known, and its pixels end early
    (tmp_path / "a.jpg").write_bytes(as_bytes(synthetic_image(300, 400, 0), "JPEG")[:-4000])
    reader = media_reader()
    assert reader.shape(image_of("a.jpg"), tmp_path).num_patches
    with pytest.raises(SampleError, match="image a.jpg: OSError: image file is truncated") as error:
        reader.read(image_of("a.jpg"), tmp_path)
    assert error.value.kind == "corrupt media"


@pytest.mark.parametrize("content", [b"", b"\xff\xd8\xff", b"not an image", b"\x89PNG\r\n\x1a\n", b"GIF89a"])
def test_what_is_no_image_is_corrupt(content, tmp_path):
    (tmp_path / "a.png").write_bytes(content)
    fails("corrupt media", "image a.png: ", image_of("a.png"), tmp_path)


@pytest.mark.filterwarnings("ignore")  # Pillow's, on broken TIFF tags
@pytest.mark.parametrize("format", ["PNG", "JPEG", "GIF", "WEBP", "AVIF", "BMP", "TIFF", "PPM", "JPEG2000"])
def test_whatever_bytes_are_broken_nothing_but_a_sample_error_comes_out(format, tmp_path):
    reader, whole = media_reader(max_pixels=5000), as_bytes(synthetic_image(20, 30, 0), format)
    assert reader.read(image_of(whole), tmp_path)
    chances = random.Random(format)
    for _ in range(60):
        broken = bytearray(whole[: chances.randrange(1, len(whole) + 1)])
        for _ in range(chances.randrange(8)):
            broken[chances.randrange(len(broken))] = chances.randrange(256)
        try:
            shape = reader.shape(image_of(bytes(broken)), tmp_path)
            (patches,) = reader.read(image_of(bytes(broken)), tmp_path)
            assert shape.grids == ((1, *patches.grid),)
        except SampleError as error:
            assert error.kind in ("corrupt media", "refused media", "aspect ratio")


def test_an_aspect_ratio_above_200_names_the_image(tmp_path):
    # F37
    (tmp_path / "long.png").write_bytes(as_bytes(Image.new("L", (2270, 10))))
    fails(
        "aspect ratio",
        "image long.png: an image of 10x2270 pixels has an aspect ratio of 227",
        image_of("long.png"),
        tmp_path,
    )


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_decompression_bomb_is_refused_before_it_is_decoded(tmp_path):
    # 100 million pixels of one bit, in a kilobyte or two
    bomb = as_bytes(Image.new("1", (10_000, 10_000)))
    assert len(bomb) < 20_000
    fails("refused media", f"image of {len(bomb)} bytes: .*make it smaller", image_of(bomb), tmp_path)


def test_an_image_given_as_frames_is_refused(tmp_path):
    fails(
        "refused media",
        "image a.png and 1 more: has 2 files; give several frames as a video",
        Media("image", ("a.png", "b.png")),
        tmp_path,
    )


# ---- settings


def test_settings_are_the_same_for_the_same_run_and_tell_others_apart():
    settings = media_reader().settings
    assert settings == media_reader().settings
    others = [media_reader("qwen3_vit"), media_reader(max_pixels=10_000), media_reader(video_fps=1.0),
              media_reader(video_max_frames=8), media_reader(encoder=dict(in_channels=1))]  # fmt: skip
    assert len({settings, *(other.settings for other in others)}) == 6


def test_a_reader_follows_the_checkpoints_rules(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text('{"max_pixels": 3136, "patch_size": 14}')
    config = media_config()
    reader = MediaReader.from_config(config, tmp_path)
    assert (reader.image, reader.video) == (image_rule(config, tmp_path), video_rule(config, tmp_path))
    assert reader.shape(image_of(as_bytes(Image.new("L", (500, 500)))), tmp_path).num_patches == 3136 // 14**2


def test_a_video_may_not_leave_the_root_by_a_frame(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    (root / "0.png").write_bytes(PICTURE)
    (tmp_path / "1.png").write_bytes(PICTURE)
    fails("refused media", "video 0.png and 1 more: leaves the folder", video_of(("0.png", "../1.png")), root)
    (root / "clip").mkdir()
    (root / "clip" / "0.png").write_bytes(PICTURE)
    (root / "clip" / "1.png").symlink_to(tmp_path / "1.png")
    fails("refused media", "video clip: leaves the folder", video_of("clip"), root)
