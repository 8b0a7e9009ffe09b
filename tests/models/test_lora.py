"""Adapters against the model whose weights they were merged into, by hand and by loops."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from flax import nnx
from tiny_models import ENCODERS, model_function, random_parameters, rows_of_many_kinds, tiny_config

from jaxforge.config.errors import ConfigError
from jaxforge.config.schema import AdapterConfig, LoraConfig
from jaxforge.models.lora import adapter_scale, merge, trained_patterns
from jaxforge.training.program import make_model

# W = W + scale A B of one layer, with R the rank: what an adapter is, for every projection that there is
PRODUCTS = {
    "query_DHK": "DR,RHK->DHK", "key_DGK": "DR,RGK->DGK", "value_DGK": "DR,RGK->DGK", "out_HKD": "HKR,RD->HKD",
    "gate_DF": "DR,RF->DF", "up_DF": "DR,RF->DF", "down_FE": "FR,RE->FE",
}  # fmt: skip
# scales are alpha / rank = 3 and alpha / sqrt(rank) = 1.5 and 2
LORA = LoraConfig(
    decoder=AdapterConfig(rank=3, alpha=9.0),
    encoder=AdapterConfig(rank=4, alpha=3.0, use_rslora=True),
    projector=AdapterConfig(rank=1, alpha=2.0),
)
SCALES = {"decoder": 3.0, "encoder": 1.5, "projector": 2.0}


def with_lora(config, lora=LORA):
    return dataclasses.replace(config, lora=lora)


def by_path(tree, prefix=""):
    """Path to array, of a nested dict."""
    leaves = {}
    for name, child in tree.items():
        leaves |= by_path(child, f"{prefix}{name}/") if isinstance(child, dict) else {f"{prefix}{name}": child}
    return leaves


def nested(leaves):
    tree: dict = {}
    for path, array in leaves.items():
        *folders, name = path.split("/")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = array
    return tree


def paths_of(config):
    return sorted(by_path(nnx.to_pure_dict(nnx.state(abstract_model(config)))))


def abstract_model(config):
    return nnx.eval_shape(lambda: make_model(config, "xla", nnx.Rngs(params=0)))


def adapted_paths(config):
    return sorted(path.removesuffix("_lora_a") for path in paths_of(config) if path.endswith("_lora_a"))


def is_stacked(path):
    return "/layers/" in path or "/deepstack/" in path


def merged_by_hand(parameters):
    """Layer by layer, in float64."""
    leaves = by_path(parameters)
    merged = {path: array for path, array in leaves.items() if not path.endswith(("_lora_a", "_lora_b"))}
    for path in merged:
        if f"{path}_lora_a" not in leaves:
            continue
        equation, scale = PRODUCTS[path.rsplit("/", 1)[1]], SCALES[path.partition("/")[0]]
        weight, a, b = (np.asarray(leaves[path + end], np.float64) for end in ("", "_lora_a", "_lora_b"))
        if is_stacked(path):
            new = np.stack([w + scale * np.einsum(equation, *ab) for w, *ab in zip(weight, a, b, strict=True)])
        else:
            new = weight + scale * np.einsum(equation, a, b)
        merged[path] = new.astype(np.float32)
    return nested(merged)


@pytest.fixture(scope="module", params=ENCODERS)
def adapted(request):
    """A vision-language model with adapters everywhere, its random parameters, and its logits with and without them."""
    config = tiny_config(request.param)
    adapted = with_lora(config)
    logits, plain_logits = model_function(adapted, "logits"), model_function(config, "logits")
    return random_parameters(adapted), rows_of_many_kinds(config), logits, plain_logits


def test_an_adapter_whose_b_is_zero_changes_no_bit(adapted):
    parameters, rows, logits, plain_logits = adapted
    leaves = by_path(parameters)
    zeroed = nested({path: array * (not path.endswith("_lora_b")) for path, array in leaves.items()})
    base = nested({path: array for path, array in leaves.items() if "_lora_" not in path})
    assert np.array_equal(logits(zeroed, rows), plain_logits(base, rows))


def test_adapters_give_the_logits_of_the_weights_that_they_are_merged_into(adapted):
    parameters, rows, logits, plain_logits = adapted
    expected = np.asarray(plain_logits(merged_by_hand(parameters), rows))
    base = nested({path: array for path, array in by_path(parameters).items() if "_lora_" not in path})
    # the adapters matter; fp32 rounds sums of dozens of terms in another order
    assert np.abs(plain_logits(base, rows) - expected).max() > 0.1 * np.abs(expected).max()
    np.testing.assert_allclose(logits(parameters, rows), expected, atol=1e-5 * np.abs(expected).max())


def test_merging_gives_the_weights_merged_by_hand_and_the_paths_of_the_model_without_adapters():
    config = tiny_config("qwen3_vit")
    parameters = random_parameters(with_lora(config))
    merged, expected = by_path(jax.jit(merge, static_argnums=1)(parameters, LORA)), by_path(merged_by_hand(parameters))
    assert sorted(merged) == sorted(expected) == paths_of(config)
    for path, array in expected.items():
        # products of numbers of order 0.1, with sums of up to 4 terms
        np.testing.assert_allclose(merged[path], array, atol=1e-6, err_msg=path)
        assert merged[path].dtype == np.float32


@pytest.mark.slow
def test_gradients_of_adapters_follow_from_those_of_the_merged_weights():
    # dL/dA = scale dL/dW B^T and dL/dB = scale A^T dL/dW, by the chain rule
    config = tiny_config("qwen3_vit")
    adapted = with_lora(config)
    parameters, rows = random_parameters(adapted), rows_of_many_kinds(config)

    def gradients(config, parameters):
        graph = nnx.graphdef(abstract_model(config))
        return by_path(jax.jit(jax.grad(lambda p: nnx.merge(graph, p).loss(rows)[0]))(parameters))

    leaves, found = by_path(parameters), gradients(adapted, parameters)
    of_weights = gradients(config, merged_by_hand(parameters))
    checked = set()
    for path, gradient in of_weights.items():
        if f"{path}_lora_a" not in leaves:
            continue
        name = path.rsplit("/", 1)[1]
        (a_dims, b_dims), w_dims = PRODUCTS[name].split("->")[0].split(","), PRODUCTS[name].split("->")[1]
        a, b, dw = (np.asarray(x, np.float64) for x in (leaves[f"{path}_lora_a"], leaves[f"{path}_lora_b"], gradient))
        stack = "L" if is_stacked(path) else ""
        scale = SCALES[path.partition("/")[0]]
        expected_a = scale * np.einsum(f"{stack}{w_dims},{stack}{b_dims}->{stack}{a_dims}", dw, b)
        expected_b = scale * np.einsum(f"{stack}{a_dims},{stack}{w_dims}->{stack}{b_dims}", a, dw)
        for end, expected in (("_lora_a", expected_a), ("_lora_b", expected_b)):
            # the project's limit for gradients: 1e-5 of the largest entry
            atol = 1e-5 * np.abs(expected).max()
            np.testing.assert_allclose(found[path + end], expected, atol=atol, rtol=0, err_msg=path + end)
        checked.add(name)
    assert checked == PRODUCTS.keys()


def test_the_scale_is_alpha_by_the_rank_or_by_its_root():
    assert adapter_scale(AdapterConfig(rank=16, alpha=32.0)) == 2
    assert adapter_scale(AdapterConfig(rank=16, alpha=32.0, use_rslora=True)) == 8


def test_every_projection_has_an_adapter_by_default_and_nothing_else():
    found = adapted_paths(with_lora(tiny_config("qwen2_5_vit")))
    gated = ["mlp/down_FE", "mlp/gate_DF", "mlp/up_DF"]
    layer = [f"attention/{name}" for name in ("key_DGK", "out_HKD", "query_DHK", "value_DGK")] + gated
    assert found == [
        *(f"decoder/layers/{name}" for name in layer),
        *(f"encoder/layers/{name}" for name in layer),
        "projector/merger/mlp/down_FE",
        "projector/merger/mlp/up_DF",
    ]


def test_targets_choose_projections_of_their_component():
    lora = LoraConfig(
        decoder=AdapterConfig(rank=2, targets=("**/query_*", "layers/attention/value_DGK")),
        projector=AdapterConfig(rank=2, targets=("deepstack/**",)),
    )
    assert adapted_paths(with_lora(tiny_config("qwen3_vit"), lora)) == [
        "decoder/layers/attention/query_DHK",
        "decoder/layers/attention/value_DGK",
        "projector/deepstack/mlp/down_FE",
        "projector/deepstack/mlp/up_DF",
    ]


def test_a_starts_uniform_within_the_root_of_its_inputs_and_b_at_zero():
    config = tiny_config(None, decoder_changes=dict(num_layers=8, hidden_size=64, ffn_hidden_size=32))
    model = make_model(with_lora(config, LoraConfig(decoder=AdapterConfig(rank=16))), "xla", nnx.Rngs(params=0))
    attention = model.decoder.layers.attention
    # 8 heads of width 8 go into out, and 64 features into query: 8 x 64 x 16 draws each
    for name in ("query_DHK", "out_HKD"):
        a = np.asarray(getattr(attention, f"{name}_lora_a")[...])
        assert a.size == 8 * 64 * 16
        assert 0.124 < np.abs(a).max() <= 1 / 8
        assert a.std() == pytest.approx(1 / 8 / math.sqrt(3), rel=0.03) and abs(a.mean()) < 0.003
        assert not np.array_equal(a[0], a[1])
        assert not np.any(getattr(attention, f"{name}_lora_b")[...])


def test_adapters_do_not_change_what_the_other_parameters_start_from():
    config = tiny_config(None)
    lora = LoraConfig(decoder=AdapterConfig(rank=2))
    plain, adapted = (
        by_path(nnx.to_pure_dict(nnx.state(make_model(one, "xla", nnx.Rngs(params=3)))))
        for one in (config, with_lora(config, lora))
    )
    assert set(plain) < set(adapted)
    for path, array in plain.items():
        assert np.array_equal(array, adapted[path]), path


@pytest.mark.parametrize(
    "lora, message",
    [
        (
            LoraConfig(decoder=AdapterConfig(rank=2, targets=("**/mlp/*", "**/q_proj"))),
            r"lora\.decoder\.targets has '\*\*/q_proj', which matches no projection of the decoder; there are"
            r" layers/attention/key_DGK, .*layers/mlp/up_DF",
        ),
        # a norm and a table aren't projections
        (LoraConfig(encoder=AdapterConfig(rank=2, targets=("**/mlp_norm/*",))), "'\\*\\*/mlp_norm/\\*'"),
        (LoraConfig(decoder=AdapterConfig(rank=2, targets=("head_VD",))), "'head_VD'"),
        (
            # 12 is the width of the feed-forward, 16 that of the model
            LoraConfig(decoder=AdapterConfig(rank=13, targets=("**/up_DF",))),
            r"lora\.decoder\.rank=13 is more than the smaller side of decoder/layers/mlp/up_DF, 16 x 12; use at most"
            r" 12, or leave it out of lora\.decoder\.targets",
        ),
    ],
)
def test_a_target_that_is_no_projection_or_too_narrow_is_refused(lora, message):
    with pytest.raises(ConfigError, match=message):
        abstract_model(with_lora(tiny_config("qwen2_5_vit"), lora))


def test_a_rank_as_large_as_the_smaller_side_is_possible():
    lora = LoraConfig(decoder=AdapterConfig(rank=12, targets=("**/up_DF",)))
    assert adapted_paths(with_lora(tiny_config(None), lora)) == ["decoder/layers/mlp/up_DF"]


@pytest.mark.parametrize(
    "train_also, freeze, message",
    [
        (("decodr/**",), (), r"lora\.train_also has 'decodr/\*\*', which matches no parameter beside the adapters"),
        (("*_lora_b",), (), "matches no parameter beside the adapters; folders are decoder, decoder/final_norm"),
        (
            ("decoder/head_VD", "decoder/final_norm/*"),
            ("decoder/final_norm/scale",),
            r"lora\.train_also has 'decoder/final_norm/\*', but optimizer\.freeze=.* freezes all that it matches",
        ),
    ],
)
def test_what_trains_also_must_have_an_effect(train_also, freeze, message):
    lora = LoraConfig(decoder=AdapterConfig(rank=2), train_also=train_also)
    with pytest.raises(ConfigError, match=message):
        trained_patterns(lora, freeze, ["decoder/head_VD", "decoder/final_norm/scale"])
