"""Evaluates a run's newest checkpoint: python -m jaxforge.evaluate --config=configs/demo_vlm.py --workdir=DIR"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax

from jaxforge.config import ConfigError, command_line, load_config, resolve

# Groups of fields in which another value than that of the run may give another loss.
_SHAPES_THE_LOSS = ("model", "lora", "data")


def main(argv: Sequence[str]) -> int:
    parser = command_line.parser("evaluate", "Evaluates the newest checkpoint of a run on its held-out samples.")
    parser.add_argument("--workdir", metavar="DIR", help="the run directory; by default runs/RECIPE")
    flags, overrides = command_line.parse(parser, argv)
    config = resolve(load_config(flags.config, overrides))
    workdir = Path(flags.workdir or Path("runs") / Path(flags.config.partition(":")[0]).stem)
    if not (workdir / "checkpoints").is_dir():
        raise ConfigError(f"--workdir={workdir} holds no checkpoints; name the folder of a run that has saved one")

    from jaxforge.checkpoint.manager import CheckpointManager
    from jaxforge.cluster import MeshLayout, build_mesh
    from jaxforge.config.derived import num_microbatches
    from jaxforge.data import BatchLayout, eval_source
    from jaxforge.training.describe import describe_evaluation, differences
    from jaxforge.training.evaluation import make_evaluator
    from jaxforge.training.loop import open_rundir, start
    from jaxforge.training.program import build_program
    from jaxforge.training.state import restored_state

    platform = start(config)
    source = eval_source(config)
    if source is None:
        raise ConfigError(
            f"data.source={config.data.source} has no held-out samples; set data.eval_path, or evaluate a recipe that"
            " has some"
        )
    program = build_program(config, build_mesh(MeshLayout.from_config(config, jax.device_count())), platform)
    # the lock: restoring may set a damaged checkpoint aside, which must not happen under a run
    with open_rundir(workdir) as run:
        checkpoints = CheckpointManager(run.checkpoints, config.checkpoint.keep, save_every_steps=0)
        restored = restored_state(config, program, checkpoints)
        checkpoints.close()
    if restored is None:
        raise ConfigError(f"--workdir={workdir} holds no checkpoint yet; wait for the run to save one")
    step, state, metadata = restored
    layout = BatchLayout.from_config(config, program.mesh, num_microbatches(config, jax.device_count()))
    evaluator = make_evaluator(source, program, layout)
    assert evaluator is not None  # there is a source
    evaluation = evaluator(state)
    if jax.process_index() == 0:
        for line in differences(metadata["config"], dataclasses.asdict(config)):
            if line.partition(".")[0] in _SHAPES_THE_LOSS:
                print(f"changed since: {line}")
        print(f"step {step}: {describe_evaluation(evaluation)}")
    return 0


if __name__ == "__main__":
    command_line.run(main)
