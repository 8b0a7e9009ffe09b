"""Tokens to their experts and back, over devices in every layout, against a loop over experts on one device."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxforge.ops.expert_dispatch import KINDS, Dispatcher

T, D, E, K = 20, 6, 8, 3  # tokens of all devices: 5 of each of 4, an odd number
RNG = np.random.default_rng(0)
X = RNG.normal(size=(T, D)).astype(np.float32)
WEIGHTS = RNG.uniform(0.1, 1, size=(T, K)).astype(np.float32)
PARAMETERS = RNG.normal(size=(E, D, D)).astype(np.float32)
COTANGENT = RNG.normal(size=(T, D)).astype(np.float32)

# the devices of "2x2", and those of "4" in two nodes, lie on two nodes
LAYOUTS = {"1": (1,), "2": (2,), "4": (4,), "2x2": (2, 2), "4 in two nodes": (4,)}
# with 4 ranks there are fewer experts on a rank than choices, with 2 more
ALL = [
    (kind, layout)
    for kind in KINDS
    for layout in LAYOUTS
    if kind == {"1": "alltoall", "4 in two nodes": "flex"}.get(layout, kind)
]
everywhere = pytest.mark.parametrize(("kind", "layout"), ALL, ids=["-".join(pair) for pair in ALL])


def random_choices():
    return np.stack([RNG.permutation(E)[:K] for _ in range(T)]).astype(np.int32)


def routings():
    spread = random_choices()
    one_expert = np.full((T, K), E, np.int32)
    one_expert[:, 1] = 5
    # of 2 and of 4 ranks the first has no expert that is chosen
    idle_rank = np.where(spread < E // 2, E, spread).astype(np.int32)
    padding = spread.copy()
    padding[3:7] = E  # whole tokens, over two devices
    padding[11, 0] = padding[15, 2] = E
    idle_source = spread.copy()
    idle_source[10:] = E  # the last half of the devices routes nothing
    return {
        "spread": spread, "one expert": one_expert, "idle rank": idle_rank, "padding": padding,
        "idle source": idle_source, "nothing": np.full((T, K), E, np.int32),
    }  # fmt: skip


ROUTINGS = routings()


def dense(x_TD, weights_TK, parameters_EDD, experts_TK, is_kept_TK=True):
    """Every expert on every token."""
    all_TED = jnp.tanh(jnp.einsum("td,edf->tef", x_TD, parameters_EDD, precision="highest"))
    y_TD = jnp.zeros_like(x_TD)
    for expert in range(E):
        weight_T = jnp.sum(jnp.where((experts_TK == expert) & is_kept_TK, weights_TK, 0), axis=1)
        y_TD += weight_T[:, None] * all_TED[:, expert]
    return y_TD


@jax.jit
def dense_with_gradients(experts_TK, is_kept_TK):
    y_TD, pull = jax.vjp(lambda *arrays: dense(*arrays, experts_TK, is_kept_TK), X, WEIGHTS, PARAMETERS)
    return y_TD, pull(COTANGENT)


def one_expert_after_the_other(parameters_XDD):
    def compute(rows_RD, weights_R, sizes_X):
        end_X = jnp.cumsum(sizes_X)
        row_R = jnp.arange(rows_RD.shape[0])
        out_RD = jnp.zeros_like(rows_RD)
        for local, parameters_DD in enumerate(parameters_XDD):
            is_own_R = (row_R >= end_X[local] - sizes_X[local]) & (row_R < end_X[local])
            rows = jnp.tanh(jnp.matmul(rows_RD, parameters_DD, precision="highest"))
            out_RD = jnp.where(is_own_R[:, None], rows, out_RD)
        return weights_R[:, None] * out_RD

    return compute


def dispatcher(kind, layout, **options):
    axes = ("a", "b")[: len(LAYOUTS[layout])] if layout != "1" else ()
    return Dispatcher(kind, E, axes, num_nodes=2 if layout in ("2x2", "4 in two nodes") else 1, **options)


def over_devices(f, layout, num_outputs):
    """`f` of local x, weights, parameters, experts and cotangent; its outputs joined over the devices."""
    shape = LAYOUTS[layout]
    mesh = Mesh(np.array(jax.devices()[: math.prod(shape)]).reshape(shape), ("a", "b")[: len(shape)])
    by_device = PartitionSpec(mesh.axis_names)
    outputs = (by_device,) * num_outputs
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=by_device, out_specs=outputs, check_vma=False))


@functools.cache
def program(one: Dispatcher, layout: str):
    """(experts) -> y, dropped of each device, gradients of x, weights and parameters."""

    def local(x_ND, weights_NK, parameters_XDD, experts_NK, cotangent_ND):
        def run(x_ND, weights_NK, parameters_XDD):
            return one(x_ND, experts_NK, weights_NK, one_expert_after_the_other(parameters_XDD))

        y_ND, pull, dropped = jax.vjp(run, x_ND, weights_NK, parameters_XDD, has_aux=True)
        return y_ND, dropped[None], *pull(cotangent_ND)

    compiled = over_devices(local, layout, 5)
    return lambda experts_TK: compiled(X, WEIGHTS, PARAMETERS, experts_TK, COTANGENT)


def check(one, layout, experts_TK, is_kept_TK=None):
    """Against the dense loop over those that are kept; the others are counted on their own device."""
    is_kept_TK = np.ones((T, K), bool) if is_kept_TK is None else is_kept_TK
    y_TD, dropped_P, *gradients = program(one, layout)(experts_TK)
    expected_TD, expected_gradients = dense_with_gradients(experts_TK, is_kept_TK)
    # sums of at most K terms near 1 in fp32, and gradients of parameters of T terms
    np.testing.assert_allclose(y_TD, expected_TD, rtol=0, atol=1e-6)
    for gradient, expected in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-5 * max(1, np.abs(expected).max()))
    lost_TK = (experts_TK < E) & ~is_kept_TK
    np.testing.assert_array_equal(dropped_P, lost_TK.reshape(len(dropped_P), -1).sum(axis=1))


@everywhere
def test_tokens_get_what_their_experts_make_of_them(kind, layout):
    for experts_TK in ROUTINGS.values():
        check(dispatcher(kind, layout), layout, experts_TK)


@pytest.mark.parametrize(("kind", "layout"), [("allgather", "4"), ("alltoall", "2x2"), ("flex", "2x2")])
def test_two_halves_are_the_whole(kind, layout):
    for name in ("spread", "padding"):
        check(dispatcher(kind, layout, overlap=True), layout, ROUTINGS[name])


def source_order(rows_of, num_ranks, buffer_rows):
    """Of the pairs (source, expert, number in the source) that go to each rank: those that its buffer takes."""
    taken = set()
    for rank in range(num_ranks):
        own = sorted(pair for pair in rows_of if pair[1] // (E // num_ranks) == rank)
        taken.update(own[:buffer_rows])
    return taken


def kept_in_buffers(experts_TK, num_ranks, buffer_rows):
    per_rank = T // num_ranks
    pairs = {
        (t // per_rank, int(experts_TK[t, k]), t * K + k) for t in range(T) for k in range(K) if experts_TK[t, k] < E
    }
    numbers = [number for _, _, number in source_order(pairs, num_ranks, buffer_rows)]
    is_kept_M = np.zeros(T * K, bool)
    is_kept_M[numbers] = True
    return is_kept_M.reshape(T, K)


@pytest.mark.parametrize(("kind", "layout"), [("allgather", "4"), ("alltoall", "4"), ("alltoall", "2x2")])
def test_what_a_buffer_has_no_row_for_is_left_out_and_counted(kind, layout):
    # 5 tokens x 3 choices x 0.5 = 7.5 rows, so 8 of each rank
    one = dispatcher(kind, layout, buffer_factor=0.5)
    lost = []
    for experts_TK in ROUTINGS.values():
        is_kept_TK = kept_in_buffers(experts_TK, 4, 8)
        check(one, layout, experts_TK, is_kept_TK)
        lost.append(int(((experts_TK < E) & ~is_kept_TK).sum()))
    # all 20 tokens to one rank, whose buffer takes 8; 60 pairs for 4 buffers of 8
    assert lost[1] == 12 and lost[0] >= 28 and lost[-1] == 0


def kept_over_nodes(experts_TK, buffer_rows):
    """2 nodes of 2 ranks.  Rank (n, i) spreads what the sources (0, i) and (1, i) have for its node."""
    per_rank, experts_of_rank = T // 4, E // 4
    spread = {}
    for t in range(T):
        for k in range(K):
            expert = int(experts_TK[t, k])
            if expert < E:
                node, inner = expert // (2 * experts_of_rank), t // per_rank % 2
                spread.setdefault((node, inner), []).append((expert, t * K + k))
    arrived = set()
    for (node, inner), pairs in spread.items():
        for expert, number in sorted(pairs)[:buffer_rows]:
            # a source of the second exchange is a rank of this node
            arrived.add((2 * node + inner, expert, number))
    is_kept_M = np.zeros(T * K, bool)
    is_kept_M[[number for _, _, number in source_order(arrived, 4, buffer_rows)]] = True
    return is_kept_M.reshape(T, K)


def test_over_nodes_a_dropped_pair_is_counted_where_its_token_came_from():
    one = dispatcher("flex", "2x2", buffer_factor=0.5)
    for experts_TK in ROUTINGS.values():
        check(one, "2x2", experts_TK, kept_over_nodes(experts_TK, 8))


CAPACITY_LAYOUTS = [("alltoall", "1"), ("allgather", "4"), ("alltoall", "4"), ("flex", "2x2")]


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize(("kind", "layout"), CAPACITY_LAYOUTS)
def test_an_expert_takes_its_capacity_from_each_device(kind, layout, policy):
    num_ranks = math.prod(LAYOUTS[layout])
    per_rank = T // num_ranks
    # 4 ranks: ceil(0.8 x 15 / 8) = 2 pairs of an expert; one device: ceil(0.8 x 60 / 8) = 6
    capacity = {1: 6, 4: 2}[num_ranks]
    one = dispatcher(kind, layout, capacity_factor=0.8, drop_policy=policy)
    for name in ("spread", "one expert", "padding"):
        experts_TK, is_kept_TK = ROUTINGS[name], np.zeros((T, K), bool)
        for rank in range(num_ranks):
            for expert in range(E):
                pairs = [(t, k) for t in range(rank * per_rank, (rank + 1) * per_rank) for k in range(K)
                         if experts_TK[t, k] == expert]  # fmt: skip
                if policy == "probs":
                    pairs.sort(key=lambda pair: -WEIGHTS[pair])
                for pair in pairs[:capacity]:
                    is_kept_TK[pair] = True
        assert ((experts_TK < E) & ~is_kept_TK).any()
        check(one, layout, experts_TK, is_kept_TK)


@pytest.mark.parametrize(("kind", "overlap"), [("allgather", False), ("alltoall", False), ("flex", True)])
def test_layers_in_a_loop_that_are_computed_again(kind, overlap):
    one = dispatcher(kind, "2x2", overlap=overlap)
    layers_L2TK = np.stack([ROUTINGS["spread"], ROUTINGS["padding"]])

    def local(x_ND, weights_NK, parameters_XDD, experts_NLK, cotangent_ND):
        def stack(x_ND, weights_NK, parameters_XDD):
            @jax.checkpoint
            def layer(x_ND, experts_NK):
                y_ND, dropped = one(x_ND, experts_NK, weights_NK, one_expert_after_the_other(parameters_XDD))
                return x_ND + y_ND, dropped

            return jax.lax.scan(layer, x_ND, experts_NLK.swapaxes(0, 1))

        y_ND, pull, _ = jax.vjp(stack, x_ND, weights_NK, parameters_XDD, has_aux=True)
        return y_ND, *pull(cotangent_ND)

    y_TD, *gradients = over_devices(local, "2x2", 4)(X, WEIGHTS, PARAMETERS, layers_L2TK.swapaxes(0, 1), COTANGENT)

    def plain(x_TD, weights_TK, parameters_EDD):
        for experts_TK in layers_L2TK:
            x_TD = x_TD + dense(x_TD, weights_TK, parameters_EDD, experts_TK)
        return x_TD

    expected_TD, pull = jax.vjp(plain, X, WEIGHTS, PARAMETERS)
    np.testing.assert_allclose(y_TD, expected_TD, rtol=0, atol=1e-5)
    for gradient, expected in zip(gradients, pull(COTANGENT), strict=True):
        np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-5 * max(1, np.abs(expected).max()))


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_rows_are_summed_in_fp32(kind):
    """A sum of K products, each rounded once: within two roundings of bfloat16, 2^-8 each, of the exact one."""
    one = dispatcher(kind, "4")

    def local(x_ND, weights_NK, _, experts_NK, __):
        def compute(rows_RD, weights_R, sizes_X):
            return (weights_R[:, None] * rows_RD).astype(rows_RD.dtype)

        return (one(x_ND.astype(jnp.bfloat16), experts_NK, weights_NK, compute)[0],)

    (y_TD,) = over_devices(local, "4", 1)(X, WEIGHTS, PARAMETERS, ROUTINGS["spread"], COTANGENT)
    assert y_TD.dtype == jnp.bfloat16
    expected_TD = np.float32(jnp.asarray(X).astype(jnp.bfloat16)) * WEIGHTS.sum(axis=1, keepdims=True)
    # "allgather" adds a rounded partial sum of each of the four devices
    np.testing.assert_allclose(np.float32(y_TD), expected_TD, rtol=4 * 2**-8, atol=0)


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="kind='sideways'"):
        Dispatcher("sideways", E)
