"""A Hugging Face folder as parameters, and parameters as a Hugging Face folder."""

import contextlib
import fnmatch
import itertools
import json
import logging
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np

from jaxforge.checkpoint.arrays import ArrayReader, abstract_parameters, flatten, layers_of, load, piece_shape
from jaxforge.checkpoint.hf import (
    deepseek_v3,
    experts,
    llama,
    multi_token,
    qwen2,
    qwen2_5_vl,
    qwen3,
    qwen3_moe,
    qwen3_vl,
    qwen3_vl_moe,
)
from jaxforge.checkpoint.hf.folder import SHARD_BYTES, TensorFolder, write_tensors
from jaxforge.checkpoint.hf.tensors import Expert, Tensor
from jaxforge.checkpoint.new_folder import new_folder
from jaxforge.config.errors import ConfigError
from jaxforge.config.hf_config import (
    config_json_of,
    differences,
    family_of,
    read_architecture,
    read_by,
    read_config_json,
)
from jaxforge.config.hf_experts import MTP_LAYERS, WITH_MTP
from jaxforge.config.model_schema import ModelConfig

Tree = Any
Shape = tuple[int, ...]
_log = logging.getLogger(__name__)
MAPS: dict[str, ModuleType] = {
    "llama": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
    "qwen3_moe": qwen3_moe,
    "qwen3_vl_moe": qwen3_vl_moe,
    "deepseek_v3": deepseek_v3,
}
# What goes along with the weights: tokenizer, processors, generation settings.  Never code, never pickles.
_COMPANIONS = ("*.json", "*.txt", "*.jinja", "*.model", "LICENSE*", "README*")
# Of those, what a tokenizer is made of, with its chat template.
_TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*")
_NOT_COMPANIONS = ("config.json", "*.index.json", "*.safetensors")
# Buffers that old releases saved, and that follow from config.json.
_COMPUTED = ("*rotary_emb.inv_freq", "*masked_bias", "*.attn.bias")
_HEAD = "lm_head.weight"
# Fields of an architecture that names and shapes of tensors show, so that patterns on names can allow a difference.
_SHOWN_BY_TENSORS = (
    "num_layers", "hidden_size", "ffn_hidden_size", "vocab_size", "untie_embeddings_and_output_weights",
    "num_position_embeddings", "num_experts", "moe_layer_freq", "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank",
)  # fmt: skip


