"""What each activation costs a run: memory where it is kept, matrix products where it is computed again."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxforge.config.activations import (
    LAYER_INPUT,
    OFFLOAD,
    RECOMPUTE,
    SAVE,
    layer_actions,
    model_parts,
    recompute_group,
)
from jaxforge.config.derived import (
    encoder_devices,
    encoder_tensor_parallel_size,
    experts_are_over_tensor,
    layer_has_experts,
    patches_per_full_image,
)
from jaxforge.config.errors import ConfigError
from jaxforge.config.part_flops import window_patches
from jaxforge.config.schema import Config
from jaxforge.memory.layer_costs import KeptArray, kept_arrays
from jaxforge.memory.policy import SHARDED_DIM
from jaxforge.memory.recompute import recompute_segments, recomputes_mtp_layers
from jaxforge.models import VisionLanguageModel
from jaxforge.models.layer_order import FEED_FORWARDS
from jaxforge.models.parameters import segments_between
from jaxforge.models.rope import patch_angles
from jaxforge.ops.attention import row_segments
from jaxforge.optim.paths import join
from jaxforge.parallel.decoder_parts import decoder_parts
from jaxforge.parallel.encoder import encoder_placement
from jaxforge.parallel.pipeline.buffers import unit_slots
from jaxforge.parallel.pipeline.choice import pipeline_layout, stage_units
from jaxforge.parallel.pipeline.summary import schedule_of
from jaxforge.parallel.rules import decoder_placement

Tree = Any


@dataclasses.dataclass(frozen=True)
class ActivationCost:
    """Of one activation of the decoder's or the encoder's layers, on each GPU.

    Attributes:
      action: what becomes of it in layers that full recompute leaves out: save, recompute or offload.
      layer_bytes: of one layer and one microbatch (of the encoder, what it encodes at once).
      recompute_flops: matrix products that computing it again in one layer takes, the activations before it kept.
      device_bytes, host_bytes: of all layers that are kept at a time.
    """

    part: str
    name: str
    action: str
    layer_bytes: int
    recompute_flops: int
    device_bytes: int
    host_bytes: int

    def joined(self, other: "ActivationCost") -> "ActivationCost":
        """The same activation in other layers beside these."""
        return dataclasses.replace(
            self,
            device_bytes=self.device_bytes + other.device_bytes,
            host_bytes=self.host_bytes + other.host_bytes,
        )


def activation_costs(
    config: Config, model: VisionLanguageModel, trainable: Tree, frozen: Tree, dtype: jnp.dtype, microbatches: int
) -> list[ActivationCost]:
    """The activations of a layer of each part of the model, in the order in which they are computed.

    Args:
      model: abstract, on one device.
      trainable, frozen: shapes of its parameters.
      dtype: that they are computed in.
      microbatches: of each data parallel rank.
    """
    costs: list[ActivationCost] = []
    for part in model_parts(config):
        if _has_a_backward_pass(part, trainable):
            of_part: dict[str, ActivationCost] = {}
            for feed_forward, (kept, recomputed) in _layers_at_once(config, part, microbatches).items():
                arrays = _kept_by_layer(config, part, model, trainable, frozen, dtype, feed_forward)
                for name in dict.fromkeys(array.name for array in arrays):
                    cost = _cost(config, part, name, arrays, kept, recomputed)
                    of_part[name] = cost.joined(of_part[name]) if name in of_part else cost
            costs += of_part.values()
    return costs


def refuse_a_size_that_nothing_reaches(config: Config, costs: list[ActivationCost]) -> None:
    """ConfigError where `memory.min_offloaded_tensor_size` leaves every activation on the device."""
    smallest = config.memory.min_offloaded_tensor_size
    if smallest is None or any(cost.action == OFFLOAD for cost in costs):
        return
    asked = [cost for cost in costs if layer_actions(config, cost.part).get(cost.name) == OFFLOAD]
    if not asked:
        raise ConfigError(
            f"memory.min_offloaded_tensor_size={smallest} would have no effect, because nothing trains in or before the"
            " layers whose activations are offloaded, so they have no backward pass; leave it at None"
        )
    largest = max(asked, key=lambda cost: cost.layer_bytes)
    raise ConfigError(
        f"memory.min_offloaded_tensor_size={smallest} leaves every activation on the device: the largest that would"
        f" move is {largest.name} of the {largest.part}, {largest.layer_bytes} bytes of a layer on each device; use at"
        " most that"
    )


def _has_a_backward_pass(part: str, trainable: Tree) -> bool:
    """Whether anything trains in the part's layers or before them."""
    if "encoder" in trainable:
        return True
    if part == "encoder":
        return False
    return "projector" in trainable or bool(trainable.get("decoder", {}).keys() & {"embedding_VD", "layers"})


