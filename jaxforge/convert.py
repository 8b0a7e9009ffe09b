"""Between Hugging Face folders and JaxForge's weights, tensor by tensor.

    python -m jaxforge.convert from-hf SRC DST             a Hugging Face folder to a folder of weights
    python -m jaxforge.convert to-hf SRC DST [--verify]    a folder of weights, or a run's directory, to a HF folder

Training starts from DST of from-hf with --config.checkpoint.pretrained_checkpoint=DST (from the Hugging Face folder
itself with --config.checkpoint.init_from_hf=SRC).  Neither depends on a parallel layout.  Exit code 0, or 2 on an error
that the user can mend.
"""

import argparse
import dataclasses
import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxforge.config import ConfigError, command_line
from jaxforge.config.hf_config import read_config_json
from jaxforge.config.model_schema import ModelConfig
from jaxforge.config.schema import CheckpointConfig

if TYPE_CHECKING:
    from jaxforge.checkpoint.arrays import ArrayReader


def main(argv: Sequence[str]) -> int:
    parser = command_line.Parser(
        prog="python -m jaxforge.convert",
        description="Converts between Hugging Face folders and JaxForge's weights.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    from_hf = commands.add_parser("from-hf", help="a Hugging Face folder to a folder of weights")
    from_hf.add_argument("src", metavar="SRC", help="the folder with config.json and the .safetensors files")
    from_hf.add_argument("dst", metavar="DST", help="the folder to make")
    from_hf.add_argument(
        "--allow-unexpected", action="append", default=[], metavar="PATTERN",
        help="tensors of SRC that may be left out: a pattern on their names; may be given several times",
    )  # fmt: skip
    to_hf = commands.add_parser("to-hf", help="trained weights to a folder that transformers loads")
    to_hf.add_argument("src", metavar="SRC", help="a folder of weights, a run's directory, or RUN/checkpoints/STEP")
    to_hf.add_argument("dst", metavar="DST", help="the folder to make")
    to_hf.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    to_hf.add_argument(
        "--hf", metavar="FOLDER",
        help="the Hugging Face folder whose config.json, tokenizer and processor files go along; by default the one"
        " that the weights came from",
    )  # fmt: skip
    to_hf.add_argument("--verify", action="store_true", help="compare logits of the new folder, read again, with SRC's")
    flags = parser.parse_args(argv)
    # nothing here needs an accelerator, whose memory JAX would take from a run that is on it
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # imported late: --help and a wrong command line needn't wait for JAX
    from jaxforge.checkpoint.new_folder import refuse_existing

    # before SRC is read, which may take minutes
    refuse_existing(Path(flags.dst))
    return convert_from_hf(flags) if flags.command == "from-hf" else convert_to_hf(flags)


def convert_from_hf(flags: argparse.Namespace) -> int:
    from jaxforge.checkpoint.hf import HFArrays, copy_companions, read_architecture
    from jaxforge.checkpoint.stored import write_weights

    source = Path(flags.src)
    architecture = read_architecture(source)
    arrays = HFArrays(source, architecture.model, allow_unexpected=flags.allow_unexpected)

    def copy_files(folder: Path) -> None:
        copy_companions(source, folder)
        shutil.copyfile(source / "config.json", folder / "config.json")

    write_weights(flags.dst, arrays, architecture.model, copy_files)
    print(f"{architecture.family}, {count(architecture.model)} parameters: {flags.dst}")
    return 0


def convert_to_hf(flags: argparse.Namespace) -> int:
    from jaxforge.checkpoint.hf import export
    from jaxforge.checkpoint.stored import RunCheckpoint, WeightsFolder
    from jaxforge.checkpoint.weights import run_and_step, trained_weights

    path = Path(flags.src)
    source = Path(flags.hf) if flags.hf else None
    tokenizer: str | None = None
    arrays: ArrayReader
    if WeightsFolder.is_one(path):
        folder = WeightsFolder.open(path)
        model, arrays = folder.model, folder.arrays
        source = source or folder.hf_folder
    else:
        saved = RunCheckpoint.open(*run_and_step(path, "SRC"))
        model, arrays = saved.config.model, trained_weights(saved)
        tokenizer = None if source else saved.config.data.tokenizer
        source = source or source_of(saved.config.checkpoint)
        print(f"step {saved.step} of {path}")
    export(flags.dst, arrays, model, source=source, tokenizer=tokenizer, dtype=flags.dtype)
    print(f"{count(model)} parameters in {flags.dtype}: {flags.dst}")
    if flags.verify:
        from jaxforge.training.verification import compare_export

        print(compare_export(flags.dst, arrays, model, flags.dtype))
    return 0


def source_of(checkpoint: CheckpointConfig) -> Path | None:
    """The Hugging Face folder of the weights that a run started from, if they came from one."""
    from jaxforge.checkpoint.weights import hf_folder

    try:
        source = hf_folder(checkpoint)
        if source is not None:
            read_config_json(source)
    except ConfigError as error:
        raise ConfigError(
            f"config.json and tokenizer of the weights that the run started from can't be read: {error}; name their"
            " folder with --hf"
        ) from error
    return source


def count(model: ModelConfig) -> str:
    """How many numbers a model has; padding of the vocabulary isn't counted."""
    from jaxforge.checkpoint.arrays import abstract_parameters, flatten

    decoder = dataclasses.replace(model.decoder, make_vocab_size_divisible_by=1)
    parameters = flatten(abstract_parameters(dataclasses.replace(model, decoder=decoder)))
    numbers = sum(math.prod(leaf.shape) for leaf in parameters.values())
    return f"{numbers / 1e9:.2f} G" if numbers >= 1e9 else f"{numbers / 1e6:.2f} M"


if __name__ == "__main__":
    command_line.run(main)
