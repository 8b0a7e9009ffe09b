"""How images and videos are sized and normalised: by the config, the checkpoint's files, or the model's family."""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxforge.config.errors import ConfigError
from jaxforge.config.schema import Config, EncoderConfig
from jaxforge.data.patches import smart_resize

_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_HALF = (0.5, 0.5, 0.5)
_BICUBIC = 3  # Pillow's number, which processor files hold


@dataclasses.dataclass(frozen=True)
class _Family:
    """What the published checkpoints of a family expect; pixels of videos as in `VideoRule`."""

    min_pixels: int
    max_pixels: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    video_min_pixels: int
    video_max_pixels: int


_FAMILIES = {
    "qwen2_5_vit": _Family(56 * 56, 28 * 28 * 1280, _CLIP_MEAN, _CLIP_STD, 128 * 28 * 28, 768 * 28 * 28),
    "qwen3_vit": _Family(65_536, 16_777_216, _HALF, _HALF, 4096, 25_165_824),
}


@dataclasses.dataclass(frozen=True)
class ImageRule:
    """How an image becomes numbers; it is resized by bicubic interpolation of its 8-bit pixels.

    Attributes:
      min_pixels, max_pixels: bounds of its area, in pixels.
      mean, std: of each channel, where 0 is black and 1 is white; one channel uses the first.
      factor: both sides become multiples of it: patch_size x spatial_merge_size, in pixels.
    """

    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    factor: int

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Height and width in pixels that an image is resized to.  Raises SampleError for an unusable shape."""
        return smart_resize(height, width, self.factor, self.min_pixels, self.max_pixels)

    @property
    def settings(self) -> str:
        """All of it as text, the same for equal rules: for hashing."""
        return repr(self)


@dataclasses.dataclass(frozen=True)
class VideoRule:
    """Which frames of a video are taken, and how large they may be.

    Attributes:
      fps: frames taken from a second.
      max_frames: most frames taken.
      min_pixels, max_pixels: bounds of the area of one frame (qwen2_5_vit), or of all frames together (qwen3_vit).
      max_frame_pixels: largest area of one frame: that of an image.
    """

    fps: float
    max_frames: int
    min_pixels: int
    max_pixels: int
    max_frame_pixels: int

    @property
    def settings(self) -> str:
        """All of it as text, the same for equal rules: for hashing."""
        return repr(self)


def image_rule(config: Config, folder: Path | None) -> ImageRule:
    """The rule for a run's images.

    Args:
      config: data.min_pixels and data.max_pixels win over everything.
      folder: of the checkpoint that the run starts from, if any; its processor_config.json or preprocessor_config.json
        says the rest.  Without it, the family's numbers hold, and no image is larger than model.encoder.image_size.

    Raises:
      ConfigError: for a file that disagrees with model.encoder or asks for something else than bicubic resizing to
        normalised pixels, and for bounds that leave no size.
    """
    encoder = _encoder(config)
    family = _FAMILIES[encoder.model_type]
    values, file = _processor(folder, "image_processor", "preprocessor_config.json")
    _check(values, file, encoder)
    low, high = _bounds(values, file)
    if high is None:
        high = min(family.max_pixels, math.prod(encoder.image_size))
    asked = config.data.min_pixels
    max_pixels = high if config.data.max_pixels is None else config.data.max_pixels
    # only a bound that the run asks for can be wrong; a checkpoint's lower one gives way to the run's upper one
    min_pixels = min(low or family.min_pixels, max_pixels) if asked is None else asked
    factor = encoder.patch_size * encoder.spatial_merge_size
    if max_pixels < factor**2:
        raise ConfigError(
            f"data.max_pixels={max_pixels} is less than one visual token of {factor}x{factor} pixels; use"
            f" {factor**2} or more"
        )
    if not 0 < min_pixels <= max_pixels:
        raise ConfigError(
            f"data.min_pixels={min_pixels} must be positive and no more than the largest area of an image, {max_pixels}"
            f" pixels; lower it or set data.max_pixels"
        )
    mean, std = _channels(values, file, "image_mean", family.mean), _channels(values, file, "image_std", family.std)
    if not all(std):
        raise ConfigError(f"{file}: image_std={list(std)} has a 0, by which pixels can't be divided; correct it")
    return ImageRule(min_pixels, max_pixels, mean[: encoder.in_channels], std[: encoder.in_channels], factor)


def video_rule(config: Config, folder: Path | None) -> VideoRule:
    """The rule for a run's videos.

    Frames are counted by data.video_fps and data.video_max_frames.  Their area is bounded by the checkpoint's
    processor_config.json or video_preprocessor_config.json, else by the family's numbers, and no frame is larger than
    an image may be.  Raises ConfigError as `image_rule`, and for counts that leave no frame.
    """
    encoder, data = _encoder(config), config.data
    family = _FAMILIES[encoder.model_type]
    image = image_rule(config, folder)
    values, file = _processor(folder, "video_processor", "video_preprocessor_config.json")
    _check(values, file, encoder)
    low, high = _bounds(values, file)
    for name, expected in (("image_mean", image.mean), ("image_std", image.std)):
        if _channels(values, file, name, expected)[: len(expected)] != expected:
            raise ConfigError(f"{file}: {name}={values[name]} is not that of images, {list(expected)}; make them agree")
    if data.video_fps <= 0:
        raise ConfigError(f"data.video_fps={data.video_fps} must be positive; the default is 2 frames per second")
    if data.video_max_frames < encoder.temporal_patch_size:
        raise ConfigError(
            f"data.video_max_frames={data.video_max_frames} is less than one temporal patch of"
            f" model.encoder.temporal_patch_size={encoder.temporal_patch_size} frames; use that or more"
        )
    max_pixels = high or family.video_max_pixels
    return VideoRule(
        fps=data.video_fps,
        max_frames=data.video_max_frames,
        min_pixels=min(low or family.video_min_pixels, max_pixels),
        max_pixels=max_pixels,
        max_frame_pixels=image.max_pixels,
    )


def _encoder(config: Config) -> EncoderConfig:
    encoder = config.model.encoder
    if encoder is None:
        raise ConfigError("model.encoder=None reads no images; give the model an encoder, or leave out the images")
    if encoder.in_channels not in (1, 3):
        raise ConfigError(
            f"model.encoder.in_channels={encoder.in_channels}: images are read in 3 channels (colour) or 1 (grey)"
        )
    return encoder


def _processor(folder: Path | None, nested: str, plain: str) -> tuple[Mapping[str, Any], Path | None]:
    """A processor's settings and the file that they are in: nested in processor_config.json, else a file of its own."""
    for name in ("processor_config.json", plain):
        file = None if folder is None else folder / name
        if file is None or not file.is_file():
            continue
        try:
            values = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file} is not readable JSON: {error}; copy it again from the checkpoint") from error
        if name != plain:
            values = values.get(nested) if isinstance(values, dict) else values
            if values is None:
                continue
        if not isinstance(values, dict):
            raise ConfigError(f"{file} does not hold the settings of an {nested}; copy it again from the checkpoint")
        return values, file
    return {}, None


