"""Images and videos of samples: from paths, data URIs and bytes to patches, with nothing read outside their folder."""

import base64
import binascii
import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import UnidentifiedImageError

from jaxforge.config.errors import ConfigError
from jaxforge.config.schema import Config, EncoderConfig
from jaxforge.data.conversation import Media, SampleError
from jaxforge.data.image_rules import ImageRule, VideoRule, image_rule, video_rule
from jaxforge.data.images import open_image, resized_pixels, upright, upright_size
from jaxforge.data.patches import Patches, patchify, stack_frames
from jaxforge.data.videos import AnimatedImage, FrameFiles, Video, VideoFile, VideoPlan, plan_video

MAX_DATA_URI = 64 * 2**20  # characters; what is larger belongs into a file
MAX_PATH = 4096  # characters, of Linux; what is longer is often base64 without its head
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
_DATA_URI = re.compile(r"data:(image|video)/[\w.+-]+(;[\w=.+-]+)*;base64,", re.IGNORECASE)
_FRAME_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".avif", ".bmp", ".tif", ".tiff")


@dataclasses.dataclass(frozen=True)
class MediaShape:
    """How much of a row an image or a video takes, known without decoding it.

    Attributes:
      grids: (frames, patches down, patches across) of each run of consecutive visual tokens; a run has
        frames x down x across / spatial_merge_size^2 of them.  An image is one run of one frame; a video is one run of
        all its temporal patches (qwen2_5_vit), or a run for each (qwen3_vit).
      timestamps: seconds of each run of a qwen3_vit video, which its text tells; None for everything else.
    """

    grids: tuple[tuple[int, int, int], ...]
    timestamps: tuple[float, ...] | None = None

    @property
    def num_patches(self) -> int:
        """Patches of all runs."""
        return sum(math.prod(grid) for grid in self.grids)


