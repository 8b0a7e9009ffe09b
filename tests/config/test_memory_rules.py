"""What is refused of recompute and offload, with a message that names the fields, and what the fields then mean."""

import pytest

from jaxforge.config import ConfigError, default_config, encoder_defaults, resolve, validate
from jaxforge.config.activations import layer_actions, layer_activations
from jaxforge.config.values import parse

OFFLOADING = {"memory.fine_grained_activation_offloading": True}


def config_with(settings, encoder=None):
    """Four decoder layers; with an encoder of two."""
    config = default_config()
    config.model.decoder.num_layers = 4
    if encoder is not None:
        config.model.encoder = encoder_defaults(encoder)
        config.model.encoder.image_size = (56, 56)
        if encoder == "qwen3_vit":
            config.model.encoder.num_position_embeddings = 16
            config.model.encoder.swiglu = False
        config.data.max_patches_per_row = 32
    for path, value in settings.items():
        *groups, name = path.split(".")
        node = config
        for group in groups:
            node = node[group]
        node[name] = value
    return resolve(config)


def full(group, method="uniform", number=1):
    return {
        f"{group}.recompute_granularity": "full",
        f"{group}.recompute_method": method,
        f"{group}.recompute_num_layers": number,
    }


def selective(group, *modules):
    return {f"{group}.recompute_granularity": "selective", f"{group}.recompute_modules": modules}


# what each part of the model recomputes and offloads
@pytest.mark.parametrize(
    "settings, decoder, encoder",
    [
        ({}, {}, {}),
        (selective("memory"), {"core_attn": "recompute"}, {}),  # Megatron's default
        (
            selective("memory", "mlp", "layernorm"),
            dict.fromkeys(["mlp_gate", "mlp_up", "mlp_act", "attn_norm", "mlp_norm"], "recompute"),
            {},
        ),
        # not gated: no mlp_gate
        (selective("model.encoder", "mlp"), {}, dict.fromkeys(["mlp_up", "mlp_act"], "recompute")),
        (
            OFFLOADING | {"memory.offload_modules": ("attn_norm", "core_attn", "attn_proj", "mlp_norm")},
            dict.fromkeys(["layer_input", "query", "key", "value", "core_attn", "mlp_norm_input"], "offload"),
            {},
        ),
        (OFFLOADING | {"memory.offload_tensors": ("pre_mlp_layernorm_output",)}, {"mlp_norm": "offload"}, {}),
        # the norm's output is recomputed from its input, which comes from host memory
        (
            selective("memory", "layernorm") | OFFLOADING | {"memory.offload_modules": ("mlp_norm",)},
            {"attn_norm": "recompute", "mlp_norm": "recompute", "mlp_norm_input": "offload"},
            {},
        ),
        # a single activation has the last word
        (
            selective("memory", "mlp") | {"memory.activations": (("mlp_gate", "save"), ("query", "offload"))},
            {"mlp_up": "recompute", "mlp_act": "recompute", "query": "offload"},
            {},
        ),
        ({"model.encoder.activations": (("mlp_norm", "offload"),)}, {}, {"mlp_norm": "offload"}),
        (
            full("memory") | OFFLOADING | {"memory.offload_modules": ("attn_norm",)},
            {"layer_input": "offload"},
            {},
        ),
        (full("memory", "block", 3) | {"memory.activations": (("mlp_act", "recompute"),)},
         {"mlp_act": "recompute"}, {}),
        ({"model.decoder.hidden_dropout": 0.1, "memory.activations": (("dropout", "recompute"),)},
         {"dropout": "recompute"}, {}),
        ({"lora.encoder.rank": 2, "model.encoder.activations": (("adapter", "recompute"),)}, {},
         {"adapter": "recompute"}),
        ({"memory.min_offloaded_tensor_size": 2**20, "model.encoder.activations": (("query", "offload"),)}, {},
         {"query": "offload"}),
    ],
)  # fmt: skip
def test_the_fields_say_what_becomes_of_each_activation(settings, decoder, encoder):
    config = config_with(settings, "qwen3_vit")
    validate(config, 8)
    assert layer_actions(config, "decoder") == decoder
    assert layer_actions(config, "encoder") == encoder


NAMES = "layer_input, attn_norm, query, key, value, core_attn, mlp_norm_input, mlp_norm, mlp_gate, mlp_up, mlp_act"


def test_a_layer_has_the_activations_that_its_kind_has():
    config = config_with({}, "qwen3_vit")
    assert ", ".join(layer_activations(config, "decoder")) == NAMES
    assert ", ".join(layer_activations(config, "encoder")) == NAMES.replace("mlp_gate, ", "")


EXPERTS = {"model.decoder.num_experts": 4, "model.decoder.moe_shared_expert_intermediate_size": 8}