def _check(values: Mapping[str, Any], file: Path | None, encoder: EncoderConfig) -> None:
    """What the encoder decides, and what is done in one way alone."""
    fields = {"patch_size": "patch_size", "merge_size": "spatial_merge_size",
              "temporal_patch_size": "temporal_patch_size"}  # fmt: skip
    for name, field in fields.items():
        if name in values and values[name] != getattr(encoder, field):
            raise ConfigError(
                f"{file}: {name}={values[name]}, but model.encoder.{field}={getattr(encoder, field)}; use the"
                f" architecture of that checkpoint"
            )
    fixed = {"do_resize": True, "do_rescale": True, "do_normalize": True, "resample": _BICUBIC}
    for name, right in fixed.items():
        if values.get(name, right) != right:
            raise ConfigError(f"{file}: {name}={values[name]} is not supported; images are read with {name}={right}")
    scale = values.get("rescale_factor", 1 / 255)
    if not isinstance(scale, float) or not math.isclose(scale, 1 / 255, rel_tol=1e-6):
        raise ConfigError(f"{file}: rescale_factor={scale} is not supported; images are read with 1/255")


def _bounds(values: Mapping[str, Any], file: Path | None) -> tuple[int | None, int | None]:
    """Smallest and largest area, each None where the file doesn't say: min_pixels, else size.shortest_edge."""
    size = values.get("size") or {}
    if not isinstance(size, dict):
        raise ConfigError(f"{file}: size={size} must give shortest_edge and longest_edge, in pixels of area")
    bounds = []
    for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        value = values.get(name)
        value = size.get(edge) if value is None else value
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ConfigError(f"{file}: {name}={value!r} must be a positive number of pixels")
        bounds.append(value)
    return bounds[0], bounds[1]


def _channels(values: Mapping[str, Any], file: Path | None, name: str, default: tuple[float, ...]) -> tuple[float, ...]:
    value = values.get(name)
    if value is None:
        return default
    if not (isinstance(value, list) and len(value) == 3 and all(isinstance(each, int | float) for each in value)):
        raise ConfigError(f"{file}: {name}={value!r} must be three numbers, one of each channel")
    return tuple(float(each) for each in value)
