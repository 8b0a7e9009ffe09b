"""Refuses a config that can't run on these devices, asks for what isn't built, or sets what would have no effect.

A rule is a generator of messages: it yields one for each way in which the config breaks it.  The first message of the
first broken rule is raised, so a rule may rely on those before it.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from jaxforge.config.checkpoint_rules import CHECKPOINT_RULES
from jaxforge.config.data_rules import DATA_RULES
from jaxforge.config.encoder_rules import ENCODER_RULES
from jaxforge.config.errors import ConfigError
from jaxforge.config.lora_rules import LORA_RULES
from jaxforge.config.memory_rules import MEMORY_RULES
from jaxforge.config.model_rules import MODEL_RULES
from jaxforge.config.moe_rules import MOE_DEVICE_RULES, MOE_RULES
from jaxforge.config.pipeline_rules import PIPELINE_RULES
from jaxforge.config.run_rules import DEVICE_RULES, PLATFORM_RULES, RUN_RULES
from jaxforge.config.schema import Config

_AT_LEAST_ONE = {
    "loss": ("lce_fwd_vocab_split_size", "lce_bwd_vocab_split_size"),
    "model.decoder": (
        "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
        "vocab_size", "make_vocab_size_divisible_by", "rope_scaling_original_max_position_embeddings", "mrope_section",
        "num_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size",
        "moe_router_num_groups", "moe_router_group_topk",
        "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rotary_scaling_factor",
        "original_max_position_embeddings",
    ),
    "model.encoder": (
        "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "in_channels",
        "patch_size", "temporal_patch_size", "spatial_merge_size", "image_size", "window_size",
        "tensor_model_parallel_size", "recompute_num_layers",
    ),
    "model.projector": ("ffn_hidden_size",),
    "parallel": (
        "tensor_model_parallel_size", "pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage",
        "virtual_pipeline_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size",
    ),
    "memory": ("recompute_num_layers", "min_offloaded_tensor_size"),
    "optimizer": ("lr_decay_iters", "lr_wsd_decay_iters"),
    "data": (
        "min_pixels", "max_pixels", "video_max_frames", "packing_window", "max_patches_per_row", "digits_max",
        "eval_samples", "prefetch", "num_threads",
    ),
    "train": (
        "steps", "global_batch_size", "micro_batch_size", "seq_length", "log_every_steps", "simulated_devices",
    ),
    "checkpoint": ("keep",),
}  # fmt: skip
_AT_LEAST_ZERO = {
    "model.decoder": ("mscale", "mscale_all_dim", "mtp_num_layers"),
    "parallel": ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    "optimizer": ("min_lr", "lr_warmup_iters", "weight_decay", "clip_grad"),
    "loss": ("z_loss_coefficient",),
    "moe": ("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_bias_update_rate"),
    "train": ("seed", "eval_every_steps", "max_skipped_steps"),
    "checkpoint": ("save_every_steps", "export_hf_every_steps"),
}
_ABOVE_ZERO = {
    "model.decoder": (
        "norm_epsilon", "rotary_base", "init_method_std", "rope_scaling_factor", "rope_scaling_low_freq_factor",
        "rope_scaling_high_freq_factor", "moe_router_topk_scaling_factor", "beta_fast", "beta_slow",
    ),
    "model.encoder": ("norm_epsilon", "rotary_base", "init_method_std"),
    "model.projector": ("norm_epsilon",),
    "optimizer": ("learning_rate", "adam_eps"),
    "data": ("weights", "video_fps"),
    "moe": ("moe_buffer_factor", "moe_expert_capacity_factor"),
}  # fmt: skip
_FRACTION: dict[str, tuple[str, ...]] = {
    "model.decoder": ("hidden_dropout",),
    "data": ("max_skipped_fraction",),
}


def validate(config: Config, num_devices: int, platform: str = "cpu") -> None:
    """Applies every rule.

    Args:
      config: what `resolve` returns.
      num_devices: devices of the whole run, over all processes.
      platform: JAX's name for their kind: `cpu`, or `gpu`, `cuda` or `rocm`.

    Raises:
      ConfigError: naming the fields, their values, the rule and a way out.
    """
    broken = (message for messages in _all_messages(config, num_devices, platform) for message in messages)
    for message in broken:
        raise ConfigError(message)


def _all_messages(config: Config, num_devices: int, platform: str) -> Iterator[Iterator[str]]:
    yield unbuilt_features_are_refused(config)
    yield numbers_are_in_range(config)
    model_rules = (*MODEL_RULES, *MOE_RULES, *PIPELINE_RULES, *ENCODER_RULES, *LORA_RULES)
    rules = (*model_rules, *CHECKPOINT_RULES, *MEMORY_RULES, *RUN_RULES, *DATA_RULES)
    yield from (rule(config) for rule in rules)
    yield from (rule(config, num_devices) for rule in (*DEVICE_RULES, *MOE_DEVICE_RULES))
    yield from (rule(config, platform) for rule in PLATFORM_RULES)


def unbuilt_features_are_refused(config: Any, path: str = "") -> Iterator[str]:
    """Every field marked `planned` in the schema is at its default."""
    for field in dataclasses.fields(config):
        name, value = f"{path}{field.name}", getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from unbuilt_features_are_refused(value, f"{name}.")
        elif field.metadata.get("planned") and value != field.default:
            yield f"{name}={value}: {field.metadata['planned']} isn't built yet; leave it at {field.default}"


def numbers_are_in_range(config: Config) -> Iterator[str]:
    """Sizes and counts are positive; a field that is None is not looked at."""
    for name, value in _numbers(config, _AT_LEAST_ONE):
        if value < 1:
            yield f"{name}={value} must be at least 1"
    for name, value in _numbers(config, _AT_LEAST_ZERO):
        if value < 0:
            yield f"{name}={value} must be at least 0"
    for name, value in _numbers(config, _ABOVE_ZERO):
        if value <= 0:
            yield f"{name}={value} must be above 0"
    if config.train.seed >= 2**31:
        yield f"train.seed={config.train.seed} must be below 2^31"
    for name, value in _numbers(config, _FRACTION):
        if not 0 <= value < 1:
            yield f"{name}={value} must be at least 0 and below 1"


def _numbers(config: Config, table: dict[str, tuple[str, ...]]) -> Iterator[tuple[str, float]]:
    for path, names in table.items():
        group: Any = config
        for part in path.split("."):
            group = getattr(group, part)
        for name in names if group is not None else ():
            value = getattr(group, name)
            if isinstance(value, tuple):
                yield from ((f"{path}.{name}[{i}]", element) for i, element in enumerate(value))
            elif value is not None:
                yield f"{path}.{name}", value
