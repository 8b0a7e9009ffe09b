"""Evaluates a run's newest checkpoint: python -m jaxforge.evaluate --config=configs/demo_vlm.py --workdir=DIR"""

from collections.abc import Sequence
from pathlib import Path

import jax

from jaxforge.config import ConfigError, command_line, load_config, resolve


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
    from jaxforge.data import eval_source
    from jaxforge.training.evaluation import make_evaluator
    from jaxforge.training.loop import describe_evaluation, open_rundir, start
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
    step, state, _ = restored
    rows = config.train.global_batch_size // num_microbatches(config, jax.device_count())
    evaluator = make_evaluator(source, program, rows)
    assert evaluator is not None  # there is a source
    evaluation = evaluator(state)
    if jax.process_index() == 0:
        print(f"step {step}: {describe_evaluation(evaluation)}")
    return 0


if __name__ == "__main__":
    command_line.run(main)