def test_layers_with_experts_have_activations_of_their_own():
    of_experts = "router, dispatched_input, expert_fc1, moe_act, shared_gate, shared_up, shared_act"
    feed_forward = "mlp_gate, mlp_up, mlp_act"
    config = config_with(EXPERTS, "qwen3_vit")
    assert ", ".join(layer_activations(config, "decoder")) == NAMES.replace(feed_forward, of_experts)
    config = config_with(EXPERTS | {"model.decoder.moe_layer_freq": (0, 1)}, "qwen3_vit")
    assert ", ".join(layer_activations(config, "decoder")) == f"{NAMES}, {of_experts}"


@pytest.mark.parametrize("module, recomputed", [
    ("moe", {"router", "dispatched_input", "expert_fc1", "moe_act", "shared_gate", "shared_up", "shared_act"}),
    ("moe_act", {"moe_act"}),
    ("routed_experts", {"expert_fc1", "moe_act"}),
    ("shared_experts", {"shared_gate", "shared_up", "shared_act"}),
    ("a2a_overlap_attn", {"attn_norm", "query", "key", "value", "core_attn"}),
    ("a2a_overlap_post_attn", {"mlp_norm", "router"}),
    ("a2a_overlap_mlp", {"expert_fc1", "moe_act", "shared_gate", "shared_up", "shared_act"}),
])  # fmt: skip
def test_modules_of_experts_are_recomputed(module, recomputed):
    overlap = {"parallel.expert_model_parallel_size": 2, "parallel.overlap_moe_expert_parallel_comm": True}
    config = config_with(EXPERTS | overlap | selective("memory", module))
    validate(config, 8)
    assert layer_actions(config, "decoder") == dict.fromkeys(recomputed, "recompute")


def test_what_experts_read_can_lie_in_host_memory():
    moved = OFFLOADING | {"memory.offload_modules": ("expert_fc1", "moe_act")}
    config = config_with(EXPERTS | moved)
    validate(config, 8)
    assert layer_actions(config, "decoder") == {"dispatched_input": "offload", "expert_fc1": "offload"}
    config = config_with(EXPERTS | OFFLOADING | {"memory.offload_tensors": ("dispatched_input",)})
    assert layer_actions(config, "decoder") == {"dispatched_input": "offload"}


