"""Rules on the run: parallel layout, batch, schedule and platform."""

from collections.abc import Iterator

from jaxforge.config.derived import data_parallel_size, encoder_devices, lr_decay_iters
from jaxforge.config.model_rules import divisors, one_of
from jaxforge.config.schema import Config, LossConfig, OptimizerConfig

# Half of the largest distance, relative to them, between two neighbours of bfloat16, which has 8 significant bits.
_BFLOAT16_STEP = 2**-8


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


def optimizer_offload_has_a_share(config: Config) -> Iterator[str]:
    """Of the state that goes to host memory: more than nothing, and nothing is said of it where none goes."""
    memory, fraction = config.memory, config.memory.optimizer_offload_fraction
    if fraction is None:
        return
    if not memory.optimizer_cpu_offload:
        yield (
            f"memory.optimizer_offload_fraction={fraction} would have no effect with"
            " memory.optimizer_cpu_offload=False; set that to true, or optimizer_offload_fraction to None"
        )
    elif not 0 < fraction <= 1:
        yield (
            f"memory.optimizer_offload_fraction={fraction} must be above 0 and at most 1; None or 1 moves all, and"
            " memory.optimizer_cpu_offload=false none"
        )


def optimizer_numbers_are_possible(config: Config) -> Iterator[str]:
    """Moments decay by less than 1, and visibly; a learning-rate factor of 0 is written as `freeze`."""
    optimizer = config.optimizer
    for name in ("adam_beta1", "adam_beta2"):
        value = getattr(optimizer, name)
        if not 0 <= value < 1:
            yield f"optimizer.{name}={value} must be at least 0 and below 1"
    for beta, moment in (("adam_beta1", "exp_avg_dtype"), ("adam_beta2", "exp_avg_sq_dtype")):
        value = getattr(optimizer, beta)
        if getattr(optimizer, moment) == "bfloat16" and 1 - value < _BFLOAT16_STEP:
            yield (
                f"optimizer.{moment}=bfloat16 can't hold a moment that decays by 1 - optimizer.{beta} = {1 - value:.2g}"
                f" in an update: rounding undoes less than {_BFLOAT16_STEP:.2g}; use {moment}=float32, or {beta} of"
                f" {1 - _BFLOAT16_STEP:.3f} at most"
            )
    for pattern, factor in optimizer.lr_scale:
        if factor <= 0:
            yield (
                f"optimizer.lr_scale gives {pattern!r} the factor {factor}, which must be above 0;"
                " list the pattern in optimizer.freeze to stop its training"
            )


def platform_can_run_it(config: Config, platform: str) -> Iterator[str]:
    """cuDNN attention needs a GPU and bfloat16; simulated devices are CPU devices."""
    train, is_cpu = config.train, platform == "cpu"
    backend = train.attention_backend
    if backend in ("cudnn", "flash") and is_cpu:
        yield f"train.attention_backend={backend} needs a GPU, and this run is on cpu; use xla or auto"
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


def overlap_has_something_to_overlap(config: Config) -> Iterator[str]:
    """What moves while something is computed moves in the course of the computation, and not at its end."""
    parallel = config.parallel
    strategy = parallel.data_parallel_sharding_strategy
    field = f"parallel.data_parallel_sharding_strategy={strategy}"
    if parallel.overlap_grad_reduce and strategy == "no_shard":
        yield (
            f"parallel.overlap_grad_reduce=True would have no effect with {field}, which reduces all gradients once,"
            " after the last microbatch; use optim or optim_grads there, or set it to false"
        )
    elif parallel.overlap_grad_reduce and strategy == "optim" and _has_phases(config):
        yield (
            f"parallel.overlap_grad_reduce=True would have no effect with {field} and a pipeline or a hetero DP mode,"
            " which reduce all gradients once, after the last microbatch; use optim_grads, or set it to false"
        )
    if parallel.overlap_param_gather and strategy != "optim_grads_params":
        yield (
            f"parallel.overlap_param_gather=True would have no effect with {field}, which gathers no weights of single"
            " layers; use optim_grads_params, or set it to false"
        )
    if parallel.tp_comm_overlap and not parallel.sequence_parallel:
        yield (
            "parallel.tp_comm_overlap=True would have no effect with parallel.sequence_parallel=False; set that to"
            " true, or tp_comm_overlap to false"
        )


def _has_phases(config: Config) -> bool:
    return config.parallel.pipeline_model_parallel_size > 1 or encoder_devices(config) > 1


def loss_fusion_is_asked_for(config: Config) -> Iterator[str]:
    """Nothing says how to fuse a loss that isn't."""
    loss = config.loss
    for name in ("cross_entropy_fusion_impl", "lce_fwd_vocab_split_size", "lce_bwd_vocab_split_size"):
        value = getattr(loss, name)
        if value is not None and not loss.cross_entropy_loss_fusion:
            yield (
                f"loss.{name}={value} would have no effect with loss.cross_entropy_loss_fusion=False; set that to true,"
                f" or {name} to None"
            )


def weight_of_multi_token_prediction_has_an_effect(config: Config) -> Iterator[str]:
    """There are layers whose loss it weighs, and it weighs it."""
    factor = config.loss.mtp_loss_scaling_factor
    if factor <= 0:
        yield (
            f"loss.mtp_loss_scaling_factor={factor} must be above 0; for no multi-token prediction set"
            " model.decoder.mtp_num_layers to 0"
        )
    elif factor != LossConfig.mtp_loss_scaling_factor and not config.model.decoder.mtp_num_layers:
        yield (
            f"loss.mtp_loss_scaling_factor={factor} would have no effect with model.decoder.mtp_num_layers=0; leave it"
            f" at {LossConfig.mtp_loss_scaling_factor}, or use layers for multi-token prediction"
        )


RUN_RULES = (
    loss_fusion_is_asked_for,
    weight_of_multi_token_prediction_has_an_effect,
    overlap_has_something_to_overlap,
    sequence_parallel_has_something_to_share,
    learning_rate_schedule_is_consistent,
    optimizer_numbers_are_possible,
    optimizer_offload_has_a_share,
)
DEVICE_RULES = (devices_form_model_parallel_groups, global_batch_divides_into_microbatches)
PLATFORM_RULES = (platform_can_run_it,)
