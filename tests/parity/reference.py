"""What scripts/make_parity_fixtures.py stored: models, documents, and what `transformers` makes of them.

The model with layers for multi-token prediction is from scripts/make_multi_token_fixture.py.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from safetensors.numpy import load_file

from jaxforge.checkpoint.hf import load_parameters, read_architecture
from jaxforge.cluster.mesh import build_mesh, mesh_layout
from jaxforge.config.model_schema import EncoderConfig, ModelConfig
from jaxforge.config.schema import Config, DataConfig, LossConfig, ParallelConfig, TrainConfig
from jaxforge.data import Document, Patches, RowFormat, pack_row
from jaxforge.data.patches import patch_positions, patch_windows, stack_frames
from jaxforge.models.moe import is_statistics
from jaxforge.optim.paths import join, split
from jaxforge.training.program import Program, build_program

FIXTURES = Path(__file__).parent / "fixtures"
FAMILIES = {
    "llama": "llama",
    "llama_tied": "llama",
    "qwen2_tied": "qwen2",
    "qwen3_sharded": "qwen3",
    "qwen2_5_vl": "qwen2_5_vl",
    "qwen2_5_vl_tied": "qwen2_5_vl",
    "qwen3_vl": "qwen3_vl",
    "qwen3_vl_tied": "qwen3_vl",
    "qwen3_moe": "qwen3_moe",
    "qwen3_moe_tied": "qwen3_moe",
    "qwen3_vl_moe": "qwen3_vl_moe",
    "deepseek_v3": "deepseek_v3",
    "deepseek_v3_tied": "deepseek_v3",
    "deepseek_v3_mtp": "deepseek_v3",
}
# By which the gradients stored for multi-token prediction have the mean of its losses.
MTP_WEIGHT = 0.6
# Two rows of two documents; each row has padding at its end, of tokens and of patches.
ROWS = ((0, 1), (2, 3))
SEQ_LENGTH, MAX_PATCHES = 124, 188


@functools.cache
def stored(name: str, part: str) -> dict[str, np.ndarray]:
    """The arrays of "inputs" or "expected" of a model; the script says what they are."""
    with np.load(FIXTURES / name / f"{part}.npz") as arrays:
        return dict(arrays)


def expected_gradients(name: str) -> dict[str, np.ndarray]:
    """By the names of the model's tensors."""
    prefix = "gradient/"
    return {key.removeprefix(prefix): value for key, value in stored(name, "expected").items() if prefix in key}


def tensors_in(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a Hugging Face folder."""
    return {key: value for file in sorted(folder.glob("*.safetensors")) for key, value in load_file(file).items()}


def run_config(model: ModelConfig, tensor: int) -> Config:
    """A run at decoder tensor parallel `tensor` and encoder tensor parallel 1."""
    if model.encoder is not None:
        model = dataclasses.replace(model, encoder=dataclasses.replace(model.encoder, tensor_model_parallel_size=1))
    return Config(
        model=model,
        parallel=ParallelConfig(tensor_model_parallel_size=tensor),
        train=TrainConfig(seq_length=SEQ_LENGTH, compute_dtype="float32"),
        loss=LossConfig(mtp_loss_scaling_factor=MTP_WEIGHT),
        data=DataConfig(max_patches_per_row=MAX_PATCHES if model.encoder is not None else None),
    )


class Imported(NamedTuple):
    """A model of the fixtures on `tensor` devices: the run's config, its program, and the weights in their shards.

    Among the parameters are the statistics of routers, which weights come without, as zeros.
    """

    config: Config
    program: Program
    parameters: dict


@functools.cache
def imported(name: str, tensor: int) -> Imported:
    config = run_config(read_architecture(FIXTURES / name).model, tensor)
    mesh = build_mesh(mesh_layout(tensor, tensor=tensor, encoder_tensor=1), jax.devices()[:tensor])
    program = build_program(config, mesh, "cpu")
    parameters = load_parameters(FIXTURES / name, config.model, program.abstract_base)
    return Imported(config, program, join(parameters, zeros_of(program, is_statistics)))


def zeros_of(program: Program, is_taken: Callable[[str], bool]) -> dict:
    """Of what routers keep beside weights, what is taken by its path."""
    taken, _ = split(program.abstract_state.get("router", {}), is_taken)
    return jax.tree.map(lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding), taken)


def documents(name: str, encoder: EncoderConfig | None) -> list[Document]:
    inputs = stored(name, "inputs")
    ends = np.cumsum(inputs["lengths"])
    return [
        Document(
            inputs["input_ids"][start:end].astype(np.int32),
            inputs["loss_mask"][start:end],
            inputs["token_types"][start:end] > 0,
            _media(inputs, number, encoder) if encoder is not None else (),
        )
        for number, (start, end) in enumerate(zip(ends - inputs["lengths"], ends, strict=True))
    ]


def _media(inputs: dict[str, np.ndarray], document: int, encoder: EncoderConfig) -> tuple[Patches, ...]:
    """The images and videos of a document; Qwen3-VL has text between the frames of a video."""
    pixels = np.split(inputs["pixel_values"], np.cumsum(inputs["media_grids"].prod(axis=1))[:-1])
    media: list[Patches] = []
    for index in np.flatnonzero(inputs["media_document"] == document):
        num_frames, down, across = inputs["media_grids"][index].tolist()
        frames = [_frame(patches_PC, (down, across), encoder) for patches_PC in np.split(pixels[index], num_frames)]
        if inputs["media_is_video"][index] and encoder.model_type == "qwen2_5_vit":
            frames = [stack_frames(frames, encoder.tokens_per_second * inputs["media_seconds"][index])]
        media += frames
    return tuple(media)


def _frame(patches_PC: np.ndarray, grid: tuple[int, int], encoder: EncoderConfig) -> Patches:
    return Patches(patches_PC, patch_positions(grid, encoder.spatial_merge_size), grid, patch_windows(grid, encoder))


def packed_rows(name: str, config: Config) -> dict[str, np.ndarray]:
    """All documents in two rows [2, ...]."""
    there = documents(name, config.model.encoder)
    rows = [pack_row([there[number] for number in row], RowFormat.from_config(config)) for row in ROWS]
    return {key: np.stack([row[key] for row in rows]) for key in rows[0]}


def by_token(values_BS: np.ndarray, rows: dict[str, np.ndarray]) -> np.ndarray:
    """[rows, S, ...] to [tokens, ...], documents end to end as they are stored."""
    return values_BS[rows["segment_ids"] > 0]
