"""The language decoder."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxforge.config.derived import padded_vocab_size
from jaxforge.config.schema import DecoderConfig
from jaxforge.models.attention import RESIDUAL, WHOLE, SelfAttention
from jaxforge.models.dropout import dropout
from jaxforge.models.mlp import MLP
from jaxforge.models.norm import RMSNorm
from jaxforge.models.parameters import Segments, normal, scan_layers, stack
from jaxforge.models.rope import decoder_angles, decoder_frequencies
from jaxforge.ops.cross_entropy import cross_entropy, score_tokens
from jaxforge.ops.embedding import embed, gather_rows
from jaxforge.ops.placement import Placement


class DecoderLayer(nnx.Module):
    """x + dropout(attention(norm(x))), then x + dropout(mlp(norm(x))).  x_BSD -> x_BSD."""

    def __init__(self, config: DecoderConfig, *, backend: str, placement: Placement, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_epsilon)
        self.attention = SelfAttention(
            config.hidden_size,
            config.num_attention_heads,
            config.num_query_groups,
            config.kv_channels,
            qkv_bias=config.add_qkv_bias,
            out_bias=False,
            qk_norm_epsilon=config.norm_epsilon if config.qk_layernorm else None,
            causal=True,
            std=config.init_method_std,
            backend=backend,
            placement=placement,
            rngs=rngs,
        )
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_epsilon)
        self.mlp = MLP(
            config.hidden_size,
            config.ffn_hidden_size,
            activation="silu",
            gated=True,
            bias=False,
            std=config.init_method_std,
            placement=placement,
            rngs=rngs,
        )
        self.dropout_rate, self.placement = config.hidden_dropout, placement

    def __call__(
        self,
        x_BSD: jax.Array,
        angles_BSR: jax.Array,
        segment_ids_BS: jax.Array,
        index: int | jax.Array = 0,
        dropout_keys_B2: jax.Array | None = None,
    ) -> jax.Array:
        def drop(branch_BSD, which):
            return dropout(branch_BSD, dropout_keys_B2, 1 + 2 * index + which, self.dropout_rate, self.placement)

        x_BSD = x_BSD + drop(self.attention(self.attention_norm(x_BSD), angles_BSR, segment_ids_BS), 0)
        return x_BSD + drop(self.mlp(self.mlp_norm(x_BSD)), 1)


class Decoder(nnx.Module):
    """Embedding, layers, final norm and head.

    Args:
      segments: which layers are recomputed, as in `scan_layers`.
    """

    def __init__(
        self, config: DecoderConfig, *, backend: str, segments: Segments, placement: Placement, rngs: nnx.Rngs
    ):
        table = (padded_vocab_size(config), config.hidden_size)
        self.embedding_VD = normal(rngs, table, ("vocab", "embed"), config.init_method_std)
        self.layers = stack(
            lambda rngs: DecoderLayer(config, backend=backend, placement=placement, rngs=rngs), config.num_layers, rngs
        )
        self.final_norm = RMSNorm(config.hidden_size, config.norm_epsilon)
        self.tied = not config.untie_embeddings_and_output_weights
        if not self.tied:
            self.head_VD = normal(rngs, table, ("vocab", "embed"), config.init_method_std)
        self.config, self.segments, self.placement = config, tuple(segments), placement

    def embed(self, tokens_BS: jax.Array, visual_BND: jax.Array | None, visual_index_BS: jax.Array | None):
        """Token embeddings [B, S, D], visual tokens in their places."""
        x_BSD = embed(self.embedding_VD[...], tokens_BS, self.placement)
        if visual_BND is not None and visual_index_BS is not None:
            placed_BSD = self._place(visual_BND, visual_index_BS)
            x_BSD = jnp.where((visual_index_BS >= 0)[..., None], placed_BSD, x_BSD)
        return self.placement.constrain(x_BSD, RESIDUAL)

    def _place(self, visual_BND: jax.Array, index_BS: jax.Array) -> jax.Array:
        """Visual tokens at their places [B, S, D], laid out as the residual stream.

        Left to the partitioner, the lookup's layout by width would spread to the whole residual stream.
        """
        return self.placement.constrain(gather_rows(visual_BND, index_BS, self.placement), RESIDUAL)

    def hidden(
        self,
        x_BSD: jax.Array,
        positions_B3S: jax.Array,
        segment_ids_BS: jax.Array,
        deepstack_JBND: jax.Array | None = None,
        visual_index_BS: jax.Array | None = None,
        dropout_keys_B2: jax.Array | None = None,
    ) -> jax.Array:
        """What the head reads, [B, S, D].  `deepstack[j]` is added at the visual tokens after layer j."""
        x_BSD = dropout(x_BSD, dropout_keys_B2, 0, self.config.hidden_dropout, self.placement)
        angles_BSR = decoder_angles(positions_B3S, decoder_frequencies(self.config))
        num_features = 0 if deepstack_JBND is None else deepstack_JBND.shape[0]

        def step(layer, x_BSD, index):
            x_BSD = layer(x_BSD, angles_BSR, segment_ids_BS, index, dropout_keys_B2)
            if deepstack_JBND is not None and visual_index_BS is not None:
                feature_BND = jax.lax.dynamic_index_in_dim(
                    deepstack_JBND, jnp.minimum(index, num_features - 1), keepdims=False
                )
                index_BS = jnp.where(index < num_features, visual_index_BS, -1)
                x_BSD = self.placement.constrain(x_BSD + self._place(feature_BND, index_BS), RESIDUAL)
            return x_BSD

        x_BSD = scan_layers(self.layers, step, x_BSD, jnp.arange(self.config.num_layers), self.segments)
        return self.placement.reshard(self.final_norm(x_BSD), RESIDUAL, WHOLE)

    def head(self) -> jax.Array:
        return self.embedding_VD[...] if self.tied else self.head_VD[...]

    def loss(self, hidden_BSD: jax.Array, targets_BS: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`cross_entropy` of the next tokens."""
        return cross_entropy(
            hidden_BSD, self.head(), targets_BS, vocab_size=self.config.vocab_size, placement=self.placement
        )

    def score(self, hidden_BSD: jax.Array, targets_BS: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`score_tokens` of the next tokens."""
        return score_tokens(
            hidden_BSD, self.head(), targets_BS, vocab_size=self.config.vocab_size, placement=self.placement
        )