@pytest.mark.parametrize(
    "settings, message",
    [
        # words
        (
            selective("memory", "moe_act"),
            "memory.recompute_modules has moe_act, which comes with model.decoder.num_experts, and these layers don't"
            " have it; use core_attn, mlp, layernorm",
        ),
        (
            selective("model.encoder", "mla_up_proj"),
            "model.encoder.recompute_modules has mla_up_proj, which comes with model.decoder.multi_latent_attention,"
            " and these layers don't have it; use core_attn, mlp, layernorm",
        ),
        (
            selective("memory", "a2a_overlap_mlp"),
            "memory.recompute_modules has a2a_overlap_mlp, which comes with"
            " parallel.overlap_moe_expert_parallel_comm, and",
        ),
        (
            selective("memory", "layer_norm"),
            "memory.recompute_modules has 'layer_norm', which is none of core_attn, mlp, layernorm; did you mean"
            " layernorm?",
        ),
        (
            selective("memory", "mlp", "mlp"),
            "memory.recompute_modules=('mlp', 'mlp') names mlp more than once; once is enough",
        ),
        (
            OFFLOADING | {"memory.offload_modules": ("expert_fc1",)},
            "memory.offload_modules has expert_fc1, which comes with model.decoder.num_experts, and these layers don't"
            " have it; use attn_norm, core_attn, attn_proj, mlp_norm",
        ),
        (
            OFFLOADING | {"memory.offload_tensors": ("dispatched_input",)},
            "memory.offload_tensors has dispatched_input, which comes with model.decoder.num_experts, and these layers"
            " don't have it; use pre_mlp_layernorm_output",
        ),
        (
            OFFLOADING | {"memory.offload_modules": ("mlp",)},
            "memory.offload_modules has 'mlp', which is none of attn_norm, core_attn, attn_proj, mlp_norm",
        ),
        (
            {"memory.activations": (("mlp_out", "recompute"),)},
            f"memory.activations has 'mlp_out', which the decoder's layers don't have; they have {NAMES}",
        ),
        (
            {"model.encoder.activations": (("adapter", "recompute"),)},
            f"model.encoder.activations has 'adapter', which the encoder's layers don't have; they have {NAMES}",
        ),
        (
            {"memory.activations": (("query", "keep"),)},
            "memory.activations has the action 'keep' for query; use save, recompute, offload",
        ),
        (
            {"memory.activations": (("query", "offload"), ("query", "recompute"))},
            "memory.activations names query more than once; leave all but one out",
        ),
        (
            {"memory.activations": (("layer_input", "recompute"),)},
            "memory.activations recomputes layer_input, from which everything else is recomputed; save or offload it",
        ),
        # what has no backward pass
        (
            full("model.encoder") | {"optimizer.freeze": ("encoder/**",)},
            "model.encoder.recompute_granularity=full would have no effect, because nothing in the encoder trains",
        ),
        (
            full("model.encoder") | {"lora.decoder.rank": 4},
            "model.encoder.recompute_granularity=full would have no effect, because nothing in the encoder trains",
        ),
        (
            {"model.encoder.activations": (("mlp_act", "recompute"),), "optimizer.freeze": ("encoder/**",)},
            "model.encoder.activations=(('mlp_act', 'recompute'),) would have no effect",
        ),
        # fields that don't go together
        (
            {"memory.recompute_granularity": "selective", "memory.recompute_method": "uniform"},
            "memory.recompute_method=uniform would have no effect, because memory.recompute_granularity is selective;"
            " set that to full or recompute_method to None",
        ),
        (
            {"memory.recompute_granularity": "selective", "memory.recompute_num_layers": 1},
            "memory.recompute_num_layers=1 would have no effect, because memory.recompute_granularity is selective",
        ),
        (
            full("memory") | {"memory.recompute_modules": ("mlp",)},
            "memory.recompute_modules=('mlp',) would have no effect, because memory.recompute_granularity is full; set"
            " that to selective or recompute_modules to ()",
        ),
        (
            {"model.encoder.recompute_modules": ("mlp",)},
            "model.encoder.recompute_modules=('mlp',) would have no effect, because"
            " model.encoder.recompute_granularity is None; set that to selective or recompute_modules to ()",
        ),
        (
            {"memory.offload_modules": ("core_attn",)},
            "memory.offload_modules=('core_attn',) would have no effect with"
            " memory.fine_grained_activation_offloading=False; set that to true, or offload_modules to ()",
        ),
        (
            OFFLOADING,
            "memory.fine_grained_activation_offloading=True moves nothing; name something in memory.offload_modules"
            " (attn_norm, core_attn, attn_proj, mlp_norm) or memory.offload_tensors (pre_mlp_layernorm_output)",
        ),
        (
            {"memory.min_offloaded_tensor_size": 1},
            "memory.min_offloaded_tensor_size=1 would have no effect, because no activation is offloaded; leave it at"
            " None",
        ),
        ({"memory.min_offloaded_tensor_size": 0}, "memory.min_offloaded_tensor_size=0 must be at least 1"),
        # one activation, two decisions
        (
            selective("memory", "core_attn") | OFFLOADING | {"memory.offload_modules": ("attn_proj",)},
            "memory.recompute_modules (core_attn) recomputes core_attn, but memory.offload_modules (attn_proj) offloads"
            " core_attn; an activation is either recomputed or in host memory, so leave one of them out",
        ),
        (
            selective("memory", "layernorm") | OFFLOADING | {"memory.offload_tensors": ("pre_mlp_layernorm_output",)},
            "memory.recompute_modules (layernorm) recomputes mlp_norm, but memory.offload_tensors"
            " (pre_mlp_layernorm_output) offloads mlp_norm",
        ),
        (
            selective("memory", "mlp") | {"memory.activations": (("mlp_up", "recompute"),)},
            "memory.recompute_modules (mlp) recomputes mlp_up, and so does memory.activations (mlp_up, recompute);"
            " leave one of them out",
        ),
        (
            selective("model.encoder", "mlp") | {"model.encoder.activations": (("mlp_up", "offload"),)},
            "model.encoder.recompute_modules (mlp) recomputes mlp_up, but model.encoder.activations (mlp_up, offload)"
            " offloads mlp_up",
        ),
        (
            {"memory.activations": (("mlp_act", "save"),)},
            "memory.activations saves mlp_act, which nothing recomputes or offloads; leave (mlp_act, save) out",
        ),
        # inside of what is recomputed as a whole
        (
            full("memory") | OFFLOADING | {"memory.offload_modules": ("core_attn",)},
            "memory.offload_modules (core_attn) offloads query inside of layers, but"
            " memory.recompute_granularity=full recomputes all of every layer from its input; leave it out, or use"
            " selective or None with memory.activations",
        ),
        (
            full("memory", "block", 4) | {"memory.activations": (("mlp_act", "recompute"),)},
            "memory.activations (mlp_act, recompute) recomputes mlp_act inside of layers",
        ),
        (
            full("model.encoder") | {"model.encoder.activations": (("mlp_act", "offload"),)},
            "model.encoder.activations (mlp_act, offload) offloads mlp_act inside of layers, but"
            " model.encoder.recompute_granularity=full",
        ),
    ],
)
def test_what_cannot_be_or_has_no_effect_is_refused(settings, message):
    with pytest.raises(ConfigError) as error:
        validate(config_with(settings, "qwen2_5_vit"), 8)
    assert str(error.value).startswith(message)


def test_pairs_are_written_on_the_command_line_as_they_are_in_a_recipe():
    pairs = tuple[tuple[str, str], ...]
    assert parse("(mlp_act,recompute)", pairs, "memory.activations") == (("mlp_act", "recompute"),)
    assert parse("(mlp_act,recompute),(query,offload)", pairs, "memory.activations") == (
        ("mlp_act", "recompute"), ("query", "offload")
    )  # fmt: skip