@dataclasses.dataclass(frozen=True)
class MediaReader:
    """Reads the images and videos of samples.  It holds nothing but settings, so threads may share it.

    Both methods raise SampleError, with the medium's name and the reason, for whatever is wrong with a medium:
    "missing media", "corrupt media", "refused media" (a path that leaves its folder, an address on the network, a
    decompression bomb) or "aspect ratio".  They raise ConfigError where a video file needs PyAV and it isn't installed.

    Attributes:
      encoder: gives the sizes of patches.
      image, video: how images and videos are sized and normalised.
      media_root: the folder that paths start from and may not leave; None is the `root` of each call.
    """

    encoder: EncoderConfig
    image: ImageRule
    video: VideoRule
    media_root: Path | None = None

    @classmethod
    def from_config(cls, config: Config, folder: Path | None) -> "MediaReader":
        """The reader of a run that starts from the checkpoint `folder`, if any.  Raises ConfigError as `image_rule`."""
        image, video = image_rule(config, folder), video_rule(config, folder)
        assert config.model.encoder is not None  # the rules ask for it
        media_root = config.data.media_root
        return cls(config.model.encoder, image, video, None if media_root is None else Path(media_root).expanduser())

    @property
    def settings(self) -> str:
        """All that decides what a medium becomes, as text, the same for equal settings: for hashing."""
        encoder = self.encoder
        sizes = (encoder.model_type, encoder.in_channels, encoder.patch_size, encoder.spatial_merge_size,
                 encoder.temporal_patch_size, encoder.window_size, encoder.tokens_per_second)  # fmt: skip
        return f"{sizes} {self.image.settings} {self.video.settings} media_root={self.media_root}"

    def shape(self, media: Media, root: Path) -> MediaShape:
        """The shape of what `read` gives, from headers alone.  `root` is the folder that paths start from."""
        return self._guarded(media, lambda: self._shape(media, root))

    def read(self, media: Media, root: Path) -> tuple[Patches, ...]:
        """The patches of each run of visual tokens, as `shape` tells them."""
        return self._guarded(media, lambda: self._read(media, root))

    def _shape(self, media: Media, root: Path) -> MediaShape:
        patch = self.encoder.patch_size
        if media.kind == "image":
            with open_image(self._one_file(media, root)) as image:
                height, width = self.image.resized(*upright_size(image))
            return MediaShape(((1, height // patch, width // patch),))
        plan = self._plan(self._video(media, root))
        frames = len(plan.timestamps)
        grid = plan.size[0] // patch, plan.size[1] // patch
        if self._has_timestamps:
            return MediaShape(((1, *grid),) * frames, plan.timestamps)
        return MediaShape(((frames, *grid),))

    def _read(self, media: Media, root: Path) -> tuple[Patches, ...]:
        if media.kind == "image":
            with open_image(self._one_file(media, root)) as image:
                size = self.image.resized(*upright_size(image))
                pixels = resized_pixels(upright(image, self.encoder.in_channels), size)
            return (patchify(self._normalised(pixels), self.encoder),)
        video = self._video(media, root)
        plan = self._plan(video)
        temporal_patches, frames = [], []
        for frame in video.frames(plan.indexes):
            frames.append(resized_pixels(frame, plan.size))
            if len(frames) == self.encoder.temporal_patch_size:
                temporal_patches.append(patchify(self._normalised(np.stack(frames)), self.encoder))
                frames = []
        if self._has_timestamps:
            return tuple(temporal_patches)
        # a product of single precision, as the reference computes it
        time_step = np.float32(self.encoder.tokens_per_second) * np.float32(plan.seconds_per_patch)
        return (stack_frames(temporal_patches, float(time_step)),)

    @property
    def _has_timestamps(self) -> bool:
        return self.encoder.model_type == "qwen3_vit"

    def _plan(self, video: Video) -> VideoPlan:
        return plan_video(video.header, self.encoder, self.image, self.video)

    def _normalised(self, pixels: np.ndarray) -> np.ndarray:
        """Pixels [..., channels] uint8 to float32 of about zero mean and unit variance."""
        mean, std = np.array(self.image.mean, np.float32), np.array(self.image.std, np.float32)
        return (pixels * np.float32(1 / 255) - mean) / std

    def _video(self, media: Media, root: Path) -> Video:
        channels = self.encoder.in_channels
        if isinstance(media.source, tuple):
            if not media.source:
                raise SampleError("missing media", "has no frames")
            return FrameFiles([self._file(path, root) for path in media.source], self.video.fps, channels)
        file = self._content(media.source, root)
        if isinstance(file, Path) and file.is_dir():
            names = sorted((path.name for path in file.iterdir() if _is_frame(path)), key=_in_number_order)
            if not names:
                raise SampleError("missing media", f"is a folder without images ({', '.join(_FRAME_SUFFIXES)})")
            return FrameFiles([self._file(str(file / name), root) for name in names], self.video.fps, channels)
        try:
            return AnimatedImage(_regular(file), channels)
        except UnidentifiedImageError:
            return VideoFile(file, channels)

    def _one_file(self, media: Media, root: Path) -> Path | bytes:
        if isinstance(media.source, tuple):
            raise SampleError("refused media", f"has {len(media.source)} files; give several frames as a video")
        return _regular(self._content(media.source, root))

    def _file(self, source: str, root: Path) -> Path:
        file = _regular(self._content(source, root))
        if isinstance(file, bytes):
            raise SampleError("refused media", "has frames in data URIs; give them as files")
        return file

    def _content(self, source: str | bytes, root: Path) -> Path | bytes:
        """Bytes as they are, a data URI decoded, or an existing path inside the root."""
        if isinstance(source, bytes):
            return source
        if source[:5].lower() == "data:":
            return _decode_data_uri(source)
        if scheme := _SCHEME.match(source):
            raise SampleError(
                "refused media",
                f"is an address ({scheme[1]}), and training fetches nothing; download it first and give its path",
            )
        if not source or "\0" in source:
            raise SampleError("refused media", "is no path")
        if len(source) > MAX_PATH:
            raise SampleError(
                "refused media",
                f"has {len(source)} characters, too many for a path; base64 needs data:image/png;base64, or such"
                " before it",
            )
        top = (self.media_root or root).resolve()
        path = (top / source).resolve()  # follows symbolic links, so that what it names is what is checked
        if not path.is_relative_to(top):
            raise SampleError(
                "refused media",
                f"leaves the folder of media, {top}; copy it there, or set data.media_root to a folder above both",
            )
        if not path.exists():
            raise SampleError("missing media", f"is not in {top}; copy it there, or set data.media_root")
        return path

    def _guarded[T](self, media: Media, work: Callable[[], T]) -> T:
        try:
            return work()
        except SampleError as error:
            raise SampleError(error.kind, f"{_name(media)}: {error}") from error
        except ConfigError:
            raise
        except PermissionError as error:
            raise SampleError("missing media", f"{_name(media)}: may not be read: {error}") from error
        except Exception as error:
            # Pillow and PyAV raise what comes to hand on a broken file: OSError, SyntaxError, ValueError, struct.error,
            # EOFError, MemoryError, and more.  None of them may end a run.
            raise SampleError("corrupt media", f"{_name(media)}: {type(error).__name__}: {error}") from error


def _regular(file: Path | bytes) -> Path | bytes:
    """Refuses what isn't a plain file: a pipe, say, would be waited on for ever."""
    if isinstance(file, Path) and not file.is_file():
        raise SampleError("refused media", "is a folder" if file.is_dir() else "is no regular file")
    return file


def _decode_data_uri(uri: str) -> bytes:
    if len(uri) > MAX_DATA_URI:
        raise SampleError("refused media", f"has {len(uri)} characters, more than {MAX_DATA_URI}; give it as a file")
    head = _DATA_URI.match(uri)
    if head is None:
        raise SampleError("refused media", "is no image or video in base64; expected data:image/png;base64,... or such")
    try:
        return base64.b64decode("".join(uri[head.end() :].split()), validate=True)
    except binascii.Error as error:
        raise SampleError("corrupt media", f"is not base64: {error}") from error


def _name(media: Media) -> str:
    """The medium as a message calls it: its path, or the start of what isn't one."""
    source = media.source
    if isinstance(source, bytes):
        return f"{media.kind} of {len(source)} bytes"
    if isinstance(source, tuple):
        source = f"{source[0]} and {len(source) - 1} more" if source else "()"
    return f"{media.kind} {source if len(source) <= 200 else source[:60] + '...'}"


def _is_frame(path: Path) -> bool:
    return path.suffix.lower() in _FRAME_SUFFIXES and not path.name.startswith(".")


def _in_number_order(name: str) -> list[tuple[int, str]]:
    """Orders frame_2 before frame_10."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
