"""WebDataset tars: files of one name are a sample, and are read where they lie."""

import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxforge.config.errors import ConfigError
from jaxforge.data.conversation import SampleError
from jaxforge.data.formats import SOURCE_KEYS
from jaxforge.data.json_files import parse_object

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")


class TarSamples:
    """The samples of an uncompressed tar.

    A member's key is its path up to the first dot of its name; members of one key are a sample.  Its .json is the
    sample, whose `images` (or `image`) may name members; if it names none, the sample has the group's images in their
    order.  Without a .json, the .txt is a plain text, or the answer to the group's images.  An image becomes a dict of
    its `bytes` and its `path`, as in parquet files of Hugging Face.

    Raises ConfigError where the file isn't such a tar.
    """

    def __init__(self, path: Path):
        self.path = path
        groups: dict[str, list[tuple[str, int, int]]] = {}
        try:
            with tarfile.open(path, "r:") as tar:
                for member in tar:
                    folder, _, name = member.name.rpartition("/")
                    if not member.isfile() or name.startswith("."):
                        continue
                    stem, _, extension = name.partition(".")
                    key = f"{folder}/{stem}" if folder else stem
                    groups.setdefault(key, []).append((extension, member.offset_data, member.size))
        except tarfile.TarError as error:
            raise ConfigError(f"{path} is not an uncompressed tar ({error}); mend it or leave it out") from error
        self._keys = list(groups)
        members = [member for group in groups.values() for member in group]
        self._ends_N = np.cumsum([len(group) for group in groups.values()], dtype=np.int64)
        self._extensions = [extension for extension, _, _ in members]
        self._spans_M2 = np.array([span for _, *span in members], np.int64).reshape(-1, 2)

    def __len__(self) -> int:
        return len(self._keys)

    def raw(self, index: int) -> dict[str, Any]:
        """The sample.  Raises SampleError "bad json", "bad format" or "missing media"."""
        members = self._members(index)
        key = self._keys[index]
        images = {f"{key}.{ext}": span for ext, span in members.items() if f".{ext}".lower().endswith(IMAGE_SUFFIXES)}
        if "json" in members:
            return self._with_images(parse_object(self._read(members["json"])), images)
        if "txt" not in members:
            raise SampleError("bad format", f"has neither a .json nor a .txt, only .{', .'.join(members)}")
        try:
            text = self._read(members["txt"]).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise SampleError("bad format", f"its .txt is not UTF-8 ({error.reason} at byte {error.start})") from error
        if not images:
            return {"text": text}
        return {
            "messages": [
                {"role": "user", "content": "<image>" * len(images)},
                {"role": "assistant", "content": text.strip()},
            ],
            "images": [self._image(*image) for image in images.items()],
        }

    def place(self, index: int) -> str:
        """The sample's key."""
        return self._keys[index]

    def _members(self, index: int) -> dict[str, np.ndarray]:
        """Extension -> (offset, size) of the sample's members."""
        start, end = (int(self._ends_N[index - 1]) if index else 0), int(self._ends_N[index])
        return dict(zip(self._extensions[start:end], self._spans_M2[start:end], strict=True))

    def _with_images(self, sample: dict[str, Any], images: dict[str, np.ndarray]) -> dict[str, Any]:
        """The sample with the bytes of the images that it names, or of all where it names none."""
        named = next((field for field in ("images", "image") if sample.get(field)), None)
        if named is not None:
            names = sample[named] if isinstance(sample[named], list) else [sample[named]]
            return sample | {named: [self._named(name, images) for name in names]}
        # content parts may name their own
        sources = [(part, key) for part in _content_parts(sample) for key in SOURCE_KEYS["image"] if part.get(key)]
        for part, key in sources:
            part[key] = self._named(part[key], images)
        return sample if sources else sample | {"images": [self._image(*image) for image in images.items()]}

    def _named(self, name: Any, images: dict[str, np.ndarray]) -> Any:
        """The member that a sample means by its path in the tar, its name, or its extension; no text stays as it is."""
        if not isinstance(name, str) or name.startswith("data:"):
            return name
        for member, span in images.items():
            file = member.rpartition("/")[2]
            if name in (member, file, file.partition(".")[2]):
                return self._image(member, span)
        raise SampleError(
            "missing media", f"names the image {name!r}; the tar has {', '.join(images) or 'none'} for it"
        )

    def _image(self, name: str, span: np.ndarray) -> dict[str, Any]:
        return {"bytes": self._read(span), "path": name}

    def _read(self, span: np.ndarray) -> bytes:
        with self.path.open("rb") as file:
            file.seek(span[0])
            return file.read(span[1])


def _content_parts(sample: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The OpenAI content parts of a sample, whatever else it is."""
    for message in sample.get("messages") or ():
        content = message.get("content") if isinstance(message, dict) else None
        yield from (part for part in content if isinstance(part, dict)) if isinstance(content, list) else ()
