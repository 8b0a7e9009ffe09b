"""Rules on mixture of experts: the router, where experts lie, and how tokens reach them."""

from collections.abc import Iterator

from jaxforge.config.derived import (
    data_parallel_size,
    expert_axis_size,
    expert_ffn_hidden_size,
    experts_are_over_tensor,
)
from jaxforge.config.model_rules import divisors, one_of
from jaxforge.config.schema import Config, DecoderConfig, MoeConfig, ParallelConfig

_OF_EXPERTS = (
    ("model.decoder", DecoderConfig, (
        "moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_layer_freq",
        "moe_router_score_function", "moe_router_pre_softmax", "moe_router_num_groups", "moe_router_group_topk",
        "moe_router_topk_scaling_factor", "moe_router_enable_expert_bias",
    )),
    ("moe", MoeConfig, tuple(MoeConfig.__dataclass_fields__)),
    ("parallel", ParallelConfig, (
        "expert_model_parallel_size", "expert_tensor_parallel_size", "overlap_moe_expert_parallel_comm",
    )),
)  # fmt: skip


def expert_fields_need_experts(config: Config) -> Iterator[str]:
    """Without experts nothing about them has an effect."""
    if config.model.decoder.num_experts is None:
        for path, group, names in _OF_EXPERTS:
            yield from _without_effect(config, path, group, names, "model.decoder.num_experts=None")


def layers_with_experts_are_named(config: Config) -> Iterator[str]:
    """moe_layer_freq has an entry for each layer, and some have experts."""
    decoder, frequency = config.model.decoder, config.model.decoder.moe_layer_freq
    if frequency is None:
        return
    name = f"model.decoder.moe_layer_freq of {len(frequency)} entries"
    if len(frequency) != decoder.num_layers:
        yield f"{name} must have one for each of model.decoder.num_layers={decoder.num_layers}"
    elif set(frequency) - {0, 1}:
        odd = next(entry for entry in frequency if entry not in (0, 1))
        yield f"{name} has {odd}; an entry is 1 for a layer with experts, or 0 for a dense one"
    elif 1 not in frequency:
        yield f"{name} gives no layer experts; set model.decoder.num_experts to None for a dense decoder"