class HFArrays:
    """The parameters of a Hugging Face folder, as an ArrayReader.

    Args:
      model: what the weights are for; the folder's own architecture must be the same, but for sizes where patterns
        allow tensors to differ.  Layers for multi-token prediction are left out, with a warning, where it has none.
      allow_missing: patterns on tensor names that the folder may lack, or have in another shape.
      allow_unexpected: patterns on tensor names of the folder that nothing reads.

    Attributes:
      absent: names of the tensors that the folder lacks and may lack.

    Raises ConfigError with the tensors that are missing, unexpected or of another shape, or the fields of the
    architecture that differ.
    """

    def __init__(
        self,
        folder: str | Path,
        model: ModelConfig,
        allow_missing: Sequence[str] = (),
        allow_unexpected: Sequence[str] = (),
    ):
        architecture = read_architecture(folder)
        self.family = architecture.family
        self._theirs = architecture.model.decoder
        lines = differences(model, read_by(model, architecture.model))
        if allow_missing or allow_unexpected:
            shown = _SHOWN_BY_TENSORS + (("mtp_num_layers",) if self.family in WITH_MTP else ())
            lines = [line for line in lines if line.split()[0].rpartition(".")[2] not in shown]
        if lines:
            raise ConfigError(
                f"the model of the config isn't that of {folder}: {'; '.join(lines)}.  Take the folder's own with"
                f" --config.model={folder}, or config.model = hf_model({str(folder)!r}) in the recipe"
            )
        self._folder = TensorFolder(folder)
        self.shapes: Mapping[str, tuple[int, ...]] = {
            path: leaf.shape for path, leaf in flatten(abstract_parameters(model)).items()
        }
        tensors = _map_of(self.family, model, self.shapes, self._folder.shapes, experts.LAYOUTS)
        self._tensors: dict[str, list[Tensor]] = {}
        for tensor in tensors:
            for path in () if tensor.is_copy else tensor.paths:
                self._tensors.setdefault(path, []).append(tensor)
        self.absent = self._check(tensors, model, allow_missing, allow_unexpected)

    def has(self, path: str, layer: int | None) -> bool:
        # of parts either all are absent, or none
        return self._tensors[path][0].name_in(layer) not in self.absent

    def read(self, path: str, layer: int | None) -> np.ndarray:
        if parts := [tensor for tensor in self._tensors[path] if isinstance(tensor, Expert)]:
            return self._read_experts(parts, layer)
        [tensor] = self._tensors[path]
        shapes = [piece_shape(each, self.shapes[each]) for each in tensor.paths]
        return tensor.to_ours(self._folder.read(tensor.name_in(layer)), shapes)[tensor.paths.index(path)]

    def _read_experts(self, tensors: Sequence[Expert], layer: int | None) -> np.ndarray:
        """One layer of a parameter of all experts, beside which one tensor at a time is in memory."""
        whole: np.ndarray | None = None
        for tensor in tensors:
            [matrix] = tensor.to_ours(self._folder.read(tensor.name_in(layer)), ())
            if whole is None:
                whole = np.empty((len(tensors), *matrix.shape), matrix.dtype)
            whole[tensor.number] = matrix
        assert whole is not None
        return whole

    def _check(
        self,
        tensors: list[Tensor],
        model: ModelConfig,
        allow_missing: Sequence[str],
        allow_unexpected: Sequence[str],
    ) -> set[str]:
        """Raises where the folder isn't the model's; the names of what is allowed to be absent and is."""
        there = self._folder.shapes
        known = {name: (tensor, shapes) for name, tensor, shapes in pieces(tensors, self.shapes)}
        wanted = {name: tensor.hf_shape(shapes) for name, (tensor, shapes) in known.items() if not tensor.is_copy}
        missing = [name for name in wanted if name not in there]
        mismatched = [name for name, shape in wanted.items() if name in there and there[name] != shape]
        unread = self._leave_out_mtp(known) if not model.decoder.mtp_num_layers else set()
        unexpected = [
            name for name in there if name not in known and name not in unread and not _matches(name, _COMPUTED)
        ]
        is_tied = not model.decoder.untie_embeddings_and_output_weights
        if is_tied and _HEAD in unexpected and not _matches(_HEAD, allow_unexpected):
            unexpected.remove(_HEAD)
            self._check_tied_head(tensors[0].name)
        absent = {name for name in missing + mismatched if _matches(name, allow_missing)}
        partly = _of_incomplete_pieces(tensors, self.shapes, absent)
        absent -= partly
        self._refuse_if_without_mtp(wanted, [name for name in missing if name not in absent], model)
        problems = [
            *(
                f"missing: {name} {list(wanted[name])}"
                + (" (other experts of its layer are there: leave out all or none)" if name in partly else "")
                for name in missing
                if name not in absent
            ),
            *(
                f"another shape: {name} is {list(there[name])}, the model's is {list(wanted[name])}"
                for name in mismatched
                if name not in absent
            ),
            *(f"unexpected: {name} {list(there[name])}" for name in unexpected if not _matches(name, allow_unexpected)),
        ]
        if problems:
            shown = problems[:8] + ([f"and {len(problems) - 8} more"] if len(problems) > 8 else [])
            raise ConfigError(
                f"the tensors of {self._folder.path} aren't those of a {self.family} model of this architecture:\n  "
                + "\n  ".join(shown)
                + "\nuse the folder of the whole model, or name what may differ in checkpoint.init_allow_missing and"
                " checkpoint.init_allow_unexpected (jaxforge.convert has --allow-unexpected)"
            )
        for field, patterns, names in (
            ("init_allow_missing", allow_missing, missing + mismatched),
            ("init_allow_unexpected", allow_unexpected, unexpected),
        ):
            for pattern in patterns:
                if not any(_matches(name, (pattern,)) for name in names):
                    raise ConfigError(f"checkpoint.{field} has {pattern!r}, which matches no such tensor; remove it")
        return absent

    def _leave_out_mtp(self, known: Collection[str]) -> set[str]:
        """The folder's tensors of layers for multi-token prediction, which the model has none of; warns of them."""
        patterns = multi_token.patterns(self._theirs)
        found = [name for name in self._folder.shapes if name not in known and _matches(name, patterns)]
        if found:
            _log.warning(
                "%s: %d tensors of %d layer(s) for multi-token prediction are left out (%s, ...);"
                " model.decoder.mtp_num_layers=%d keeps them",
                self._folder.path, len(found), len(patterns), found[0], len(patterns),
            )  # fmt: skip
        return set(found)

    def _refuse_if_without_mtp(self, wanted: Collection[str], missing: Collection[str], model: ModelConfig) -> None:
        """transformers saves folders whose config.json promises layers that it never made."""
        promised = self._theirs.mtp_num_layers
        of_mtp = [name for name in wanted if _matches(name, multi_token.patterns(model.decoder))]
        if promised and of_mtp and set(of_mtp) <= set(missing):
            raise ConfigError(
                f"{self._folder.path}: its config.json has {MTP_LAYERS[0]}={promised}, but no tensor of these layers is"
                f" there ({of_mtp[0]}, ...); leave them out with model.decoder.mtp_num_layers=0, or with"
                f" {MTP_LAYERS[0]}=0 in that config.json (for jaxforge.convert)"
            )

    def _check_tied_head(self, embedding: str) -> None:
        """Some tools save a tied head too; then it must be the embedding."""
        if embedding not in self._folder.shapes:
            return  # and said to be missing
        if not np.array_equal(self._folder.read(_HEAD), self._folder.read(embedding)):
            raise ConfigError(
                f"{self._folder.path}: config.json ties head and embedding, but {_HEAD} isn't {embedding}; set"
                " tie_word_embeddings to false there"
            )


