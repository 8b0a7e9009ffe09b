"""Time and memory of the experts of a mixture-of-experts layer, forward and backward.  Needs a GPU.

    python benchmarks/moe_layer.py [--repeats=10] [--spread=1.0]

Tokens to their experts, SwiGLU, and back, in bfloat16, on one GPU, with the gradients of tokens, routing weights and
all three stacks; the router isn't in it.  Experts are drawn from logits of a Gaussian of deviation `spread`, the same
for all tokens, plus Gumbel noise: with 0 all experts are as likely.  Each way does the same sums; "ragged_dot" and
"tokamax" gather and scatter with jax.numpy.  Time is the shortest of the repeats; memory is what XLA allocates beside
arguments and results.  The ceiling is the time that the layer's FLOPs take at the rate of a large matmul on the same
GPU.
"""

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxforge.ops.expert_rows import permutation
from jaxforge.ops.grouped_matmul import grouped_matmul, grouped_swiglu
from jaxforge.ops.moe_permute import permute, unpermute


class Size(NamedTuple):
    """Tokens, choices of each, experts, width, and width of an expert."""

    N: int
    K: int
    E: int
    D: int
    F: int

    def flops(self) -> int:
        """Of nine products: three forward, and two of the backward pass for each."""
        return 9 * 2 * self.N * self.K * self.D * self.F


# Qwen3-30B-A3B; 32 of DeepSeek-V3's 256 experts with the rows of as many tokens; Mixtral 8x7B.
SIZES = (Size(16384, 8, 128, 2048, 768), Size(8192, 8, 32, 7168, 2048), Size(8192, 2, 8, 4096, 14336))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--spread", type=float, default=1.0)
    flags = parser.parse_args()
    if jax.default_backend() != "gpu":
        print(f"this benchmark needs a GPU, and JAX runs on {jax.default_backend()} here", file=sys.stderr)
        sys.exit(2)
    rate = matmul_rate(8192, flags.repeats)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, matmuls at {1e-12 * rate:.0f} TFLOP/s")
    for size in SIZES:
        compare(size, ways(), rate, flags.spread, flags.repeats)


def compare(size: Size, found: dict[str, Callable], rate: float, spread: float, repeats: int) -> None:
    """Prints a line for each way."""
    print(f"\n{size.N} tokens of width {size.D}, {size.K} of {size.E} experts of width {size.F}")
    arguments = random_arguments(size, spread)
    ceiling = size.flops() / rate
    for name, layer in found.items():
        try:
            seconds, temporary = measure(with_gradients(layer), arguments, repeats)
        except Exception as error:  # out of memory, or a library that can't do this size: the next way is still of use
            print(f"  {name:28} {type(error).__name__}: {str(error).splitlines()[0][:80]}")
            continue
        share = 100 * ceiling / seconds
        print(f"  {name:28} {1e3 * seconds:8.2f} ms  {share:4.0f} % of the ceiling  {temporary / 2**30:6.2f} GiB")


def random_arguments(size: Size, spread: float) -> tuple[jax.Array, ...]:
    """Tokens, routing weights, the three stacks, experts, and the gradient of the result."""
    N, K, E, D, F = size
    keys = jax.random.split(jax.random.key(0), 8)
    logits_NE = spread * jax.random.normal(keys[0], (E,)) + jax.random.gumbel(keys[1], (N, E))
    experts_NK = lax.top_k(logits_NE, K)[1].astype(jnp.int32)
    weights_NK = jax.nn.softmax(jax.random.normal(keys[2], (N, K)))
    x_ND, dy_ND = (jax.random.normal(key, (N, D), jnp.bfloat16) for key in keys[3:5])
    gate_EDF, up_EDF, down_EFD = (
        0.02 * jax.random.normal(key, shape, jnp.bfloat16)
        for key, shape in zip(keys[5:], ((E, D, F), (E, D, F), (E, F, D)), strict=True)
    )
    return x_ND, weights_NK, gate_EDF, up_EDF, down_EFD, experts_NK, dy_ND


def with_gradients(layer: Callable) -> Callable:
    def step(*arguments):
        *differentiated, experts_NK, dy_ND = arguments
        y_ND, pull = jax.vjp(lambda *x: layer(*x, experts_NK), *differentiated)
        return y_ND, pull(dy_ND)

    return step


def ways() -> dict[str, Callable]:
    """Name -> layer(x, weights, gate, up, down, experts) -> y."""
    found = {"grouped, Triton kernels": grouped_layer, "ragged_dot": ragged_layer(lax.ragged_dot)}
    if importlib.util.find_spec("tokamax") is not None:
        import tokamax

        found["tokamax"] = ragged_layer(lambda rows, stack, sizes: tokamax.ragged_dot(rows, stack, group_sizes=sizes))
    return found


def grouped_layer(x_ND, weights_NK, gate_EDF, up_EDF, down_EFD, experts_NK, *, backend: str = "pallas"):
    order, sizes_E = permutation(experts_NK, gate_EDF.shape[0])
    rows_RD = permute(x_ND, order, backend=backend)
    act_RF = grouped_swiglu(rows_RD, gate_EDF, up_EDF, sizes_E, backend=backend)
    return unpermute(grouped_matmul(act_RF, down_EFD, sizes_E, backend=backend), weights_NK, order, backend=backend)


def ragged_layer(ragged_dot: Callable) -> Callable:
    """The layer with another product of rows, stack and sizes."""

    def layer(x_ND, weights_NK, gate_EDF, up_EDF, down_EFD, experts_NK):
        order_R = jnp.argsort(experts_NK.reshape(-1))
        token_R = order_R // experts_NK.shape[1]
        sizes_E = jnp.bincount(experts_NK.reshape(-1), length=gate_EDF.shape[0])
        rows_RD = x_ND[token_R]
        act_RF = jax.nn.silu(ragged_dot(rows_RD, gate_EDF, sizes_E)) * ragged_dot(rows_RD, up_EDF, sizes_E)
        out_RD = ragged_dot(act_RF, down_EFD, sizes_E) * weights_NK.reshape(-1)[order_R][:, None]
        return jnp.zeros(x_ND.shape, jnp.float32).at[token_R].add(out_RD).astype(x_ND.dtype)

    return layer


def measure(f: Callable, arguments: tuple, repeats: int) -> tuple[float, int]:
    """Seconds, and bytes of temporary memory."""
    compiled = jax.jit(f).lower(*arguments).compile()
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        results = jax.block_until_ready(compiled(*arguments))
        times.append(time.perf_counter() - began)
        del results  # two runs' results need not fit
    return min(times[1:]), compiled.memory_analysis().temp_size_in_bytes


def matmul_rate(size: int, repeats: int) -> float:
    """FLOP/s of a square matmul in bfloat16."""
    a, b = (jax.random.normal(key, (size, size), jnp.bfloat16) for key in jax.random.split(jax.random.key(0)))
    seconds, _ = measure(jnp.matmul, (a, b), repeats)
    return 2 * size**3 / seconds


if __name__ == "__main__":
    main()