def router_can_choose(config: Config) -> Iterator[str]:
    """There are as many experts, in as many groups, as a token is sent to."""
    decoder = config.model.decoder
    experts, chosen = decoder.num_experts, decoder.moe_router_topk
    if experts is None:
        return
    if chosen > experts:
        yield f"model.decoder.moe_router_topk={chosen} is above model.decoder.num_experts={experts}; use at most that"
    groups, best = decoder.moe_router_num_groups, decoder.moe_router_group_topk
    if (groups is None) != (best is None):
        yield (
            f"model.decoder.moe_router_num_groups={groups} and model.decoder.moe_router_group_topk={best} go together;"
            " set both or neither"
        )
    elif groups is not None and best is not None:
        if experts % groups or experts // groups < 2:
            fitting = one_of([size for size in divisors(experts) if size <= experts // 2])
            yield (
                f"model.decoder.moe_router_num_groups={groups} doesn't divide model.decoder.num_experts={experts} into"
                f" groups of at least 2; use {fitting}"
            )
        elif best > groups:
            yield f"model.decoder.moe_router_group_topk={best} exceeds moe_router_num_groups={groups}; use at most that"
        elif chosen > best * (experts // groups):
            yield (
                f"model.decoder.moe_router_topk={chosen} is more than the {best * (experts // groups)} experts of"
                f" moe_router_group_topk={best} groups; use a smaller one, or more groups"
            )


def load_balancing_has_an_effect(config: Config) -> Iterator[str]:
    """A loss has a weight, a weight has a loss, and the rate belongs to a bias."""
    moe = config.moe
    if config.model.decoder.num_experts is None:
        return
    if (moe.moe_router_load_balancing_type == "none") != (moe.moe_aux_loss_coeff == 0):
        yield (
            f"moe.moe_router_load_balancing_type={moe.moe_router_load_balancing_type} and moe.moe_aux_loss_coeff="
            f"{moe.moe_aux_loss_coeff} contradict each other; a loss needs a weight above 0, and none has no weight"
        )
    if not config.model.decoder.moe_router_enable_expert_bias:
        yield from _without_effect(
            config, "moe", MoeConfig, ("moe_router_bias_update_rate",),
            "model.decoder.moe_router_enable_expert_bias=False",
        )  # fmt: skip
    if moe.moe_expert_capacity_factor is None:
        yield from _without_effect(
            config, "moe", MoeConfig, ("moe_token_drop_policy",), "moe.moe_expert_capacity_factor=None"
        )


def experts_divide_over_devices(config: Config) -> Iterator[str]:
    """Each device holds as many experts, or as large a part of each."""
    parallel, decoder = config.parallel, config.model.decoder
    if decoder.num_experts is None:
        return
    tensor, ranks = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
    shared = parallel.expert_tensor_parallel_size
    if shared not in (None, 1, tensor):
        yield (
            f"parallel.expert_tensor_parallel_size={shared} is neither 1 nor parallel.tensor_model_parallel_size="
            f"{tensor}, between which nothing is built; use one of them"
        )
    if decoder.num_experts % ranks:
        yield (
            f"parallel.expert_model_parallel_size={ranks} does not divide model.decoder.num_experts="
            f"{decoder.num_experts}; use {one_of(divisors(decoder.num_experts))}"
        )
    if experts_are_over_tensor(config) and ranks % tensor:
        yield (
            f"parallel.expert_model_parallel_size={ranks} is no multiple of parallel.tensor_model_parallel_size="
            f"{tensor}, over which parallel.expert_tensor_parallel_size=1 shares the experts out; use one, or"
            f" expert_tensor_parallel_size={tensor}"
        )
    if config.train.seq_length % tensor:
        yield (
            f"train.seq_length={config.train.seq_length} is not a multiple of parallel.tensor_model_parallel_size="
            f"{tensor}, over which the tokens that go to experts are divided; use"
            f" {-(-config.train.seq_length // tensor) * tensor}"
        )
    sizes = {} if experts_are_over_tensor(config) else {"moe_ffn_hidden_size": expert_ffn_hidden_size(decoder)}
    if decoder.moe_shared_expert_intermediate_size is not None:
        sizes["moe_shared_expert_intermediate_size"] = decoder.moe_shared_expert_intermediate_size
    for name, size in sizes.items():
        if size % tensor:
            yield (
                f"parallel.tensor_model_parallel_size={tensor} does not divide model.decoder.{name}={size}; use"
                f" {one_of(divisors(size))}"
            )


def dispatch_has_an_effect(config: Config) -> Iterator[str]:
    """Tokens move between devices only where experts lie on several."""
    if config.model.decoder.num_experts is None or config.parallel.expert_model_parallel_size > 1:
        return
    why = "parallel.expert_model_parallel_size=1"
    yield from _without_effect(config, "moe", MoeConfig, ("moe_token_dispatcher_type", "moe_buffer_factor"), why)
    yield from _without_effect(config, "parallel", ParallelConfig, ("overlap_moe_expert_parallel_comm",), why)


def experts_divide_over_data_parallel_ranks(config: Config, num_devices: int) -> Iterator[str]:
    """The ranks that share the experts out are data parallel ranks."""
    ranks, size = data_parallel_size(config, num_devices), expert_axis_size(config)
    if ranks % size:
        tensor = config.parallel.expert_model_parallel_size // size
        fitting = one_of([divisor * tensor for divisor in divisors(ranks)])
        yield (
            f"parallel.expert_model_parallel_size={config.parallel.expert_model_parallel_size} doesn't divide over"
            f" {ranks} data parallel ranks ({num_devices} devices); use {fitting}"
        )


def _without_effect(config: Config, path: str, group: type, names: tuple[str, ...], why: str) -> Iterator[str]:
    values = config
    for part in path.split("."):
        values = getattr(values, part)
    for name in names:
        value, default = getattr(values, name), getattr(group, name)
        if value != default:
            yield f"{path}.{name}={value} would have no effect with {why}; leave it at {default}"


MOE_RULES = (
    expert_fields_need_experts,
    layers_with_experts_are_named,
    router_can_choose,
    load_balancing_has_an_effect,
    experts_divide_over_devices,
    dispatch_has_an_effect,
)
MOE_DEVICE_RULES = (experts_divide_over_data_parallel_ranks,)
