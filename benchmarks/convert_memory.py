"""Peak host memory and time of converting a large checkpoint, both ways.

    python benchmarks/convert_memory.py [--gigabytes=8] [--folder=DIR]

Makes a Llama checkpoint of the size asked for (random bfloat16 weights, shards of 5 GB), converts it with
`jaxforge.convert from-hf` and `to-hf` in processes of their own, and prints each one's peak resident memory beside the
size of the model and of its largest tensor, and the same for reading all tensors at once with the safetensors library.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from jaxforge.checkpoint.arrays import abstract_parameters, flatten
from jaxforge.checkpoint.hf import llama
from jaxforge.checkpoint.hf.folder import write_tensors
from jaxforge.checkpoint.hf.model import pieces
from jaxforge.config.hf_config import architecture_of, config_json_of
from jaxforge.config.model_schema import DecoderConfig, ModelConfig

ALL_AT_ONCE = """
import sys
from pathlib import Path
import ml_dtypes
from safetensors.numpy import load_file
held = [load_file(file) for file in sorted(Path(sys.argv[1]).glob("*.safetensors"))]
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=8.0)
    parser.add_argument("--folder", help="where to work; by default a temporary folder")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=flags.folder) as folder:
        source, weights, back = (Path(folder) / name for name in ("hf", "weights", "back"))
        size, largest = make_checkpoint(source, flags.gigabytes)
        print(f"checkpoint of {size / 1e9:.2f} GB, largest tensor {largest / 1e9:.2f} GB")
        convert = [sys.executable, "-m", "jaxforge.convert"]
        report("import of the packages alone", [*convert, "--help"])
        report("from-hf", [*convert, "from-hf", str(source), str(weights)])
        shutil.rmtree(source)
        report("to-hf", [*convert, "to-hf", str(weights), str(back)])
        shutil.rmtree(weights)
        report("safetensors, all at once", [sys.executable, "-c", ALL_AT_ONCE, str(back)])


def make_checkpoint(folder: Path, gigabytes: float) -> tuple[int, int]:
    """Writes the checkpoint; bytes of all tensors, and of the largest."""
    decoder = DecoderConfig(
        num_layers=1, hidden_size=3072, ffn_hidden_size=8192, num_attention_heads=24, num_query_groups=8,
        kv_channels=128, vocab_size=128256, rotary_base=5e5,
    )  # fmt: skip

    def shapes_of(num_layers):
        written = config_json_of(ModelConfig(decoder=decoder), "llama") | {"num_hidden_layers": num_layers}
        model = architecture_of(written, "benchmark").model
        ours = {path: leaf.shape for path, leaf in flatten(abstract_parameters(model)).items()}
        tensors = llama.tensors(model, llama.PREFIXES[0])
        return written, [(name, tensor.hf_shape(shapes)) for name, tensor, shapes in pieces(tensors, ours)]

    def bytes_of(shapes):
        return sum(2 * math.prod(shape) for _, shape in shapes)

    one, two = bytes_of(shapes_of(1)[1]), bytes_of(shapes_of(2)[1])
    written, shapes = shapes_of(max(1, math.ceil((gigabytes * 1e9 - one) / (two - one)) + 1))
    by_name = dict(shapes)
    block = np.random.default_rng(0).normal(size=1 << 20).astype(np.float32)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(written))
    write_tensors(folder, shapes, "bfloat16", lambda name: np.resize(block, by_name[name]))
    return bytes_of(shapes), max(2 * math.prod(shape) for _, shape in shapes)


def report(what: str, command: list[str]) -> None:
    """Runs a command and prints its time and peak resident memory."""
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    peak = 0
    while process.poll() is None:
        # not getrusage, which counts what this process held when it forked
        peak = max(peak, high_water_mark(process.pid))
        time.sleep(0.05)
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed")
    print(f"{what}: {time.perf_counter() - began:.0f} s, peak {peak / 1e9:.2f} GB of host memory", flush=True)


def high_water_mark(pid: int) -> int:
    """The largest resident memory of a process so far, in bytes (Linux)."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except FileNotFoundError:  # it has just ended
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


if __name__ == "__main__":
    main()
