"""Time and memory of loss and gradients from the hidden states, fused and not.  Needs a GPU.

    python benchmarks/linear_cross_entropy.py [--repeats=10]

Three sizes (tokens, vocabulary, width) in bfloat16, on one GPU.  Each way gives the loss and the gradients of hidden
states and head; the fused one adds the head's to an fp32 sum, the others round it to bfloat16.  Time is the shortest of
the repeats; memory is what XLA allocates beside arguments and results.  The ceiling is the time of the three matmuls
alone, as XLA runs them on the same GPU in bfloat16.
"""

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxforge.ops.cross_entropy import cross_entropy
from jaxforge.ops.linear_cross_entropy import LinearCrossEntropy
from jaxforge.ops.placement import SINGLE_DEVICE

SIZES = ((16384, 129280, 7168), (32768, 128256, 2560), (8192, 151936, 4096))
CHECKPOINTED_TOKENS = 2048  # of a chunk, as many as the fused loss takes at the first size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=10)
    flags = parser.parse_args()
    if jax.default_backend() != "gpu":
        sys.exit(f"this benchmark needs a GPU, and JAX runs on {jax.default_backend()} here")
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    for size in SIZES:
        compare(*size, fused_backend="triton", repeats=flags.repeats)


def compare(T: int, V: int, D: int, *, fused_backend: str, repeats: int) -> None:
    """Prints a line for each way."""
    print(f"\n{T} tokens, vocabulary {V}, width {D}")
    keys = jax.random.split(jax.random.key(0), 3)
    hidden_BSD = jax.random.normal(keys[0], (1, T, D), jnp.bfloat16)
    head_VD = 0.02 * jax.random.normal(keys[1], (V, D), jnp.bfloat16)
    targets_BS = jax.random.randint(keys[2], (1, T), 0, V, jnp.int32)
    ceiling, _ = measure(three_matmuls, (hidden_BSD, head_VD), repeats)
    print(f"  {'three matmuls':28} {1e3 * ceiling:8.1f} ms  {6e-12 * T * V * D / ceiling:6.0f} TFLOP/s")
    for name, f in ways(V, fused_backend).items():
        arguments = (hidden_BSD, head_VD, targets_BS)
        if name.startswith("fused"):
            arguments = (*arguments, jnp.zeros((V, D), jnp.float32))
        try:
            seconds, temporary = measure(f, arguments, repeats)
        except Exception as error:  # out of memory, or a library that can't do this size: the next way is still of use
            print(f"  {name:28} {type(error).__name__}: {str(error).splitlines()[0][:80]}")
            continue
        share = 100 * ceiling / seconds
        print(f"  {name:28} {1e3 * seconds:8.1f} ms  {share:4.0f} % of the ceiling  {temporary / 2**30:6.2f} GiB")


def ways(V: int, fused_backend: str) -> dict[str, Callable]:
    """Name -> (hidden, head, targets) -> loss and gradients; those named fused take the head's sum too."""

    def plain(hidden_BSD, head_VD, targets_BS):
        return cross_entropy(hidden_BSD, head_VD, targets_BS, vocab_size=V, placement=SINGLE_DEVICE)[0]

    def checkpointed(hidden_BSD, head_VD, targets_BS):
        def chunk(total, inputs):
            hidden_TD, targets_T = inputs
            return total + jax.checkpoint(plain)(hidden_TD[None], head_VD, targets_T[None]), None

        hidden = hidden_BSD.reshape(-1, min(CHECKPOINTED_TOKENS, targets_BS.size), hidden_BSD.shape[-1])
        return lax.scan(chunk, jnp.float32(0), (hidden, targets_BS.reshape(hidden.shape[:2])))[0]

    found = {
        "fused, Triton kernels": LinearCrossEntropy(V, SINGLE_DEVICE, backend=fused_backend).gradients,
        "fused, jax.numpy": LinearCrossEntropy(V, SINGLE_DEVICE).gradients,
        "plain": jax.value_and_grad(plain, (0, 1)),
        "chunks in jax.checkpoint": jax.value_and_grad(checkpointed, (0, 1)),
    }
    if importlib.util.find_spec("tokamax") is not None:
        import tokamax

        def tokamax_loss(hidden_BSD, head_VD, targets_BS):
            hidden_TD = hidden_BSD.reshape(-1, hidden_BSD.shape[-1])
            return tokamax.linear_softmax_cross_entropy_loss(hidden_TD, targets_BS.reshape(-1), head_VD.T)

        found["tokamax"] = jax.value_and_grad(tokamax_loss, (0, 1))
    return found


def three_matmuls(hidden_BSD: jax.Array, head_VD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The matmuls of loss and gradients, the logits in the place of their gradient."""
    hidden_TD = hidden_BSD[0]
    logits_TV = lax.optimization_barrier(jnp.einsum("TD,VD->TV", hidden_TD, head_VD))
    return jnp.einsum("TV,VD->TD", logits_TV, head_VD), jnp.einsum("TV,TD->VD", logits_TV, hidden_TD)


def measure(f: Callable, arguments: tuple, repeats: int) -> tuple[float, int]:
    """Seconds, and bytes of temporary memory.  A fourth argument is a sum: it is updated in place, run after run."""
    compiled = jax.jit(f, donate_argnums=3 if len(arguments) == 4 else ()).lower(*arguments).compile()
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        results = jax.block_until_ready(compiled(*arguments))
        times.append(time.perf_counter() - began)
        if len(arguments) == 4:
            arguments = (*arguments[:3], results.dhead_sum_VD)
        del results  # two runs' results need not fit
    return min(times[1:]), compiled.memory_analysis().temp_size_in_bytes


if __name__ == "__main__":
    main()
