"""Writes docs/config.md from the schema.

python scripts/make_config_docs.py
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxforge.config.schema import Config
from jaxforge.config.values import annotations, group_class

PAGE = Path(__file__).parents[1] / "docs" / "config.md"

INTRODUCTION = """\
# Config

<!-- Written by scripts/make_config_docs.py from jaxforge/config/schema.py: change it there. -->

A recipe is a Python file whose `get_config()` returns an `ml_collections.ConfigDict` with the fields below:

```python
from jaxforge.config import default_config, model_config


def get_config():
    config = default_config()
    config.model = model_config("qwen2_5_vl_7b")
    config.parallel.tensor_model_parallel_size = 4
    return config
```

`model_config(name)` runs `configs/models/<name>.py`.  Encoders and decoders combine freely:
`config.model.encoder = model_config("qwen3_vl_8b").encoder`.

**Command line.**  `--config.train.steps=20` sets one field and wins over the recipe and over an encoder's YAML file.
Tuples are written `(1,2)` or `1,2`, pairs `((encoder/**,0.1),)`, and `none` is None.

**Encoder from YAML.**  `config.model.encoder = "vit.yaml"`, or `--config.model.encoder=vit.yaml`, reads a file with the
fields of `config.model.encoder`; LoongForge's `_target_` and `${act:silu}` are understood.  `${act:gelu}` means
`gelu_tanh` for qwen3_vit, which the released Qwen3-VL weights need, and `gelu` for qwen2_5_vit.  What the file doesn't
give follows `model_type`: qwen3_vit has an ungated gelu_tanh feed-forward and LayerNorm; qwen2_5_vit attends over the
whole image in layers 7, 15, 23 and 31.

**Errors.**  An unknown field, a wrong type, an impossible combination, a field that would have no effect and a field
that asks for what isn't built yet are errors at start.  `config.yml` in the run directory holds every value, and where
it came from if it isn't a default.

A type in italics is the set of values that a field takes.
"""


def render() -> str:
    """The whole page."""
    return "\n".join([INTRODUCTION, *_group_lines(Config, "config")]).rstrip("\n") + "\n"


def _group_lines(cls: type, path: str) -> Iterator[str]:
    fields = [field for field in dataclasses.fields(cls) if group_class(annotations(cls)[field.name]) is None]
    if fields:
        yield f"## {path}\n\n{cls.__doc__}\n"
        yield "| field | type | default | unit | meaning | Megatron or LoongForge |"
        yield "|---|---|---|---|---|---|"
        yield from (_row(cls, field) for field in fields)
        yield ""
    for name, annotation in annotations(cls).items():
        group = group_class(annotation)
        if group is not None:
            yield from _group_lines(group, f"{path}.{name}")


def _row(cls: type, field: dataclasses.Field) -> str:
    metadata = field.metadata
    if metadata["choices"]:
        kind = "*" + ", ".join(map(str, metadata["choices"])) + "*"
    else:
        kind = _type_name(annotations(cls)[field.name])
    planned = f". **Not built yet** ({metadata['planned']})." if metadata["planned"] else ""
    flag = f"`{metadata['flag']}`" if metadata["flag"] else ""
    cells = (f"`{field.name}`", kind, f"`{field.default}`", metadata["unit"], metadata["meaning"] + planned, flag)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _type_name(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).replace(" | None", " or None")


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
