"""The main job: python -m jaxforge.train --config=configs/demo_vlm.py [--config.train.steps=20] [--workdir=DIR]

The same command resumes.  Exit code 0 at the end or after SIGTERM (saved), 2 on a config error, 1 when the loss isn't
finite.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from jaxforge.config import command_line, load_config


def main(argv: Sequence[str]) -> int:
    parser = command_line.parser("train", "Trains a model, or resumes the run that the workdir holds.")
    parser.add_argument("--workdir", metavar="DIR", help="the run directory; by default runs/RECIPE")
    flags, overrides = command_line.parse(parser, argv)
    config = load_config(flags.config, overrides)
    workdir = flags.workdir or Path("runs") / Path(flags.config.partition(":")[0]).stem

    from jaxforge.training.loop import NotFiniteError, train  # after the config: an error there needs no JAX

    try:
        train(config, workdir)
    except NotFiniteError as error:
        print(f"stopped: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    command_line.run(main)
