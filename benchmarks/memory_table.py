"""Memory of Llama 3.1 8B on 8 x H100 by sharding strategy, recompute and offload, and the longest rows that fit.

    python benchmarks/memory_table.py [--rows='optim/*/none/*'] [--cache=runs/memory_table.jsonl] [--out=FILE.md]

Each figure is that of `jaxforge.plan`, which compiles the train step for GPUs that aren't here: data parallel size 8,
one row a microbatch, two microbatches a step, bfloat16, flash attention.  A row of the table is named
strategy/recompute/offload/loss, and --rows takes patterns on these names, separated by commas.  The longest rows of
tokens are sought in steps of 1024 up to 32,768 and of 2048 beyond, up to 131,072, the length that the model is
published for (the config has no limit of its own): the length given was compiled and fits, the next one was compiled
and doesn't.  Compiling takes about 15 s of CPU time whatever the length, and the whole table 114 compilations; each
result is added to the file of --cache as it comes, from which the next run goes on.
"""

import argparse
import dataclasses
import fnmatch
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

# before JAX is imported: compiling for GPUs takes none
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402

from jaxforge.cluster import parse_topology
from jaxforge.config import ConfigError, load_config, resolve, validate
from jaxforge.training.planning import RESERVE_BYTES, plan

RECIPE, TOPOLOGY = "configs/llama3_1_8b_pretrain.py", "h100:1x8"
CLUSTER = parse_topology(TOPOLOGY)
LIMIT = CLUSTER.gpu.capacity - RESERVE_BYTES  # as the plan's verdict has it
GRID = (*range(1024, 32768, 1024), *range(32768, 131072 + 1, 2048))
FIRST, SECOND = 4096, 16384  # the length of the table's figures, and one to guess from where nothing else is known

COMMON = (
    "parallel.tensor_model_parallel_size=1", "parallel.sequence_parallel=false", "train.micro_batch_size=1",
    "train.global_batch_size=16",
)  # fmt: skip
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
RECOMPUTE = {
    "none": ("none", "none", "none", "()"),
    "selective": ("selective", "none", "none", "mlp,layernorm"),
    "full": ("full", "uniform", "1", "()"),
}
INPUTS = "attn_norm,core_attn,attn_proj,mlp_norm"
LOSSES = {"fused": "true", "plain": "false"}


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the table, by its words."""

    strategy: str
    recompute: str
    offload: str
    loss: str = "fused"

    @property
    def name(self) -> str:
        return "/".join(dataclasses.astuple(self))

    @property
    def slope_group(self) -> tuple:
        """Rows whose peaks grow alike with the length."""
        return self.recompute, self.offload.startswith("activations"), self.loss

    def overrides(self, seq_length: int) -> list[str]:
        """What changes the recipe."""
        fields = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")
        recompute = [f"memory.{field}={text}" for field, text in zip(fields, RECOMPUTE[self.recompute], strict=True)]
        # layers that are recomputed as a whole keep their input alone
        moved = "attn_norm" if self.recompute == "full" else INPUTS
        offload = {
            "none": (),
            "activations": ("memory.fine_grained_activation_offloading=true", f"memory.offload_modules={moved}"),
            "activations, all four": (
                "memory.fine_grained_activation_offloading=true", f"memory.offload_modules={INPUTS}"
            ),
            "optimizer": ("memory.optimizer_cpu_offload=true", "memory.optimizer_offload_fraction=1"),
        }[self.offload]  # fmt: skip
        return [
            *COMMON, f"parallel.data_parallel_sharding_strategy={self.strategy}", *recompute, *offload,
            f"loss.cross_entropy_loss_fusion={LOSSES[self.loss]}", f"train.seq_length={seq_length}",
        ]  # fmt: skip


ROWS = [
    *(
        Row(strategy, recompute, offload)
        for strategy in STRATEGIES for recompute in RECOMPUTE for offload in ("none", "activations", "optimizer")
    ),
    Row("optim_grads_params", "full", "activations, all four"),
    Row("optim", "full", "optimizer", "plain"),
    Row("optim_grads_params", "selective", "none", "plain"),
    Row("optim_grads_params", "full", "none", "plain"),
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program's bytes on each GPU, `state` those that no length changes; and what compiling took, in seconds."""

    seq_length: int
    peak: int
    state: int
    host: int
    seconds: float

    @property
    def fits(self) -> bool:
        return self.peak <= LIMIT


class Cache:
    """Results of earlier compilations, one JSON object a line; without a file, of this run alone."""

    def __init__(self, file: Path | None):
        self._file, self._found = file, {}
        if file is not None and file.exists():
            for line in map(json.loads, file.read_text().splitlines()):
                self._found[self._key(line["overrides"], line["jax"])] = Compiled(**line["compiled"])

    @staticmethod
    def _key(overrides: list[str], version: str) -> tuple:
        return version, *overrides

    def measure(self, row: Row, seq_length: int) -> Compiled:
        """Compiles a row's program for a length, unless that has been done."""
        overrides = row.overrides(seq_length)
        key = self._key(overrides, jax.__version__)
        if key not in self._found:
            compiled = self._found[key] = compile_step(overrides, seq_length)
            print(f"{row.name}, {seq_length} tokens: {gib(compiled.peak)} GiB, {compiled.seconds:.0f} s",
                  file=sys.stderr, flush=True)  # fmt: skip
            if self._file is not None:
                entry = {"overrides": overrides, "jax": jax.__version__, "compiled": dataclasses.asdict(compiled)}
                with self._file.open("a") as lines:
                    lines.write(json.dumps(entry) + "\n")
        return self._found[key]


