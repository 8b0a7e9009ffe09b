"""Videos: which frames are taken, how large they become, and reading them from files.

The sampling and sizing are those of the Qwen2-VL and Qwen3-VL video processors, whose checkpoints expect them.
"""

import contextlib
import dataclasses
import io
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from PIL import Image

from jaxforge.config.errors import ConfigError
from jaxforge.config.schema import EncoderConfig
from jaxforge.data.conversation import SampleError
from jaxforge.data.image_rules import ImageRule, VideoRule
from jaxforge.data.images import check_pixels, open_image, upright, upright_size
from jaxforge.data.patches import check_aspect_ratio

MIN_FRAMES = 4  # taken of a short video where it has them, whatever data.video_fps
# Formats that hold all they show.  Playlists and the like are left out: FFmpeg would open the files that they name.
_CONTAINERS = "mov,matroska,avi,mpegts,mpeg,flv,ogg,asf,h264,hevc,ivf,m4v,mpegvideo"
# Degrees counterclockwise, as PyAV and Pillow both count them.
_TURNS = {
    90: Image.Transpose.ROTATE_90,
    -90: Image.Transpose.ROTATE_270,
    180: Image.Transpose.ROTATE_180,
    -180: Image.Transpose.ROTATE_180,
}


class VideoHeader(NamedTuple):
    """What is known of a video before it is decoded.

    Attributes:
      num_frames: in all.
      fps: frames per second.
      height, width: pixels of an upright frame.
      is_sampled: whether these frames were already chosen at `VideoRule.fps`, so that none is left out.
    """

    num_frames: int
    fps: float
    height: int
    width: int
    is_sampled: bool = False


class Video(Protocol):
    """A source of frames."""

    header: VideoHeader

    def frames(self, indexes: Sequence[int]) -> Iterator[Image.Image]:
        """The frames of these indexes, which never decrease, upright and in 8 bits."""
        ...


class VideoPlan(NamedTuple):
    """What is taken of a video.

    Attributes:
      indexes: of its frames, never decreasing; a multiple of temporal_patch_size.
      size: height and width in pixels to which each is resized.
      seconds_per_patch: time from one temporal patch to the next.
      timestamps: seconds of each temporal patch: halfway between its first frame and its last.
    """

    indexes: tuple[int, ...]
    size: tuple[int, int]
    seconds_per_patch: float
    timestamps: tuple[float, ...]


def plan_video(header: VideoHeader, encoder: EncoderConfig, image: ImageRule, video: VideoRule) -> VideoPlan:
    """Which frames of a video are taken, and their size.  Raises SampleError for an unusable shape."""
    temporal = encoder.temporal_patch_size
    sampled = _sampled(header, encoder, video)
    indexes = [*sampled, *itertools.repeat(sampled[-1], -len(sampled) % temporal)]
    check_aspect_ratio(header.height, header.width)
    if encoder.model_type == "qwen3_vit":
        size = _size_of_volume(max(len(sampled), temporal), header, temporal, image, video)
    else:
        most = min(video.max_pixels, video.max_frame_pixels)
        budget = dataclasses.replace(image, min_pixels=min(video.min_pixels, most), max_pixels=most)
        size = budget.resized(header.height, header.width)
    sampled_fps = len(sampled) / header.num_frames * header.fps
    first, last = indexes[::temporal], indexes[temporal - 1 :: temporal]
    return VideoPlan(
        indexes=tuple(indexes),
        size=size,
        seconds_per_patch=temporal / sampled_fps,
        timestamps=tuple((a / header.fps + b / header.fps) / 2 for a, b in zip(first, last, strict=True)),
    )


