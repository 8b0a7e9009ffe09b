"""Latent attention against `transformers`' DeepSeek-V3: scripts/make_latent_attention_fixture.py made the numbers."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_models import decoder_of, document, model_function, random_parameters, row, tiny_config

from jaxforge.config.schema import AdapterConfig, DecoderConfig, LoraConfig
from jaxforge.models.decoder import DecoderLayer
from jaxforge.models.latent_attention import LatentAttention
from jaxforge.models.lora import merge
from jaxforge.models.rope import decoder_angles, decoder_frequencies, rotation_scale, score_scale
from jaxforge.ops.attention import row_segments
from jaxforge.ops.placement import SINGLE_DEVICE

FIXTURE = Path(__file__).parent / "latent_attention.npz"
DOCUMENTS = (45, 19)
WIDTHS = dict(qk_head_dim=6, qk_pos_emb_head_dim=8, v_head_dim=5, kv_lora_rank=10)
YARN = dict(
    rope_type="yarn", rotary_base=81.0, rotary_scaling_factor=8.0, original_max_position_embeddings=16, beta_fast=2.0,
    beta_slow=0.5, mscale=0.7, mscale_all_dim=1.2,
)  # fmt: skip
CONFIGS = {
    name: DecoderConfig(multi_latent_attention=True, hidden_size=24, num_attention_heads=4, **WIDTHS, **changes)
    for name, changes in {
        "yarn": dict(q_lora_rank=12, **YARN),
        "no query compression": dict(rotary_base=100.0),
    }.items()
}


def stored(name: str) -> dict[str, np.ndarray]:
    with np.load(FIXTURE) as file:
        return {key.removeprefix(f"{name}/"): file[key] for key in file.files if key.startswith(f"{name}/")}


def halves(a: np.ndarray) -> np.ndarray:
    """The last 8 columns, whose rotated pairs lie side by side, with the pairs 4 apart."""
    return np.concatenate([a[..., :-8], a[..., -8::2], a[..., -7::2]], axis=-1)


def as_ours(tensors: dict[str, np.ndarray], kind: str) -> dict:
    """Weights or gradients of a case, which torch keeps [outputs, inputs], under our names."""

    def heads(name, width):
        tensor = tensors[f"{kind}/{name}.weight"].T
        return tensor.reshape(len(tensor), 4, width)

    found = {
        "kv_down_DR": halves(tensors[f"{kind}/kv_a_proj_with_mqa.weight"].T),
        "kv_norm": {"scale": tensors[f"{kind}/kv_a_layernorm.weight"]},
        "kv_up_RHK": heads("kv_b_proj", 6 + 5),
        "out_HVD": tensors[f"{kind}/o_proj.weight"].T.reshape(4, 5, 24),
    }
    if f"{kind}/q_proj.weight" in tensors:
        return found | {"query_DHK": halves(heads("q_proj", 6 + 8))}
    return found | {
        "query_down_DR": tensors[f"{kind}/q_a_proj.weight"].T,
        "query_norm": {"scale": tensors[f"{kind}/q_a_layernorm.weight"]},
        "query_up_RHK": halves(heads("q_b_proj", 6 + 8)),
    }


def layer_and_gradients(config: DecoderConfig, backend: str, weights: dict, x_SD: np.ndarray, dy_SD: np.ndarray):
    """y, and the gradients of weights and x, of both documents in one row with padding between and behind them."""
    places = np.r_[0:45, 48 : 48 + 19]  # of 70
    x_BSD, dy_BSD = np.zeros((2, 1, 70, x_SD.shape[1]), np.float32)
    # padding that would be seen if it could be
    x_BSD[:] = 9.0
    x_BSD[0, places], dy_BSD[0, places] = x_SD, dy_SD
    segments, positions = np.zeros((1, 70), np.int32), np.zeros((1, 3, 70), np.int32)
    segments[0, places] = np.repeat([1, 2], DOCUMENTS)
    positions[0, :, places] = np.concatenate([np.arange(length) for length in DOCUMENTS])[:, None]

    def make():
        return LatentAttention(config, backend=backend, placement=SINGLE_DEVICE, rngs=nnx.Rngs(params=0))

    graph, state = nnx.split(nnx.eval_shape(make))
    assert jax.tree.map(jnp.shape, weights) == jax.tree.map(lambda a: a.shape, nnx.to_pure_dict(state))
    mask = row_segments(jnp.asarray(segments), causal=True, backend=backend)
    angles = decoder_angles(jnp.asarray(positions), decoder_frequencies(config))

    @jax.jit
    def run(weights, x_BSD):
        y_BSD, back = jax.vjp(lambda weights, x: nnx.merge(graph, weights)(x, angles, mask), weights, x_BSD)
        return y_BSD, *back(jnp.asarray(dy_BSD))

    with jax.default_matmul_precision("highest"):
        y_BSD, gradients, dx_BSD = run(weights, x_BSD)
    return y_BSD[0, places], gradients, dx_BSD[0, places]


def close(actual, expected, what=""):
    # two fp32 computations of some dozens of operations
    np.testing.assert_allclose(actual, expected, atol=1e-5 * np.abs(expected).max(), rtol=0, err_msg=what)


@pytest.mark.parametrize(
    "name, backend",
    [("yarn", "xla"), ("no query compression", "xla"), pytest.param("yarn", "flash", marks=pytest.mark.slow)],
)
def test_packed_documents_have_the_numbers_and_gradients_of_transformers(name, backend):  # F23
    case, config = stored(name), CONFIGS[name]
    y, gradients, dx = layer_and_gradients(config, backend, as_ours(case, "weight"), case["x"], case["dy"])
    close(y, case["y"])
    close(dx, case["dx"])
    expected = as_ours(case, "gradient")
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        reference = expected
        for key in path:
            reference = reference[key.key]
        close(gradient, reference, jax.tree_util.keystr(path))


@pytest.mark.parametrize("name", CONFIGS)
def test_rotations_are_those_of_transformers(name):
    case = stored(name)
    # in fp32 there, with a power, a product and a quotient
    np.testing.assert_allclose(decoder_frequencies(CONFIGS[name])[0], case["frequencies"], rtol=5e-7)
    assert rotation_scale(CONFIGS[name]) == pytest.approx(float(case["rotation_scale"]), rel=1e-9)


# transformers 5.24: ROPE_INIT_FUNCTIONS["yarn"], for 64 rotated features
DEEPSEEK_V3 = """
1.0000000e+00 7.4989420e-01 5.6234133e-01 4.2169651e-01 3.1622776e-01 2.3713736e-01 1.7782794e-01 1.3335215e-01
1.0000000e-01 7.4989416e-02 5.6234129e-02 3.9006926e-02 2.6879361e-02 1.8378144e-02 1.2447956e-02 8.3345091e-03
5.5000004e-03 3.5619973e-03 2.2493652e-03 1.3705135e-03 7.9056941e-04 4.1499041e-04 1.7782794e-04 3.3338034e-05
2.4999999e-05 1.8747354e-05 1.4058533e-05 1.0542412e-05 7.9056945e-06 5.9284343e-06 4.4456983e-06 3.3338035e-06
"""
LONG_BASE = """
1.0000000e+00 6.4938164e-01 4.2169651e-01 2.7384198e-01 1.7782794e-01 1.1547820e-01 7.4989416e-02 4.8696753e-02
3.1622779e-02 2.0535251e-02 1.3335215e-02 8.6596431e-03 5.1547955e-03 3.0431177e-03 1.7785303e-03 1.0266177e-03
5.8333337e-04 3.2469083e-04 1.7570687e-04 9.1280650e-05 4.4456985e-05 2.8869548e-05 1.8747356e-05 1.2174189e-05
7.9056936e-06 5.1338125e-06 3.3338035e-06 2.1649109e-06 1.4058534e-06 9.1293532e-07 5.9284343e-07 3.8498163e-07
"""


@pytest.mark.parametrize(
    "changes, frequencies, rotation, scores",
    [
        # softmax's scale times sqrt(192) in DeepseekV3Attention: (0.1 ln 40 + 1)^2
        (dict(mscale_all_dim=1.0), DEEPSEEK_V3, 1.0, 1.8738542070926265),
        (
            dict(rotary_base=1e6, rotary_scaling_factor=4.0, original_max_position_embeddings=32768, mscale=0.707,
                 mscale_all_dim=0.5),
            LONG_BASE, 1.0268361529030026, 1.143433966251171,
        ),
        # without mscale_all_dim
        (
            dict(rotary_base=1e6, rotary_scaling_factor=4.0, original_max_position_embeddings=32768),
            LONG_BASE, 1.138629436111989, 1.0,
        ),
    ],
    ids=["DeepSeek-V3", "two coefficients", "one coefficient"],
)  # fmt: skip
def test_yarn_has_the_frequencies_and_scales_of_transformers(changes, frequencies, rotation, scores):
    config = DecoderConfig(multi_latent_attention=True, rope_type="yarn", **changes)
    np.testing.assert_allclose(decoder_frequencies(config)[0], np.array(frequencies.split(), float), rtol=2e-6)
    assert rotation_scale(config) == pytest.approx(rotation, rel=1e-9)
    assert score_scale(config) == pytest.approx(scores, rel=1e-9)


LATENT = dict(multi_latent_attention=True, q_lora_rank=6, **WIDTHS)


def latent_config(**changes):
    """The tiny decoder; kv_channels and groups unused."""
    groups = dict(num_query_groups=DecoderConfig.num_query_groups, kv_channels=DecoderConfig.kv_channels)
    return tiny_config(None, decoder_changes=groups | LATENT | changes)


def test_a_document_in_a_row_has_the_logits_it_has_alone():  # F23
    config = latent_config()
    parameters, logits = random_parameters(config), model_function(config, "logits")
    documents = [document(config, 1, after=5, seed=1), document(config, 2, after=4, seed=2)]
    both = logits(parameters, batched(row(config, *documents)))[0]
    for start, one in ((0, documents[0]), (6, documents[1])):
        length = len(one.tokens)
        alone = logits(parameters, batched(row(config, one)))[0]
        # the same sums among other zeros
        np.testing.assert_allclose(both[start : start + length], alone[:length], atol=1e-5)


def batched(one):
    return {key: value[None] for key, value in one.items()}


def test_adapters_are_terms_of_every_projection():
    lora = LoraConfig(decoder=AdapterConfig(rank=2, alpha=3.0))
    config = latent_config()
    adapted = dataclasses.replace(config, lora=lora)
    parameters = random_parameters(adapted)
    attention = parameters["decoder"]["layers"]["attention"]
    names = {name.removesuffix("_lora_a") for name in attention if name.endswith("_lora_a")}
    assert names == {"query_down_DR", "query_up_RHK", "kv_down_DR", "kv_up_RHK", "out_HVD"}
    # W + 1.5 A B of each
    for name in names:
        a, b, weight = (attention[name + suffix] for suffix in ("_lora_a", "_lora_b", ""))
        by_hand = weight + 1.5 * np.stack([np.tensordot(a[i], b[i], 1) for i in range(2)])
        np.testing.assert_allclose(merge(parameters, lora)["decoder"]["layers"]["attention"][name], by_hand, atol=1e-5)
    rows = batched(row(config, document(config, 3, after=6, seed=3)))
    expected = model_function(config, "logits")(jax.tree.map(np.asarray, merge(parameters, lora)), rows)
    found = model_function(adapted, "logits")(parameters, rows)
    np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())


def test_values_and_scales_are_computed_in_the_dtype_of_the_parameters():
    config = latent_config().model.decoder
    graph, state = nnx.split(
        nnx.eval_shape(lambda: DecoderLayer(config, backend="xla", placement=SINGLE_DEVICE, rngs=nnx.Rngs(params=0)))
    )
    parameters = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.bfloat16), nnx.to_pure_dict(state))
    x, angles = jax.ShapeDtypeStruct((1, 8, 16), jnp.bfloat16), jax.ShapeDtypeStruct((1, 8, 4), jnp.float32)
    segments = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    y = jax.eval_shape(lambda p, x, a, s: nnx.merge(graph, p)(x, a, s), parameters, x, angles, segments)
    assert (y.shape, y.dtype) == ((1, 8, 16), jnp.bfloat16)


def test_llamas_scaling_goes_with_latent_attention_too():
    # the frequencies alone, of as many features as rotate
    changes = dict(use_rope_scaling=True, rotary_base=5e5)
    latent = DecoderConfig(multi_latent_attention=True, qk_pos_emb_head_dim=32, **changes)
    plain = decoder_of(None, kv_channels=32, **changes)
    assert np.array_equal(decoder_frequencies(latent), decoder_frequencies(plain))