def compile_step(overrides: list[str], seq_length: int) -> Compiled:
    """What `jaxforge.plan` says of the recipe with these overrides."""
    began = time.perf_counter()
    report = plan(load_config(RECIPE, overrides), TOPOLOGY, say=lambda line: None)
    parts = report.memory_parts
    return Compiled(
        seq_length, report.device_bytes.peak, parts.parameters + parts.optimizer, report.host_bytes,
        time.perf_counter() - began,
    )  # fmt: skip


def longest(row: Row, cache: Cache, slopes: dict[tuple, float]) -> Compiled | None:
    """The program of the longest rows that fit, None where none does.

    The peak is nearly affine in the length, so few guesses are needed; `slopes` has bytes a token of groups of rows,
    and gets this row's.
    """
    first = cache.measure(row, FIRST)
    if first.state > LIMIT:
        return None
    tried = [first]
    while True:
        fitting = sorted((one for one in tried if one.fits), key=lambda one: -one.seq_length)
        others = sorted((one for one in tried if not one.fits), key=lambda one: one.seq_length)
        low = GRID.index(fitting[0].seq_length) if fitting else -1
        high = GRID.index(others[0].seq_length) if others else len(GRID)
        if high - low == 1:
            break
        # the two nearest to the limit: one on each side, if there are
        nearest = [*fitting[:1], *others[:1]] if fitting and others else [*fitting, *others][:2]
        slope = slope_between(*nearest) if len(nearest) == 2 else slopes.get(row.slope_group)
        if slope is None:
            guess: float = SECOND if first.fits else GRID[0]
        elif slope > 0:
            guess = nearest[0].seq_length + (LIMIT - nearest[0].peak) / slope
        else:  # the peak lies elsewhere in the step
            guess = GRID[(low + high) // 2]
        index = sum(length <= guess for length in GRID) - 1
        tried.append(cache.measure(row, GRID[min(max(index, low + 1), high - 1)]))
    best = fitting[0] if fitting else None
    if best is not None and best is not first:
        slopes[row.slope_group] = slope_between(first, best)
    return best


def slope_between(one: Compiled, other: Compiled) -> float:
    """Bytes a token."""
    return (one.peak - other.peak) / (one.seq_length - other.seq_length)


def refusal(row: Row) -> str | None:
    """Why the config refuses a row, if it does."""
    try:
        validate(resolve(load_config(RECIPE, row.overrides(FIRST))), CLUSTER.num_devices, "gpu")
    except ConfigError as error:
        return str(error)
    return None


def table(rows: list[Row], cache: Cache) -> Iterator[str]:
    """Lines of Markdown, once all is compiled."""
    yield (
        "| strategy | recompute | offload | loss | peak at 4096, GiB | host, GiB | fits at 4096 | longest row, tokens"
        " | peak there, GiB | host there, GiB |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    slopes: dict[tuple, float] = {}
    refused = {row: reason for row in rows if (reason := refusal(row))}
    found = {row: longest(row, cache, slopes) for row in reversed(rows) if row not in refused}
    for row in rows:
        words = f"| `{row.strategy}` | {row.recompute} | {row.offload} | {row.loss} |"
        if row in refused:
            yield f"{words} | | refused | | | |"
            continue
        first, best = cache.measure(row, FIRST), found[row]
        yield f"{words} {gib(first.peak)} | {gib(first.host)} | {'yes' if first.fits else 'no'} | {ending(first, best)}"
    for row, reason in refused.items():
        yield f"\n{row.recompute} with {row.offload}, refused: {reason}"


def ending(first: Compiled, best: Compiled | None) -> str:
    """The cells on the longest rows."""
    if best is None:
        why = f": masters and moments are {gib(first.state)} GiB" if first.state > LIMIT else ""
        return f"none{why} | | |"
    more = " or more" if best.seq_length == GRID[-1] else ""
    return f"{best.seq_length:,}{more} | {gib(best.peak)} | {gib(best.host)} |"


def gib(count: int) -> str:
    return f"{count / 2**30:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="*", help="patterns on strategy/recompute/offload/loss, comma-separated")
    parser.add_argument("--cache", type=Path, help="file of results, one JSON object a line, to go on from")
    parser.add_argument("--out", type=Path, help="file for the table, which is printed in any case")
    flags = parser.parse_args()
    rows = [row for row in ROWS if any(fnmatch.fnmatch(row.name, pattern) for pattern in flags.rows.split(","))]
    if not rows:
        sys.exit(f"--rows={flags.rows} matches no row; names are such as {ROWS[0].name}")
    text = "\n".join(table(rows, Cache(flags.cache)))
    print(f"jax {jax.__version__}, capacity {gib(CLUSTER.gpu.capacity)} GiB, reserve {gib(RESERVE_BYTES)} GiB")
    print(f"\n{text}")
    if flags.out:
        flags.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