def _sampled(header: VideoHeader, encoder: EncoderConfig, video: VideoRule) -> list[int]:
    """Indexes of frames spread over the video, `video.fps` of a second."""
    total, temporal = header.num_frames, encoder.temporal_patch_size
    if header.is_sampled and total <= video.max_frames:
        return list(range(total))
    wanted = total / header.fps * video.fps
    if encoder.model_type == "qwen3_vit":
        # from the first frame to the last, both included
        num = min(max(int(wanted), MIN_FRAMES), video.max_frames, total)
        return np.linspace(0, total - 1, num).round().astype(int).tolist()
    # the first frame of each of `num` equal stretches
    most = min(video.max_frames, total) // temporal * temporal
    num = math.floor(min(max(wanted, MIN_FRAMES), most) / temporal) * temporal
    num = num or total  # a video shorter than a temporal patch
    return [i * total // num for i in range(num)]


def _size_of_volume(
    num_frames: int, header: VideoHeader, temporal: int, image: ImageRule, video: VideoRule
) -> tuple[int, int]:
    """Height and width such that all frames together stay within the budget (qwen3_vit)."""
    factor = image.factor
    most = min(video.max_pixels, video.max_frame_pixels * num_frames)
    least = min(video.min_pixels, most)
    height, width = header.height, header.width
    if min(height, width) < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    frames = round(num_frames / temporal) * temporal
    down, across = round(height / factor), round(width / factor)
    volume = frames * down * across * factor**2
    if volume > most:
        shrink = math.sqrt(num_frames * height * width / most)
        down, across = (max(1, math.floor(side / shrink / factor)) for side in (height, width))
    elif volume < least:
        grow = math.sqrt(least / (num_frames * height * width))
        down, across = (math.ceil(side * grow / factor) for side in (height, width))
    return down * factor, across * factor


class FrameFiles:
    """A video given as image files, taken at `fps`."""

    def __init__(self, files: Sequence[Path], fps: float, channels: int):
        self._files, self._channels = files, channels
        with open_image(files[0]) as image:
            self.header = VideoHeader(len(files), fps, *upright_size(image), is_sampled=True)

    def frames(self, indexes: Sequence[int]) -> Iterator[Image.Image]:
        """The frames of these indexes.  Raises SampleError for one that differs in size from the first."""
        for index in indexes:
            with open_image(self._files[index]) as image:
                frame = upright(image, self._channels)
            if (frame.height, frame.width) != (self.header.height, self.header.width):
                raise SampleError(
                    "corrupt media",
                    f"frame {self._files[index].name} has {frame.height}x{frame.width} pixels, the first has"
                    f" {self.header.height}x{self.header.width}; make them one size",
                )
            yield frame


class AnimatedImage:
    """A GIF, WebP or PNG with frames, each shown as long as the first; browsers' 100 ms where it gives no time."""

    def __init__(self, file: Path | bytes, channels: int):
        self._file, self._channels = file, channels
        with open_image(file) as image:
            if image.format in ("WEBP", "AVIF"):
                image.load()  # they give a frame's duration with its pixels alone
            duration = image.info.get("duration", 0)
            frames = getattr(image, "n_frames", 1)
            self.header = VideoHeader(frames, 1000 / (duration if duration > 10 else 100), *upright_size(image))

    def frames(self, indexes: Sequence[int]) -> Iterator[Image.Image]:
        """The frames of these indexes."""
        with open_image(self._file) as image:
            for index in indexes:
                image.seek(index)
                yield upright(image, self._channels)


class VideoFile:
    """A video file, decoded by PyAV.

    The header reads the container's metadata and the first frame, which alone says how the video is turned.  Where the
    container doesn't count its frames, their packets are counted.  Raises ConfigError where PyAV isn't installed.
    """

    def __init__(self, file: Path | bytes, channels: int):
        self._file, self._channels = file, channels
        with self._open() as container:
            stream = _video_stream(container)
            fps = stream.average_rate or stream.guessed_rate
            if not fps:
                raise SampleError("corrupt media", "does not say how many frames it has in a second; encode it again")
            check_pixels(stream.height, stream.width)
            first = next(container.decode(stream), None)
            if first is None:
                raise SampleError("corrupt media", "has no frame that can be decoded; encode it again")
            sides = (first.width, first.height) if abs(first.rotation) == 90 else (first.height, first.width)
            num_frames = stream.frames
        self.header = VideoHeader(num_frames or self._count_packets(), float(fps), *sides)

    def frames(self, indexes: Sequence[int]) -> Iterator[Image.Image]:
        """The frames of these indexes, decoded from the start.

        Containers often count a frame too many, so the last decoded one stands for the last index if that is missing.
        Raises SampleError ("corrupt media") where more are missing.
        """
        done, frame = 0, None
        with self._open() as container:
            for number, frame in enumerate(container.decode(_video_stream(container))):
                while indexes[done] == number:
                    yield self._picture(frame)
                    done += 1
                    if done == len(indexes):
                        return
        if frame is None or indexes[done] != indexes[-1]:
            raise SampleError(
                "corrupt media",
                f"ends before frame {indexes[done]} of {self.header.num_frames}; copy or encode it again",
            )
        for _ in indexes[done:]:
            yield self._picture(frame)

    def _picture(self, frame: Any) -> Image.Image:
        picture = Image.fromarray(frame.to_ndarray(format="rgb24"))
        if frame.rotation in _TURNS:
            picture = picture.transpose(_TURNS[frame.rotation])
        return picture.convert("L") if self._channels == 1 else picture

    def _count_packets(self) -> int:
        with self._open() as container:
            return sum(1 for packet in container.demux(_video_stream(container)) if packet.size)

    @contextlib.contextmanager
    def _open(self) -> Iterator[Any]:
        try:
            import av
        except ImportError as error:
            raise ConfigError(
                "the data have video files, which need PyAV, which is not installed; install the extra jaxforge[video],"
                " or give videos as folders of frames"
            ) from error
        with (
            io.BytesIO(self._file) if isinstance(self._file, bytes) else self._file.open("rb") as file,
            av.open(file, options={"format_whitelist": _CONTAINERS}) as container,
        ):
            yield container


def _video_stream(container: Any) -> Any:
    stream = container.streams.best("video")
    if stream is None:
        raise SampleError("corrupt media", "has no video stream; leave it out of the data")
    return stream
