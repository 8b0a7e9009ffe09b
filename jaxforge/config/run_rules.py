"""Rules on the run: parallel layout, batch, memory, schedule and platform."""

from collections.abc import Iterator
from typing import Any

from jaxforge.config.derived import data_parallel_size, lr_decay_iters
from jaxforge.config.model_rules import divisors, one_of
from jaxforge.config.schema import Config, OptimizerConfig


def devices_form_model_parallel_groups(config: Config, num_devices: int) -> Iterator[str]:
    """The devices are a whole number of groups that hold the decoder once: tensor x pipeline."""
    parallel = config.parallel
    tensor, stages = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    rest = num_devices % (tensor * stages)
    if not rest:
        return
    message = f"{num_devices} devices don't divide into groups of parallel.tensor_model_parallel_size={tensor}"
    more = f"or {num_devices - rest + tensor * stages} devices"
    if stages == 1:
        yield f"{message}; use {one_of(divisors(num_devices))}, {more}"
        return
    message += f" x parallel.pipeline_model_parallel_size={stages}"
    if num_devices % tensor:
        yield f"{message}; use sizes whose product is {one_of(divisors(num_devices))}, {more}"
    else:
        yield f"{message}; use a pipeline of {one_of(divisors(num_devices // tensor))}, {more}"


def global_batch_divides_into_microbatches(config: Config, num_devices: int) -> Iterator[str]:
    """Every data parallel rank computes the same number of whole microbatches."""
    train, ranks = config.train, data_parallel_size(config, num_devices)
    rows = train.micro_batch_size * ranks
    if train.global_batch_size % rows:
        below = train.global_batch_size // rows * rows
        fitting = one_of([size for size in (below, below + rows) if size])
        yield (
            f"train.global_batch_size={train.global_batch_size} is not a multiple of train.micro_batch_size="
            f"{train.micro_batch_size} x data parallel size {ranks} ({num_devices} devices) = {rows}; use {fitting}"
        )


def sequence_parallel_has_something_to_share(config: Config) -> Iterator[str]:
    """It shards the sequence over the tensor group, in equal parts."""
    parallel, length = config.parallel, config.train.seq_length
    tensor = parallel.tensor_model_parallel_size
    if parallel.sequence_parallel and tensor == 1:
        yield (
            "parallel.sequence_parallel=True would have no effect with parallel.tensor_model_parallel_size=1;"
            " set it to false or use a larger tensor parallel size"
        )
    elif parallel.sequence_parallel and length % tensor:
        yield (
            f"train.seq_length={length} is not a multiple of parallel.tensor_model_parallel_size={tensor}, which"
            f" parallel.sequence_parallel needs; use {-(-length // tensor) * tensor}"
        )


def recompute_is_whole(config: Config) -> Iterator[str]:
    """Megatron's rules: full needs a method and a number of layers, and both need full.

    Groups of uniform never span stages of a pipeline; there the last group of a stage may be smaller.
    """
    encoder, has_stages = config.model.encoder, config.parallel.pipeline_model_parallel_size > 1
    yield from _recompute(config.memory, "memory", config.model.decoder.num_layers, "model.decoder", has_stages)
    if encoder is not None:
        yield from _recompute(encoder, "model.encoder", encoder.num_layers, "model.encoder")


def _recompute(group: Any, path: str, layers: int, model: str, has_stages: bool = False) -> Iterator[str]:
    method, number = group.recompute_method, group.recompute_num_layers
    if group.recompute_granularity is None:
        for name in ("recompute_method", "recompute_num_layers"):
            if getattr(group, name) is not None:
                yield (
                    f"{path}.{name}={getattr(group, name)} would have no effect, because"
                    f" {path}.recompute_granularity is None; set that to full or {name} to None"
                )
        return
    if method is None:
        yield f"{path}.recompute_granularity=full needs {path}.recompute_method; use uniform or block"
    if number is None:
        yield f"{path}.recompute_granularity=full needs {path}.recompute_num_layers; 1 saves the most memory"
    elif method == "uniform" and layers % number and not has_stages:
        yield (
            f"{path}.recompute_num_layers={number} does not divide {model}.num_layers={layers}, which"
            f" {path}.recompute_method=uniform needs; use {one_of(divisors(layers))}"
        )
    elif number > layers:
        yield f"{path}.recompute_num_layers={number} is more than {model}.num_layers={layers}; use at most {layers}"


