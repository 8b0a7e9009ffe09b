"""Bytes and products of a layer's activations, as counted by hand."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxforge.memory.layer_costs import KeptArray, kept_arrays

T, D, F = 6, 4, 10


def shape(*dims, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(dims, dtype)


def costs(layer, trainable, others=()):
    return kept_arrays(layer, trainable, shape(T, D), others)


def test_each_name_has_its_bytes_and_the_products_since_the_names_before_it():
    def layer(weights, x_TD, _):
        up_TF = checkpoint_name(jax.jit(jnp.matmul)(jnp.tanh(x_TD), weights["up_DF"]), "up")
        act_TF = checkpoint_name(jnp.tanh(up_TF), "act")
        return x_TD + jnp.square(checkpoint_name(act_TF @ weights["down_FD"], "down"))

    found = costs(layer, {"up_DF": shape(D, F), "down_FD": shape(F, D)})
    assert found == [
        KeptArray("layer_input", (T, D), 2, 0),
        KeptArray("up", (T, F), 2, 2 * T * D * F),
        KeptArray("act", (T, F), 2, 0),
        KeptArray("down", (T, D), 2, 2 * T * F * D),
    ]
    assert [array.bytes for array in found] == [2 * T * D, 2 * T * F, 2 * T * F, 2 * T * D]


def test_two_products_that_lead_to_one_name_are_both_counted_once():
    def layer(weights, x_TD, _):
        low_TR = x_TD @ weights["a_DR"]
        return jnp.tanh(checkpoint_name(low_TR @ weights["b_RD"] + low_TR[:, :1], "sum"))

    found = costs(layer, {"a_DR": shape(D, 3), "b_RD": shape(3, D)})
    assert found[-1] == KeptArray("sum", (T, D), 2, 2 * T * D * 3 + 2 * T * 3 * D)


def test_what_no_gradient_reads_is_not_kept():
    def layer(weights, x_TD, frozen_DD):
        return x_TD * weights + checkpoint_name(x_TD @ frozen_DD, "product")

    assert [array.name for array in costs(layer, shape(D), shape(D, D))] == ["layer_input"]


def test_arrays_of_other_dtypes_count_their_own_bytes():
    def layer(weights, x_TD, mask_TD):
        kept_TD = checkpoint_name(mask_TD > 0, "mask")
        return jnp.where(kept_TD, x_TD * weights, 0) + jnp.sin(checkpoint_name(x_TD.astype(np.float32), "wide"))

    sizes = {array.name: array.bytes for array in costs(layer, shape(D), shape(T, D))}
    assert sizes["mask"] == T * D and sizes["wide"] == 4 * T * D