def load_parameters(
    folder: str | Path,
    model: ModelConfig,
    abstract: Tree | None = None,
    *,
    allow_missing: Sequence[str] = (),
    allow_unexpected: Sequence[str] = (),
    initial: Tree | None = None,
) -> Tree:
    """The parameters of a Hugging Face folder, streamed tensor by tensor into the shards of `abstract`.

    Args:
      abstract: nested dict of ShapeDtypeStruct with shardings; by default fp32 on one device.
      initial: arrays like `abstract`, donated, for the tensors that `allow_missing` lets the folder lack.

    Raises:
      ConfigError: as `HFArrays`.
    """
    reader = HFArrays(folder, model, allow_missing, allow_unexpected)
    return load(reader, abstract_parameters(model) if abstract is None else abstract, initial)


def export(
    folder: str | Path,
    parameters: ArrayReader,
    model: ModelConfig,
    *,
    family: str | None = None,
    source: str | Path | None = None,
    tokenizer: str | Path | None = None,
    dtype: str = "bfloat16",
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a folder that transformers loads; it appears under its name when it is complete.

    Every process calls it; the primary writes.

    Args:
      parameters: fp32 or less, by path; padded vocabulary rows aren't written.
      family: of FAMILIES; by default that of `source`, else the one that the model's kinds are of.
      source: the Hugging Face folder that the weights came from: its config.json is the base of the new one, its tensor
        names are kept, and its tokenizer and processor files are copied.
      tokenizer: the folder of another tokenizer, with which the weights were trained; its files take the place of
        those of `source`; without a source its processor files go along too.
      dtype: bfloat16, float16 or float32.

    Raises:
      ConfigError: if the folder exists, or the family can't express the model.
    """
    family, written = exported_config(model, family, source)
    tensors = _map_of(family, model, parameters.shapes, _shapes_in(source))
    _set_dtype(written, dtype)
    by_name = {name: (tensor, layer) for tensor, name, layer in _named(tensors, parameters.shapes)}
    shapes = [(name, tensor.hf_shape(ours)) for name, tensor, ours in pieces(tensors, parameters.shapes)]
    held: dict[tuple[Any, int | None], list[np.ndarray]] = {}

    def read(name: str) -> np.ndarray:
        tensor, layer = by_name[name]
        if (tensor.paths, layer) not in held:
            # the tensors of experts are read together, and written one after the other
            held.clear()
            held[tensor.paths, layer] = [parameters.read(path, layer) for path in tensor.paths]
        return tensor.to_hf(held[tensor.paths, layer])

    is_primary = jax.process_index() == 0
    with new_folder(Path(folder)) if is_primary else contextlib.nullcontext() as unfinished:
        dtypes = {name: tensor.dtype for name, (tensor, _) in by_name.items() if tensor.dtype is not None}
        write_tensors(unfinished, shapes, dtype, read, shard_bytes, dtypes)
        if unfinished is not None:
            (unfinished / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
            companions = tokenizer if source is None else source
            if companions is not None:
                copy_companions(Path(companions), unfinished)
            if tokenizer is not None:
                _replace_tokenizer(Path(tokenizer), unfinished)


def exported_config(
    model: ModelConfig, family: str | None = None, source: str | Path | None = None
) -> tuple[str, dict[str, Any]]:
    """(family, config.json but for its dtype) of what `export` would write.  Raises ConfigError as it does."""
    base = read_config_json(source) if source is not None else None
    family = family or (base.get("model_type") if base is not None else family_of(model))
    return str(family), config_json_of(model, str(family), base)


def copy_companions(source: Path, target: Path) -> None:
    """Copies tokenizer, processor and generation files; neither weights nor code."""
    for file in sorted(source.iterdir()):
        if file.is_file() and _matches(file.name, _COMPANIONS) and not _matches(file.name, _NOT_COMPANIONS):
            shutil.copyfile(file, target / file.name)


def _replace_tokenizer(source: Path, target: Path) -> None:
    """Puts a tokenizer's files in the place of those that are there."""
    for file in target.iterdir():
        if _matches(file.name, _TOKENIZER):
            file.unlink()
    for file in sorted(source.iterdir()):
        if file.is_file() and _matches(file.name, _TOKENIZER) and _matches(file.name, _COMPANIONS):
            shutil.copyfile(file, target / file.name)


def pieces(tensors: Sequence[Tensor], shapes: Mapping[str, Shape]) -> Iterator[tuple[str, Tensor, list[Shape]]]:
    """(name there, its kind, the shapes here) of every tensor of a map; `shapes` are those of whole parameters."""
    for tensor, name, _ in _named(tensors, shapes):
        yield name, tensor, [piece_shape(path, shapes[path]) for path in tensor.paths]


def _named(tensors: Sequence[Tensor], shapes: Mapping[str, Shape]) -> Iterator[tuple[Tensor, str, int | None]]:
    """The name there and the layer here of each tensor of a map; those of one piece follow each other."""
    for paths, parts in itertools.groupby(tensors, key=lambda tensor: tensor.paths):
        of_paths = list(parts)
        for layer in layers_of(paths[0], shapes[paths[0]]):
            yield from ((tensor, tensor.name_in(layer), layer) for tensor in of_paths)


def _of_incomplete_pieces(tensors: Sequence[Tensor], shapes: Mapping[str, Shape], absent: set[str]) -> set[str]:
    """Of absent tensors those of pieces that aren't absent as a whole: a piece is read, or keeps its values."""
    if not absent:
        return set()
    found: set[str] = set()
    for _, parts in itertools.groupby(_named(tensors, shapes), key=lambda named: (named[0].paths, named[2])):
        names = {name for _, name, _ in parts}
        if not names <= absent:
            found |= names & absent
    return found


def _map_of(
    family: str,
    model: ModelConfig,
    shapes: Mapping[str, Shape],
    there: Mapping[str, Shape],
    layouts: Sequence[str] = (),
) -> list[Tensor]:
    """The map of a family under which most of the tensors `there` have their names and shapes.

    Args:
      layouts: of experts, among which to look beside the published one.
    """
    module = MAPS[family]
    maps = [module.tensors(model, prefixes) for prefixes in module.PREFIXES]
    if hasattr(module, "PUBLISHED_EXPERTS"):
        maps += [module.tensors(model, prefixes, layout) for layout in layouts for prefixes in module.PREFIXES]

    def num_found(tensors):
        return sum(there.get(name) == tensor.hf_shape(ours) for name, tensor, ours in pieces(tensors, shapes))

    return max(maps, key=num_found)


def _shapes_in(source: str | Path | None) -> Mapping[str, Shape]:
    """The shapes of a folder's tensors by name; none for a folder without weights."""
    try:
        return TensorFolder(source).shapes if source is not None else {}
    except ConfigError:
        return {}


def _set_dtype(config_json: dict[str, Any], dtype: str) -> None:
    """Both names of the field: transformers 5 calls it dtype, transformers 4 torch_dtype."""
    config_json |= {"dtype": dtype, "torch_dtype": dtype}
    for part in ("text_config", "vision_config"):
        if part in config_json:
            kept = {key: value for key, value in config_json[part].items() if key not in ("dtype", "torch_dtype")}
            config_json[part] = kept


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