def learning_rate_schedule_is_consistent(config: Config) -> Iterator[str]:
    """The warm-up ends before the decay does, and every field of the schedule has an effect in its style."""
    optimizer, decay = config.optimizer, lr_decay_iters(config)
    style, warmup, final = optimizer.lr_decay_style, optimizer.lr_warmup_iters, optimizer.lr_wsd_decay_iters
    decay_source = "train.steps" if optimizer.lr_decay_iters is None else "optimizer.lr_decay_iters"
    if optimizer.min_lr > optimizer.learning_rate:
        yield (
            f"optimizer.min_lr={optimizer.min_lr} is above optimizer.learning_rate={optimizer.learning_rate};"
            " lower it or raise the learning rate"
        )
    if warmup >= decay:
        yield f"optimizer.lr_warmup_iters={warmup} must be below {decay_source}={decay}; use at most {decay - 1}"
    if style == "constant":
        for name in ("min_lr", "lr_decay_iters"):
            if getattr(optimizer, name) != getattr(OptimizerConfig, name):
                yield (
                    f"optimizer.{name}={getattr(optimizer, name)} would have no effect with"
                    f" optimizer.lr_decay_style=constant; leave it at {getattr(OptimizerConfig, name)}"
                )
    if style == "WSD" and final is None:
        yield "optimizer.lr_decay_style=WSD needs optimizer.lr_wsd_decay_iters, the length of its final decay"
    elif style == "WSD" and final is not None and final > decay - warmup:
        yield (
            f"optimizer.lr_wsd_decay_iters={final} doesn't fit between optimizer.lr_warmup_iters={warmup} and"
            f" {decay_source}={decay}; use at most {decay - warmup}"
        )
    elif style != "WSD" and final is not None:
        yield (
            f"optimizer.lr_wsd_decay_iters={final} would have no effect with optimizer.lr_decay_style={style};"
            " set it to None or the style to WSD"
        )


def optimizer_numbers_are_possible(config: Config) -> Iterator[str]:
    """Moments decay by less than 1; a learning-rate factor of 0 is written as `freeze`."""
    optimizer = config.optimizer
    for name in ("adam_beta1", "adam_beta2"):
        value = getattr(optimizer, name)
        if not 0 <= value < 1:
            yield f"optimizer.{name}={value} must be at least 0 and below 1"
    for pattern, factor in optimizer.lr_scale:
        if factor <= 0:
            yield (
                f"optimizer.lr_scale gives {pattern!r} the factor {factor}, which must be above 0;"
                " list the pattern in optimizer.freeze to stop its training"
            )


def platform_can_run_it(config: Config, platform: str) -> Iterator[str]:
    """cuDNN attention needs a GPU and bfloat16; simulated devices are CPU devices."""
    train, is_cpu = config.train, platform == "cpu"
    if train.attention_backend == "cudnn" and is_cpu:
        yield "train.attention_backend=cudnn needs a GPU, and this run is on cpu; use xla or auto"
    elif train.attention_backend == "cudnn" and train.compute_dtype == "float32":
        yield (
            "train.attention_backend=cudnn computes in bfloat16, but train.compute_dtype=float32;"
            " use attention_backend=xla or compute_dtype=bfloat16"
        )
    if train.simulated_devices is not None and not is_cpu:
        yield (
            f"train.simulated_devices={train.simulated_devices} simulates CPU devices, but this run is on {platform};"
            " set it to None, or JAX_PLATFORMS=cpu in the environment"
        )


RUN_RULES = (
    sequence_parallel_has_something_to_share,
    recompute_is_whole,
    learning_rate_schedule_is_consistent,
    optimizer_numbers_are_possible,
)
DEVICE_RULES = (devices_form_model_parallel_groups, global_batch_divides_into_microbatches)
PLATFORM_RULES = (platform_can_run_it,)
