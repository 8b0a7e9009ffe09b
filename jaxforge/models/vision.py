"""The vision encoders of Qwen2.5-VL and Qwen3-VL, over patches of any number of images packed along one axis."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxforge.config.schema import EncoderConfig
from jaxforge.memory.policy import KEEP_ALL, Policies
from jaxforge.models.attention import SelfAttention
from jaxforge.models.mlp import MLP
from jaxforge.models.norm import make_norm
from jaxforge.models.parameters import Segments, layer_keys, normal, scan_layers, stack, zeros
from jaxforge.models.rope import patch_angles
from jaxforge.ops.attention import RowSegments, row_segments
from jaxforge.ops.embedding import weighted_rows
from jaxforge.ops.placement import Placement

PATCH_NAMES = (None, None, None)


class EncoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), bidirectional.  x_BPD -> x_BPD."""

    def __init__(self, config: EncoderConfig, *, backend: str, placement: Placement, rngs: nnx.Rngs):
        self.attention_norm = make_norm(config.normalization, config.hidden_size, config.norm_epsilon)
        self.attention = SelfAttention(
            config.hidden_size,
            config.num_attention_heads,
            config.num_attention_heads,
            config.kv_channels,
            qkv_bias=config.add_qkv_bias,
            out_bias=config.add_bias_linear,
            qk_norm_epsilon=None,
            causal=False,
            std=config.init_method_std,
            backend=backend,
            placement=placement,
            rngs=rngs,
        )
        self.mlp_norm = make_norm(config.normalization, config.hidden_size, config.norm_epsilon)
        self.mlp = MLP(
            config.hidden_size,
            config.ffn_hidden_size,
            activation=config.activation_func,
            gated=config.swiglu,
            bias=config.add_bias_linear,
            std=config.init_method_std,
            placement=placement,
            rngs=rngs,
        )

    def __call__(self, x_BPD: jax.Array, angles_BPR: jax.Array, segments: RowSegments) -> jax.Array:
        normed_BPD = checkpoint_name(self.attention_norm(x_BPD), "attn_norm")
        x_BPD = checkpoint_name(x_BPD + self.attention(normed_BPD, angles_BPR, segments), "mlp_norm_input")
        return x_BPD + self.mlp(checkpoint_name(self.mlp_norm(x_BPD), "mlp_norm"))


class VisionEncoder(nnx.Module):
    """Patches to features.

    qwen2_5_vit (arXiv:2502.13923): attention in windows, but over the whole image in `fullatt_block_indexes`.
    qwen3_vit: full attention, a learned position table interpolated to each image's grid, and DeepStack
    (arXiv:2406.04334) features from `deepstack_visual_indexes`.
    """

    def __init__(
        self,
        config: EncoderConfig,
        *,
        backend: str,
        segments: Segments,
        placement: Placement,
        rngs: nnx.Rngs,
        policies: Policies = KEEP_ALL,
    ):
        patch_values = config.in_channels * config.temporal_patch_size * config.patch_size**2
        self.patch_CD = normal(rngs, (patch_values, config.hidden_size), (None, "embed"), config.init_method_std)
        self.has_positions = config.model_type == "qwen3_vit"
        if self.has_positions:
            assert config.num_position_embeddings is not None  # validate asks for it
            self.patch_bias_D = zeros((config.hidden_size,), ("embed",))
            self.position_ND = normal(
                rngs, (config.num_position_embeddings, config.hidden_size), (None, "width"), config.init_method_std
            )
        self.layers = stack(
            lambda rngs: EncoderLayer(config, backend=backend, placement=placement, rngs=rngs),
            layer_keys(rngs, config.num_layers),
        )
        self.config, self.segments, self.placement = config, tuple(segments), placement
        self.policies, self.backend = policies, backend

    def __call__(self, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array | None]:
        """Features of the last layer [B, P, D], and DeepStack's [J, B, P, D] or None.

        `batch` holds the patch keys of a batch, without the microbatch dimension; `patches` in the compute dtype.
        """
        config = self.config
        x_BPD = jnp.einsum("BPC,CD->BPD", batch["patches"], self.patch_CD[...])
        if self.has_positions:
            x_BPD = x_BPD + self.patch_bias_D[...] + self._positions(batch)
        x_BPD = self.placement.constrain(x_BPD, PATCH_NAMES)
        angles_BPR = patch_angles(batch["patch_positions"], config.kv_channels, config.rotary_base)

        # one segment-id array per layer: which patches may see each other there
        whole = np.ones(config.num_layers, bool)
        if config.model_type == "qwen2_5_vit":
            whole = np.isin(np.arange(config.num_layers), config.fullatt_block_indexes)
        # DeepStack: a layer writes its output to its slot; layers that don't contribute write to a spare one
        slots = np.full(config.num_layers, len(config.deepstack_visual_indexes))
        slots[list(config.deepstack_visual_indexes)] = np.arange(len(config.deepstack_visual_indexes))
        has_taps = bool(config.deepstack_visual_indexes)
        taps = jnp.zeros((slots.max() + 1, *x_BPD.shape), x_BPD.dtype) if has_taps else None

        def segments_of(name):
            return row_segments(batch[name], causal=False, backend=self.backend)

        frames = segments_of("patch_segments")
        windows = frames if whole.all() else segments_of("patch_windows")

        def step(layer, carry, layer_kind):
            x_BPD, taps = carry
            is_whole, slot = layer_kind
            segments = jax.tree.map(functools.partial(jnp.where, is_whole), frames, windows)
            x_BPD = layer(x_BPD, angles_BPR, segments)
            if has_taps:
                taps = jax.lax.dynamic_update_index_in_dim(taps, x_BPD, slot, 0)
            return x_BPD, taps

        layer_kinds = (jnp.asarray(whole), jnp.asarray(slots))
        x_BPD, taps = scan_layers(self.layers, step, (x_BPD, taps), layer_kinds, self.segments, self.policies)
        return x_BPD, taps[: len(config.deepstack_visual_indexes)] if has_taps else None

    def _positions(self, batch) -> jax.Array:
        """The position table, laid over each image's grid corner to corner and read bilinearly.  [B, P, D]"""
        side = round(self.position_ND.shape[0] ** 0.5)
        grid_BP2 = batch["patch_grids"].astype(jnp.float32)
        place_BP2 = batch["patch_positions"].astype(jnp.float32) * (side - 1) / jnp.maximum(grid_BP2 - 1, 1)
        low_BP2 = jnp.clip(jnp.floor(place_BP2), 0, side - 1)
        above_BP2 = place_BP2 - low_BP2
        low_BP2 = low_BP2.astype(jnp.int32)
        high_BP2 = jnp.minimum(low_BP2 + 1, side - 1)
        rows, columns = ((1 - above_BP2[..., 0], above_BP2[..., 0]), (1 - above_BP2[..., 1], above_BP2[..., 1]))
        ends = (low_BP2, high_BP2)
        corners = [(i, j) for i in range(2) for j in range(2)]
        index_BPJ = jnp.stack([ends[i][..., 0] * side + ends[j][..., 1] for i, j in corners], -1)
        weight_BPJ = jnp.stack([rows[i] * columns[j] for i, j in corners], -1)
        return weighted_rows(self.position_ND[...], index_BPJ, weight_BPJ, self.placement)