def _kept_by_layer(
    config: Config, part: str, model: VisionLanguageModel, trainable: Tree, frozen: Tree, dtype: jnp.dtype,
    feed_forward: str,
) -> list[KeptArray]:  # fmt: skip
    make = _decoder_layer if part == "decoder" else _encoder_layer
    layer, x, batch = make(config, model, dtype)

    def one_layer(tree):
        layers = tree.get(part, {}).get("layers", {})
        layers = {name: below for name, below in layers.items() if name not in FEED_FORWARDS or name == feed_forward}
        return jax.tree.map(lambda stack: jax.ShapeDtypeStruct(stack.shape[1:], dtype), layers)

    def apply(trainable, x, others):
        frozen, batch = others
        return layer(join(trainable, frozen), x, batch)

    return kept_arrays(apply, one_layer(trainable), x, (one_layer(frozen), batch))


def _decoder_layer(config: Config, model: VisionLanguageModel, dtype: jnp.dtype) -> tuple[Callable, Any, Tree]:
    """A layer, its input, and the microbatch that it reads beside it."""
    parts = decoder_parts(model.decoder)
    rows, length = config.train.micro_batch_size, config.train.seq_length
    microbatch = {
        "positions": jax.ShapeDtypeStruct((rows, 3, length), jnp.int32),
        "segment_ids": jax.ShapeDtypeStruct((rows, length), jnp.int32),
    }
    if config.model.decoder.hidden_dropout:
        microbatch["dropout_keys"] = jax.ShapeDtypeStruct((rows, 2), jnp.uint32)

    def layer(parameters, x, microbatch):
        return parts.layer(parameters, x, parts.shared(microbatch), jnp.int32(0))

    return layer, jax.ShapeDtypeStruct((rows, length, config.model.decoder.hidden_size), dtype), microbatch


def _encoder_layer(config: Config, model: VisionLanguageModel, dtype: jnp.dtype) -> tuple[Callable, Any, Tree]:
    encoder, patches = config.model.encoder, config.data.max_patches_per_row
    assert encoder is not None and patches is not None  # validate asks for both
    graph = nnx.graphdef(model.encoder.layers)
    rows = 1 if encoder_devices(config) > 1 else config.train.micro_batch_size
    batch = {
        "patch_positions": jax.ShapeDtypeStruct((rows, patches, 2), jnp.int32),
        "patch_segments": jax.ShapeDtypeStruct((rows, patches), jnp.int32),
    }

    def layer(parameters, x, batch):
        angles = patch_angles(batch["patch_positions"], encoder.kv_channels, encoder.rotary_base)
        segments = row_segments(batch["patch_segments"], causal=False, backend=model.encoder.backend)
        return nnx.merge(graph, parameters)(x, angles, segments)

    return layer, jax.ShapeDtypeStruct((rows, patches, encoder.hidden_size), dtype), batch


