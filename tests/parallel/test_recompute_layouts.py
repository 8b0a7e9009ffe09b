"""Whatever is recomputed or lies in host memory meanwhile, loss and gradients are those of one device.

With other options, and in more layouts, in test_option_pairs.py.  On simulated CPU devices the copies to host memory
and back are left out when a program is lowered; all else of it is the program of a GPU, whose copies
tests/gpu_compile/test_activation_memory.py looks at.
"""

import dataclasses

import numpy as np
import pytest
from encoder_cases import FULL_HETERO_DP, HETERO_TP, assert_all_are_those_of_one_device, vision_problem
from encoder_cases import Case as VisionCase
from one_device import loss_and_gradients
from pipeline_cases import Case, problem, text_config, twelve_rows
from tiny_models import random_parameters

from jaxforge.config import ConfigError
from jaxforge.config.schema import AdapterConfig, Config, LoraConfig, MemoryConfig
from jaxforge.training.program import row_keys

MODULES = ("core_attn", "mlp", "layernorm")
SELECTIVE = MemoryConfig(recompute_granularity="selective", recompute_modules=MODULES)
OFFLOAD = MemoryConfig(
    fine_grained_activation_offloading=True, offload_modules=("attn_norm", "core_attn", "attn_proj", "mlp_norm")
)
NORMS_AND_OFFLOAD = dataclasses.replace(OFFLOAD, recompute_granularity="selective", recompute_modules=("layernorm",))
# the first layer of a stage keeps its input alone, in host memory like that of the others
BLOCK_AND_SINGLE = MemoryConfig(
    "full", "block", 1, activations=(("layer_input", "offload"), ("mlp_act", "recompute"), ("key", "offload"))
)
EVERYTHING_IN_HOST_MEMORY = dataclasses.replace(
    OFFLOAD,
    offload_tensors=("pre_mlp_layernorm_output",),
    activations=tuple((name, "offload") for name in ("attn_norm", "mlp_gate", "mlp_up", "mlp_act")),
)

TEXT = [
    (Case(1, tensor=2, data=2, sequence_parallel=True), SELECTIVE),
    (Case(2, 2, uneven=True, tensor=2, data=2), EVERYTHING_IN_HOST_MEMORY),
    (Case(4, 1, uneven=True, data=2, sharding="optim_grads_params"), BLOCK_AND_SINGLE),
]
# what the encoder does beside
VISION = [
    (
        VisionCase("qwen2_5_vit", HETERO_TP, tensor=2, encoder_tensor=2, data=2),
        OFFLOAD,
        dict(recompute_granularity="selective", recompute_modules=MODULES, activations=(("query", "offload"),)),
    ),
    (
        VisionCase("qwen3_vit", FULL_HETERO_DP, 2, 2, uneven=True, tensor=2),
        NORMS_AND_OFFLOAD,
        dict(recompute_granularity="full", recompute_method="block", recompute_num_layers=1,
             activations=(("layer_input", "offload"), ("mlp_act", "recompute"), ("mlp_up", "offload"))),
    ),
]  # fmt: skip


def with_memory(config: Config, memory: MemoryConfig, encoder=()) -> Config:
    model = config.model
    if encoder:
        model = dataclasses.replace(model, encoder=dataclasses.replace(model.encoder, **encoder))
    return dataclasses.replace(config, memory=memory, model=model)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_text_model_has_the_gradients_of_one_device(compiler):
    assert_all_are_those_of_one_device(
        compiler, ((f"{case} {memory}", case, with_memory(case.config(), memory), problem()) for case, memory in TEXT)
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_vision_model_has_the_gradients_of_one_device(compiler):
    assert_all_are_those_of_one_device(
        compiler,
        (
            (f"{case} {memory} {more}", case, with_memory(case.config(), memory, more), vision_problem(case.encoder))
            for case, memory, more in VISION
        ),
    )


@pytest.mark.slow
def test_adapters_and_dropout_are_kept_recomputed_and_offloaded_like_everything_else(compiler):
    lora = LoraConfig(decoder=AdapterConfig(rank=3, alpha=3.0))
    dropout = dict(hidden_dropout=0.3)
    alone = dataclasses.replace(text_config(decoder_changes=dropout), lora=lora)
    parameters, rows = random_parameters(alone), twelve_rows(alone)
    rows = rows | {"dropout_keys": np.asarray(row_keys(0, 0, (1, len(rows["tokens"]))))[0]}
    expected = (parameters, rows, *loss_and_gradients(alone, parameters, rows))
    runs = []
    for action, case in (("recompute", Case(2, 1, data=2, micro_batch=2)), ("offload", Case(1, data=2, micro_batch=2))):
        memory = MemoryConfig(activations=(("adapter", action), ("dropout", action), ("mlp_norm", action)))
        config = dataclasses.replace(case.config(decoder_changes=dropout), lora=lora, memory=memory)
        runs.append((f"{case} {memory}", case, config, expected))
    assert_all_are_those_of_one_device(compiler, runs)


def test_a_pipeline_of_which_every_layer_is_recomputed_has_nothing_inside_to_decide_on():
    # two layers in each of four stages
    case = Case(4, 1)
    memory = MemoryConfig("full", "block", 2, activations=(("mlp_act", "recompute"),))
    with pytest.raises(ConfigError, match="recomputes mlp_act inside of layers, but memory.recompute_granularity=full"):
        case.program(with_memory(case.config(), memory))
    uneven = dataclasses.replace(case, uneven=True)  # four in some
    uneven.program(with_memory(uneven.config(), memory))


def test_a_size_that_no_activation_reaches_is_refused_with_the_largest():
    # one row of 16 tokens in fp32, and a layer's input over 2 devices
    case = Case(1, tensor=2, sequence_parallel=True)
    smallest = 16 * 16 * 4 // 2 + 1
    memory = dataclasses.replace(OFFLOAD, offload_modules=("attn_norm",), min_offloaded_tensor_size=smallest)
    with pytest.raises(ConfigError, match="=513 leaves every activation on the device: the largest.* is layer_input of"
                                          " the decoder, 512 bytes of a layer on each device"):  # fmt: skip
        case.program(with_memory(case.config(), memory))
    case.program(with_memory(case.config(), dataclasses.replace(memory, min_offloaded_tensor_size=512)))
