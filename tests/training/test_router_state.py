"""What routers keep between steps, by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxforge.config.schema import MoeConfig
from jaxforge.ops.routing import CHOSEN, DROPPED, ENTROPY, PROBABILITY, Z
from jaxforge.training.router_state import next_router, router_metrics

LAYERS, EXPERTS = 2, 4
# layer 0 is even; in layer 1 expert 0 has half of 16 choices
LOADS = np.array([[4.0, 4, 4, 4], [8, 4, 4, 0]])


def moe(statistics, bias) -> dict:
    return {"decoder": {"layers": {"moe": {"statistics_5E": statistics, "expert_bias_E": bias}}}}


def statistics() -> np.ndarray:
    """Of 8 tokens that chose 2 experts each."""
    found = np.zeros((LAYERS, 5, EXPERTS), np.float32)
    found[:, CHOSEN] = LOADS
    found[:, PROBABILITY] = [[2, 2, 2, 2], [4, 2, 1, 1]]
    found[:, ENTROPY], found[:, Z], found[1, DROPPED] = 1.0, 0.5, 0.75
    return found


ROUTER_TRAINS = {"decoder": {"layers": {"moe": {"router_DE": jnp.zeros((LAYERS, 3, EXPERTS))}}}}
ELSEWHERE = {"decoder": {"embedding_VD": jnp.zeros((2, 3))}}


@pytest.mark.parametrize("trainable, is_finite, moves", [
    (ROUTER_TRAINS, True, True), (ROUTER_TRAINS, False, False), (ELSEWHERE, True, False),
])  # fmt: skip
def test_a_bias_follows_the_load(trainable, is_finite, moves):
    before = moe(jnp.ones((LAYERS, 5, EXPERTS)), jnp.full((LAYERS, EXPERTS), 0.5))
    only = {"decoder": {"layers": {"moe": {"statistics_5E": jnp.asarray(statistics())}}}}
    config = MoeConfig(moe_router_bias_update_rate=0.25)
    after = next_router(config, before, only, trainable, jnp.bool_(is_finite))["decoder"]["layers"]["moe"]
    expected = np.full((LAYERS, EXPERTS), 0.5)
    if moves:  # the mean load is 4
        expected[1] = [0.25, 0.5, 0.5, 0.75]
    np.testing.assert_array_equal(after["expert_bias_E"], expected)
    np.testing.assert_array_equal(after["statistics_5E"], statistics() if is_finite else 1)


def test_metrics_are_over_layers_that_have_tokens():
    # a third place of the stack is used by no layer
    with_hole = np.concatenate([statistics(), np.zeros((1, 5, EXPERTS), np.float32)])
    found = router_metrics(moe(jnp.asarray(with_hole), jnp.asarray([[0.5, 0, 0, -0.25]])))
    expected = {
        "moe/load_max_mean": 2.0,
        "moe/load_p50": 1.0,
        # sums over experts and 8 tokens: 4 x 1 and 4 x 0.5
        "moe/entropy": 0.5,
        "moe/z_loss": 0.25,
        # 4 experts x (1/4 x 1) in layer 0; in layer 1 4 x (1/2 x 4 + 1/4 x 2 + 1/4 x 1) / 8 = 1.375
        "moe/aux_loss": (1 + 1.375) / 2,
        "moe/dropped_tokens": 3.0,
        "moe/bias_min": -0.25,
        "moe/bias_max": 0.5,
    }
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, err_msg=name)
    assert 0 <= float(found["moe/load_p10"]) < 1 < float(found["moe/load_p90"])