def _layers_at_once(config: Config, part: str, microbatches: int) -> dict[str, tuple[int, int]]:
    """Layers whose activations a GPU keeps at a time, and units of which it keeps the input alone.

    By the feed-forward of the layers, "mlp" or "moe".
    """
    found: dict[str, tuple[int, int]] = {}

    def add(feed_forward, kept, recomputed):
        before = found.get(feed_forward, (0, 0))
        found[feed_forward] = before[0] + kept, before[1] + recomputed

    stages = pipeline_layout(config) if part == "decoder" else None
    if stages is not None:
        for kind, slots in unit_slots(schedule_of(stages, microbatches), stage_units(config, stages)).items():
            # MTP layers are kept or recomputed one by one
            num_units = slots.num_slots * (kind.num_layers if kind.is_ahead else 1)
            kept, recomputed = (0, num_units) if kind.is_recomputed else (num_units, 0)
            add(kind.feed_forward, kept, recomputed)
        return found
    group, _ = recompute_group(config, part)
    num_layers = getattr(config.model, part).num_layers
    segments, first = recompute_segments(group, num_layers), 0
    has_experts = layer_has_experts(config.model.decoder) if part == "decoder" else (False,) * num_layers
    for has, run in itertools.groupby(has_experts):
        last = first + len(list(run))
        for count, unit in segments_between(segments, first, last):
            kept, recomputed = (0, count // unit) if unit else (count, 0)
            add("moe" if has else "mlp", kept, recomputed)
        first = last
    if part == "decoder" and (num_mtp := config.model.decoder.mtp_num_layers):
        kept, recomputed = (0, num_mtp) if recomputes_mtp_layers(config.memory) else (num_mtp, 0)
        add("moe" if has_experts[-1] else "mlp", kept, recomputed)
    return found


def _cost(
    config: Config, part: str, name: str, arrays: list[KeptArray], kept_layers: int, recomputed_units: int
) -> ActivationCost:
    shards, tensor = _shards(config, part, name) / _buffer_share(config, name), _tensor_size(config, part)
    action = layer_actions(config, part).get(name, SAVE)
    smallest = config.memory.min_offloaded_tensor_size or 0
    sizes = [int(array.bytes / shards) for array in arrays if array.name == name]
    moved = sum(size for size in sizes if action == OFFLOAD and size >= smallest)
    if action == OFFLOAD and not moved:
        action = SAVE
    stays = 0 if action == RECOMPUTE else sum(sizes) - moved
    copies = kept_layers + (recomputed_units if name == LAYER_INPUT else 0)
    if name == "core_attn":  # a kernel, or products with all of [S, S]
        flops = _attention_flops(config, part, arrays)
    elif name == "expert_fc1":  # a kernel, or a loop over experts
        [rows, inner] = next(array.shape for array in arrays if array.name == name)
        flops = 4 * rows * inner * config.model.decoder.hidden_size
    else:
        flops = max(array.flops for array in arrays if array.name == name)
    # the down projections of latent attention are whole on each device, which divides their tokens if anything
    sharers = shards if name in ("query_compressed", "kv_compressed") else tensor
    return ActivationCost(
        part=part,
        name=name,
        action=action if copies else RECOMPUTE,
        layer_bytes=sum(sizes),
        recompute_flops=int(flops // sharers),
        device_bytes=copies * stays,
        host_bytes=copies * moved,
    )


def _shards(config: Config, part: str, name: str) -> int:
    """Devices among which an activation is divided."""
    if part == "decoder":
        over_tensor = experts_are_over_tensor(config)
        placement = decoder_placement(config.parallel.sequence_parallel, experts_are_over_tensor=over_tensor)
    else:
        placement = encoder_placement()
    return _tensor_size(config, part) if placement.axes(SHARDED_DIM.get(name)) else 1


def _buffer_share(config: Config, name: str) -> float:
    """Rows that a device has room for, as a multiple of the (token, expert) pairs that it sends."""
    decoder, parallel = config.model.decoder, config.parallel
    ranks = parallel.expert_model_parallel_size
    if name not in ("dispatched_input", "expert_fc1", "moe_act") or decoder.num_experts is None or ranks == 1:
        return 1.0
    at_most = ranks * min(decoder.moe_router_topk, decoder.num_experts // ranks) / decoder.moe_router_topk
    return min(at_most, config.moe.moe_buffer_factor or at_most)


def _tensor_size(config: Config, part: str) -> int:
    return config.parallel.tensor_model_parallel_size if part == "decoder" else encoder_tensor_parallel_size(config)


def _attention_flops(config: Config, part: str, arrays: list[KeptArray]) -> int:
    """Two products over what each query sees, as `jaxforge.training.flops` counts it."""
    [queries], [values] = ([array.shape for array in arrays if array.name == name] for name in ("query", "value"))
    rows, length, heads, width = queries
    if part == "decoder":
        return rows * length * heads * (width + values[-1]) * length
    encoder = config.model.encoder
    assert encoder is not None
    image = min(length, patches_per_full_image(encoder))
    seen = np.full(encoder.num_layers, image)
    if encoder.model_type == "qwen2_5_vit":
        seen[:] = min(image, window_patches(encoder))
        seen[list(encoder.fullatt_block_indexes)] = image
    return int(4 * rows * length * heads * width * seen.mean())
