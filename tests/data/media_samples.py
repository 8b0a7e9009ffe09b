"""Readers, images and reference values that the tests of images and videos share."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from data_configs import vision_config
from PIL import Image

from jaxforge.data.conversation import Media
from jaxforge.data.media import MediaReader

FIXTURES = Path(__file__).parent / "processor_fixtures"  # written by scripts/make_processor_fixtures.py
# The two families, as their checkpoints are published.
QWEN2_5 = dict(model_type="qwen2_5_vit", in_channels=3, patch_size=14, temporal_patch_size=2, window_size=112)
QWEN3 = dict(model_type="qwen3_vit", in_channels=3, patch_size=16, temporal_patch_size=2, window_size=112)
ENCODERS = {"qwen2_5_vit": QWEN2_5, "qwen3_vit": QWEN3}


def fixture(name: str) -> Any:
    """A JSON file of reference values."""
    return json.loads((FIXTURES / name).read_text())


def media_config(family: str = "qwen2_5_vit", encoder: dict | None = None, **data):
    """A run of one family; `encoder` and `data` change fields."""
    return vision_config(
        "synthetic", encoder=dict(image_size=(1344, 1344)) | ENCODERS[family] | (encoder or {}), data=data
    )


def media_reader(family: str = "qwen2_5_vit", encoder: dict | None = None, **data) -> MediaReader:
    """The reader of such a run, without a checkpoint."""
    return MediaReader.from_config(media_config(family, encoder, **data), None)


def image_of(source) -> Media:
    return Media("image", source)


def video_of(source) -> Media:
    return Media("video", source)


def as_bytes(image: Image.Image | np.ndarray, format: str = "PNG", **save) -> bytes:
    """An image file."""
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    file = io.BytesIO()
    image.save(file, format, **save)
    return file.getvalue()


def colours(patches_PC: np.ndarray, reader: MediaReader) -> np.ndarray:
    """Pixels from 0 to 255 [P, channels, frames, patch^2], with the normalisation undone."""
    encoder = reader.encoder
    shape = (len(patches_PC), encoder.in_channels, encoder.temporal_patch_size, encoder.patch_size**2)
    mean, std = np.reshape(reader.image.mean, (-1, 1, 1)), np.reshape(reader.image.std, (-1, 1, 1))
    return (patches_PC.reshape(shape) * std + mean) * 255
