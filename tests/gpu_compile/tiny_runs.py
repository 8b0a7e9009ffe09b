"""A model small enough to compile for GPUs in seconds, whose every tensor has a size of its own."""

import dataclasses

import jax

from jaxforge.cluster.mesh import MeshLayout, build_mesh
from jaxforge.cluster.topology import described_devices, parse_topology
from jaxforge.config.derived import num_microbatches
from jaxforge.config.schema import (
    Config,
    DataConfig,
    DecoderConfig,
    EncoderConfig,
    MemoryConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    ProjectorConfig,
    TrainConfig,
)
from jaxforge.data.batches import BatchLayout
from jaxforge.training.planning import PlanReport, plan
from jaxforge.training.program import build_program

SEQ_LENGTH, PATCHES, WIDTH, LAYERS, MICROBATCHES = 96, 64, 192, 3, 5
ACTIVATION_BYTES = SEQ_LENGTH * WIDTH * 2  # of one row, bfloat16

_DECODER = DecoderConfig(
    num_layers=LAYERS, hidden_size=WIDTH, ffn_hidden_size=320, num_attention_heads=8, num_query_groups=4,
    kv_channels=16, vocab_size=500, mrope_section=(2, 3, 3),
)  # fmt: skip
_ENCODER = EncoderConfig(
    num_layers=2, hidden_size=64, ffn_hidden_size=112, num_attention_heads=4, kv_channels=16, patch_size=4,
    temporal_patch_size=1, image_size=(32, 32), window_size=16, fullatt_block_indexes=(1,),
    recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1,
)  # fmt: skip
_QWEN3 = {
    "model_type": "qwen3_vit", "num_position_embeddings": 16, "deepstack_visual_indexes": (0, 1), "swiglu": False,
    "activation_func": "gelu_tanh", "normalization": "LayerNorm", "fullatt_block_indexes": (), "window_size": 112,
}  # fmt: skip
_FULL = MemoryConfig(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


def language_model(tensor: int, *, sequence_parallel: bool = False, data_parallel: int = 2) -> Config:
    """A decoder alone, for `tensor * data_parallel` GPUs."""
    return Config(
        model=ModelConfig(decoder=_DECODER),
        parallel=ParallelConfig(tensor_model_parallel_size=tensor, sequence_parallel=sequence_parallel),
        memory=_FULL,
        optimizer=OptimizerConfig(lr_warmup_iters=2),
        train=TrainConfig(seq_length=SEQ_LENGTH, global_batch_size=MICROBATCHES * data_parallel),
    )


def vision_language_model(encoder: str, tensor: int, encoder_tensor: int, **options) -> Config:
    """The same decoder with a vision encoder of its own tensor parallel size."""
    config = language_model(tensor, **options)
    changes = {"tensor_model_parallel_size": encoder_tensor} | (_QWEN3 if encoder == "qwen3_vit" else {})
    model = ModelConfig(_DECODER, dataclasses.replace(_ENCODER, **changes), ProjectorConfig())
    return dataclasses.replace(config, model=model, data=DataConfig(max_patches_per_row=PATCHES))


def silent_plan(config: Config, topology: str) -> PlanReport:
    return plan(config, topology, say=lambda line: None)


def compiled_step(config: Config, topology: str) -> jax.stages.Compiled:
    """The train step as the compiler leaves it."""
    cluster = parse_topology(topology)
    mesh = build_mesh(MeshLayout.from_config(config, cluster.num_devices), described_devices(cluster))
    program = build_program(config, mesh, "gpu")
    batch = BatchLayout.from_config(config, mesh, num_microbatches(config, cluster.num_devices)).shapes()
    return program.train_step.lower(program.abstract_state, batch).compile()
