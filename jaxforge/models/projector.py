"""From encoder features to decoder tokens: the patch merger of the Qwen VLs."""

import jax
from flax import nnx

from jaxforge.config.schema import EncoderConfig, ProjectorConfig
from jaxforge.models.mlp import MLP
from jaxforge.models.norm import make_norm
from jaxforge.models.parameters import layer_keys, stack
from jaxforge.ops.placement import Placement


class PatchMerger(nnx.Module):
    """Each square of merge^2 patches becomes one visual token of the decoder's width.  x_BPD -> y_BNE.

    `norm_after` normalises the merged square instead of each patch (DeepStack's mergers of Qwen3-VL).
    """

    def __init__(
        self,
        encoder: EncoderConfig,
        config: ProjectorConfig,
        out_width: int,
        *,
        norm_after: bool,
        placement: Placement,
        rngs: nnx.Rngs,
    ):
        merged_width = encoder.hidden_size * encoder.spatial_merge_size**2
        norm_width = merged_width if norm_after else encoder.hidden_size
        self.norm = make_norm(config.normalization, norm_width, config.norm_epsilon)
        self.mlp = MLP(
            merged_width,
            config.ffn_hidden_size or merged_width,
            activation=config.activation_func,
            gated=False,
            bias=True,
            std=encoder.init_method_std,
            placement=placement,
            rngs=rngs,
            out_width=out_width,
        )
        self.merged_width, self.norm_after = merged_width, norm_after

    def __call__(self, x_BPD: jax.Array) -> jax.Array:
        if not self.norm_after:
            x_BPD = self.norm(x_BPD)
        merged_BND = x_BPD.reshape(x_BPD.shape[0], -1, self.merged_width)
        return self.mlp(self.norm(merged_BND) if self.norm_after else merged_BND)


class Projector(nnx.Module):
    """The merger of the last layer, and one for each DeepStack feature."""

    def __init__(
        self,
        encoder: EncoderConfig,
        config: ProjectorConfig,
        out_width: int,
        *,
        placement: Placement,
        rngs: nnx.Rngs,
    ):
        def merger(rngs, norm_after):
            return PatchMerger(encoder, config, out_width, norm_after=norm_after, placement=placement, rngs=rngs)

        self.merger = merger(rngs, norm_after=False)
        num_features = len(encoder.deepstack_visual_indexes)
        if num_features:
            self.deepstack = stack(lambda rngs: merger(rngs, norm_after=True), layer_keys(rngs, num_features))

    def __call__(self, x_BPD: jax.Array, taps_JBPD: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
        """Visual tokens [B, N, E], and DeepStack's features [J, B, N, E] or None."""
        if taps_JBPD is None:
            return self.merger(x_BPD), None
        graph, parameters = nnx.split(self.deepstack)
        merge = jax.checkpoint(lambda args: nnx.merge(graph, args[0])(args[1]), prevent_cse=False)
        return self.merger(x_BPD), jax.lax.map(merge, (parameters, taps_JBPD))
