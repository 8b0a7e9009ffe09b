"""How full the rows of a plan are, and how long planning and indexing take.

    python benchmarks/packing.py [--documents=100000] [--seq-length=4096]

Lengths are drawn, not read.  Text: log-normal, the logarithm of deviation 1, mean a sixth of a row, at most a row;
and normal, mean a seventh of a row, deviation a tenth of that, which is hard: no small document fills up a row.
Images: two thirds of the conversations have one to three images of 64 to 1024 visual tokens (uniform in the logarithm),
together at most half a row, each token of four patches, and text of the same kind with mean 250 tokens; rows have room
for 3, 2.5 or 2 patches a token.  With images a plan can't have fewer rows than the tokens or the patches need: the
share of that bound is printed too.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np

from jaxforge.data.packing_plan import document_order, plan_rows
from jaxforge.data.rows import RowFormat
from jaxforge.data.sample_files import SampleFiles


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--window", type=int, default=20_000, help="data.packing_window")
    parser.add_argument("--index-megabytes", type=int, default=1000, help="size of a .jsonl to index; 0 for none")
    flags = parser.parse_args()
    rng = np.random.default_rng(0)
    length = flags.seq_length
    tokens = lognormal(rng, flags.documents, mean=length / 6, largest=length)
    print(f"{flags.documents} documents, rows of {length} tokens, windows of {flags.window}")
    report("text", tokens, np.zeros_like(tokens), RowFormat(length), flags.window)
    narrow = np.clip(rng.normal(length / 7, length / 70, flags.documents), 8, length).astype(np.int64)
    report("text of similar length", narrow, np.zeros_like(narrow), RowFormat(length), flags.window)
    visual = np.minimum(visual_tokens(rng, flags.documents), length // 2)
    tokens = visual + lognormal(rng, flags.documents, mean=250, largest=length // 4)
    for patches_per_token in (3, 2.5, 2):
        room = RowFormat(length, int(patches_per_token * length), merge=2, channels=1)
        report(f"images, {room.max_patches} patches", tokens, 4 * visual, room, flags.window)
    if flags.index_megabytes:
        index(flags.index_megabytes)


def lognormal(rng: np.random.Generator, count: int, mean: float, largest: int) -> np.ndarray:
    """Lengths whose logarithm has deviation 1; the mean is that before the longest are cut."""
    return np.clip(rng.lognormal(np.log(mean) - 0.5, 1.0, count), 8, largest).astype(np.int64)


def visual_tokens(rng: np.random.Generator, count: int) -> np.ndarray:
    """Visual tokens of conversations."""
    images = np.where(rng.random(count) < 2 / 3, rng.integers(1, 4, count), 0)
    sizes = np.exp(rng.uniform(np.log(64), np.log(1024), (count, 3))).astype(np.int64)
    return np.sum(sizes * (np.arange(3) < images[:, None]), axis=1)


def report(name: str, tokens_N: np.ndarray, patches_N: np.ndarray, room: RowFormat, window: int) -> None:
    began = time.perf_counter()
    order = document_order([len(tokens_N)], (), seed=0, epoch=0)
    plan = plan_rows(order, tokens_N, patches_N, room, window, np.random.default_rng(0))
    seconds = time.perf_counter() - began
    fill = plan.fill(tokens_N, room.seq_length)
    line = f"{name}: mean {tokens_N.mean():.0f} tokens, {len(plan)} rows, fill {fill:.4f}"
    if room.max_patches:
        patch_rows = patches_N.sum() / room.max_patches
        bound = max(tokens_N.sum() / room.seq_length, patch_rows)
        line += f", patches {patch_rows / len(plan):.4f}, {bound / len(plan):.4f} of what is possible"
    print(f"{line}; planned in {seconds:.2f} s")


def index(megabytes: int) -> None:
    """Time to find the lines of a .jsonl."""
    line = json.dumps({"text": "word " * 200}).encode() + b"\n"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "samples.jsonl"
        with path.open("wb") as file:
            block = line * 1000
            for _ in range(megabytes * 1_000_000 // len(block)):
                file.write(block)
        began = time.perf_counter()
        files = SampleFiles([str(path)])
        seconds = time.perf_counter() - began
    print(f"{len(files)} lines of a .jsonl of {megabytes} MB found in {seconds:.2f} s")


if __name__ == "__main__":
    main()
