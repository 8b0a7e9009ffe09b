"""Time and memory of attention over packed rows, forward and with the backward pass, by backend.  Needs a GPU.

    python benchmarks/attention.py [--cases=windows] [--repeats=10]

bfloat16, one row of one GPU's heads.  A rate counts the FLOPs of visible pairs of tokens alone, and a backward pass as
2.5 forward passes: what a backend computes beyond that, it computes for nothing.  The ceiling is the rate of a large
matmul on the same GPU.  Memory is what XLA allocates beside arguments and results.  "cudnn, one segment" is cuDNN
without a mask, for rows of a single document.
"""

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxforge.config.schema import EncoderConfig
from jaxforge.data.patches import patch_windows
from jaxforge.ops.attention import attention, row_segments
from jaxforge.ops.placement import SINGLE_DEVICE


@dataclasses.dataclass(frozen=True)
class Case:
    """Heads, and the segment of each token of a row."""

    name: str
    heads: int
    groups: int
    width: int
    value_width: int
    causal: bool
    segments_S: np.ndarray

    def flops(self) -> float:
        """Of a forward pass over visible pairs."""
        counts = np.bincount(self.segments_S)[1:].astype(float)
        pairs = np.sum(counts * (counts + 1) / 2 if self.causal else counts**2)
        return 2 * pairs * (self.width + self.value_width) * self.heads


def documents(length: int, mean: float) -> np.ndarray:
    """Documents one after another, the logarithms of their lengths of deviation 1."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(mean) - 0.5, 1.0, length), 8, length).astype(int)
    return np.repeat(np.arange(1, length + 1), lengths)[:length]


def images(length: int, windows: bool) -> np.ndarray:
    """Frames of 64 x 64 patches, or the attention windows in them, of Qwen2.5-VL."""
    grid = (64, 64)
    of_image = patch_windows(grid, EncoderConfig()) if windows else np.ones(4096, int)
    return np.concatenate([of_image + i * of_image.max() for i in range(length // 4096)])


def cases() -> list[Case]:
    one = functools.partial(np.ones, dtype=int)
    return [
        Case("one document, 8192", 32, 8, 128, 128, True, one(8192)),
        Case("one document, 32768", 32, 8, 128, 128, True, one(32768)),
        Case("documents of 1400, 8192", 32, 8, 128, 128, True, documents(8192, 1400)),
        Case("documents of 1400, 32768", 32, 8, 128, 128, True, documents(32768, 1400)),
        Case("heads of 192 and 128, documents, 8192", 16, 16, 192, 128, True, documents(8192, 1400)),
        Case("images of 4096 patches, 16384", 16, 16, 80, 80, False, images(16384, windows=False)),
        Case("images in windows, 16384", 16, 16, 80, 80, False, images(16384, windows=True)),
        Case("images in windows, heads of 72, 16384", 16, 16, 72, 72, False, images(16384, windows=True)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default="", help="only cases whose name has this in it")
    parser.add_argument("--repeats", type=int, default=10)
    flags = parser.parse_args()
    if jax.default_backend() != "gpu":
        sys.exit(f"this benchmark needs a GPU, and JAX runs on {jax.default_backend()} here")
    ceiling = matmul_rate(8192, flags.repeats)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, matmuls at {1e-12 * ceiling:.0f} TFLOP/s")
    for case in cases():
        if flags.cases in case.name:
            compare(case, ceiling, ("flash", "cudnn", "xla"), flags.repeats)


def compare(case: Case, ceiling: float, backends: tuple[str, ...], repeats: int) -> None:
    """Prints a line for each backend and direction."""
    print(f"\n{case.name}: {case.heads} heads, {case.groups} of keys, {np.unique(case.segments_S).size} segments")
    S, H, G = case.segments_S.size, case.heads, case.groups
    shapes = ((1, S, H, case.width), (1, S, G, case.width), (1, S, G, case.value_width), (1, S, H, case.value_width))
    q, k, v, dout = (
        jax.random.normal(key, shape, jnp.bfloat16)
        for key, shape in zip(jax.random.split(jax.random.key(0), 4), shapes, strict=True)
    )
    segments = jnp.asarray(case.segments_S, jnp.int32)[None]
    for name, attend in ways(case, backends).items():

        def with_gradients(q, k, v, dout, segments, attend=attend):
            return jax.vjp(lambda *qkv: attend(*qkv, segments), q, k, v)[1](dout)

        for direction, f, arguments, passes in (
            ("forward", attend, (q, k, v, segments), 1.0),
            ("forward and backward", with_gradients, (q, k, v, dout, segments), 3.5),
        ):
            try:
                seconds, temporary = measure(f, arguments, repeats)
            except Exception as error:  # out of memory, or a library that can't do this size: others are still of use
                print(f"  {name:20} {direction:20} {type(error).__name__}: {str(error).splitlines()[0][:70]}")
                continue
            rate = passes * case.flops() / seconds
            print(
                f"  {name:20} {direction:20} {1e3 * seconds:8.2f} ms  {1e-12 * rate:5.0f} TFLOP/s,"
                f" {100 * rate / ceiling:3.0f} % of the ceiling  {temporary / 2**30:6.2f} GiB"
            )


def ways(case: Case, backends: tuple[str, ...]) -> dict[str, Callable]:
    """Name -> (q, k, v, segments) -> out"""
    found: dict[str, Callable] = {
        backend: functools.partial(_attend, causal=case.causal, backend=backend) for backend in backends
    }
    if "cudnn" in backends and np.unique(case.segments_S).size == 1:

        def one_segment(q, k, v, segments):
            return jax.nn.dot_product_attention(q, k, v, is_causal=case.causal, implementation="cudnn")

        found["cudnn, one segment"] = one_segment
    return found


def _attend(q, k, v, segments, *, causal, backend):
    segments = row_segments(segments, causal=causal, backend=backend)
    return attention(q, k, v, segments, causal=causal, backend=backend, placement=SINGLE_DEVICE)


def matmul_rate(size: int, repeats: int) -> float:
    """FLOP/s of a square matmul in bfloat16."""
    a, b = (jax.random.normal(key, (size, size), jnp.bfloat16) for key in jax.random.split(jax.random.key(1)))
    return 2 * size**3 / measure(jnp.matmul, (a, b), repeats)[0]


def measure(f: Callable, arguments: tuple, repeats: int) -> tuple[float, int]:
    """The shortest time of a run in seconds, after one that isn't counted; bytes of temporary memory."""
    compiled = jax.jit(f).lower(*arguments).compile()
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        times.append(time.perf_counter() - began)
    return min(times[1:]), compiled.memory_analysis().temp_size_in_bytes


if __name__ == "__main__":
    main()
