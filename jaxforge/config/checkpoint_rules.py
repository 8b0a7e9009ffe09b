"""Rules on where weights come from and go to: each yields a message for each way in which the config breaks it."""

from collections.abc import Iterator

from jaxforge.config.schema import CheckpointConfig, Config


def weights_come_from_one_place(config: Config) -> Iterator[str]:
    """A run starts from one set of weights, and what is said of a Hugging Face folder needs one."""
    checkpoint = config.checkpoint
    if checkpoint.init_from_hf is not None and checkpoint.pretrained_checkpoint is not None:
        yield (
            f"checkpoint.init_from_hf={checkpoint.init_from_hf} and checkpoint.pretrained_checkpoint="
            f"{checkpoint.pretrained_checkpoint} both give the weights to start from; set one of them to None"
        )
    for name in ("init_allow_missing", "init_allow_unexpected"):
        if getattr(checkpoint, name) and checkpoint.init_from_hf is None:
            yield (
                f"checkpoint.{name}={getattr(checkpoint, name)} would have no effect, because checkpoint.init_from_hf"
                " is None; leave it empty"
            )


def exports_are_possible(config: Config) -> Iterator[str]:
    """The dtype of exports needs exports."""
    checkpoint = config.checkpoint
    if checkpoint.export_hf_every_steps == 0 and checkpoint.export_hf_dtype != CheckpointConfig.export_hf_dtype:
        yield (
            f"checkpoint.export_hf_dtype={checkpoint.export_hf_dtype} would have no effect with"
            f" checkpoint.export_hf_every_steps=0; set that, or leave the dtype at {CheckpointConfig.export_hf_dtype}"
        )


CHECKPOINT_RULES = (weights_come_from_one_place, exports_are_possible)
