"""Conversations with images in a .jsonl, as a user has them, and the config of a run that reads them."""

import json

import numpy as np
from data_configs import vision_config
from PIL import Image
from small_tokenizer import qwen_folder

from jaxforge.config.schema import Config

# What each broken line is counted as.
BROKEN = {
    "cut line": "bad json",
    "no image": "missing media",
    "two tags": "media count",
    "half a JPEG": "corrupt media",
    "thin image": "aspect ratio",
}


def write_conversations(folder, count, broken_every=0):
    """`count` lines with an image each, of the kinds of BROKEN in turn at every `broken_every`-th; returns the path."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for number in range(8):
        pixels = rng.integers(0, 256, (24 + 8 * number, 40, 3), np.uint8)
        Image.fromarray(pixels).resize((80, 48 + 16 * number)).save(folder / f"{number}.jpg")
    jpeg = (folder / "3.jpg").read_bytes()
    (folder / "half.jpg").write_bytes(jpeg[: len(jpeg) // 2])
    Image.new("RGB", (10, 2270)).save(folder / "thin.png")
    kinds = list(BROKEN)
    with (folder / "train.jsonl").open("w") as file:
        for number in range(1, count + 1):
            broken = kinds[number // broken_every % len(kinds)] if broken_every and number % broken_every == 0 else None
            file.write(_line(number, broken) + "\n")
    return folder / "train.jsonl"


def _line(number: int, broken: str | None) -> str:
    image = {"no image": "gone.jpg", "half a JPEG": "half.jpg", "thin image": "thin.png"}.get(broken or "")
    tags = "<image>" * (2 if broken == "two tags" else 1)
    sample = {
        "messages": [
            {"role": "user", "content": f"{tags}What is number {number}?"},
            {"role": "assistant", "content": "A picture of noise. " * (1 + number % 7)},
        ],
        "images": [image or f"{number % 8}.jpg"],
    }
    line = json.dumps(sample)
    return line[: len(line) // 2] if broken == "cut line" else line


def conversation_config(folder, path, **data) -> Config:
    """A run on `path`, with a byte-level tokenizer in `folder`; rows have 512 tokens and 1024 patches."""
    return vision_config(
        "auto",
        encoder={"in_channels": 3, "temporal_patch_size": 2},
        decoder={"vocab_size": 300},
        data={
            "path": (str(path),),
            "tokenizer": str(qwen_folder(folder / "tokenizer")),
            "cache_dir": str(folder / "cache"),
            "max_patches_per_row": 1024,
            "min_pixels": 256,
            "eval_samples": 256,
            **data,
        },
        train={"seq_length": 512},
    )
