"""The language decoder."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxforge.config.derived import padded_vocab_size
from jaxforge.config.schema import DecoderConfig
from jaxforge.memory.policy import KEEP_ALL, Policies
from jaxforge.models.attention import RESIDUAL, WHOLE, SelfAttention
from jaxforge.models.dropout import dropout
from jaxforge.models.mlp import MLP
from jaxforge.models.norm import RMSNorm
from jaxforge.models.parameters import Segments, normal, scan_layers, stack
from jaxforge.models.rope import decoder_angles, decoder_frequencies
from jaxforge.ops.attention import RowSegments, row_segments
from jaxforge.ops.cross_entropy import cross_entropy, score_tokens
from jaxforge.ops.embedding import embed, gather_rows
from jaxforge.ops.linear_cross_entropy import LinearCrossEntropy
from jaxforge.ops.placement import Placement

# Paths, in the whole model, of the parameters with a row for each token.
VOCABULARY_TABLES = ("decoder/embedding_VD", "decoder/head_VD")
# (visual tokens, their index [B, S], placement) -> [B, S, D]
Lookup = Callable[[jax.Array, jax.Array, Placement], jax.Array]


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
        segments: RowSegments,
        index: int | jax.Array = 0,
        dropout_keys_B2: jax.Array | None = None,
    ) -> jax.Array:
        def drop(branch_BSD, which):
            return dropout(branch_BSD, dropout_keys_B2, 1 + 2 * index + which, self.dropout_rate, self.placement)

        def named(norm_BSD, name):
            # the layout of what was kept, and is read again: else what gathers it would have it kept whole
            return self.placement.constrain(checkpoint_name(norm_BSD, name), RESIDUAL)

        normed_BSD = named(self.attention_norm(x_BSD), "attn_norm")
        x_BSD = x_BSD + drop(self.attention(normed_BSD, angles_BSR, segments), 0)
        x_BSD = checkpoint_name(x_BSD, "mlp_norm_input")
        return x_BSD + drop(self.mlp(named(self.mlp_norm(x_BSD), "mlp_norm")), 1)


class Decoder(nnx.Module):
    """Embedding, layers, final norm and head.

    `hidden` is `enter`, `run_layers` and `leave`; a pipeline calls the layers itself.

    Args:
      segments, policies: which layers are recomputed and what the others keep, as in `scan_layers`.
      fused_loss: a loss fused with the head, which then scores tokens too; its gradients aren't found by JAX.
      layer_order: the layer in each place of the stack, as in `stack`; other than None only for a pipeline.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        backend: str,
        segments: Segments,
        placement: Placement,
        rngs: nnx.Rngs,
        layer_order: tuple[int, ...] | None = None,
        policies: Policies = KEEP_ALL,
        fused_loss: LinearCrossEntropy | None = None,
    ):
        table = (padded_vocab_size(config), config.hidden_size)
        self.embedding_VD = normal(rngs, table, ("vocab", "embed"), config.init_method_std)
        self.layers = stack(
            lambda rngs: DecoderLayer(config, backend=backend, placement=placement, rngs=rngs),
            config.num_layers,
            rngs,
            layer_order,
        )
        self.final_norm = RMSNorm(config.hidden_size, config.norm_epsilon)
        self.tied = not config.untie_embeddings_and_output_weights
        if not self.tied:
            self.head_VD = normal(rngs, table, ("vocab", "embed"), config.init_method_std)
        self.config, self.segments, self.placement = config, tuple(segments), placement
        self.policies, self.backend = policies, backend
        self.fused_loss = fused_loss

    def embed(
        self,
        tokens_BS: jax.Array,
        visual: jax.Array | None,
        visual_index_BS: jax.Array | None,
        lookup: Lookup = gather_rows,
    ) -> jax.Array:
        """Token embeddings [B, S, D], visual tokens in their places."""
        return self.fill(embed(self.embedding_VD[...], tokens_BS, self.placement), visual, visual_index_BS, lookup)

    def fill(
        self, x_BSD: jax.Array, visual: jax.Array | None, visual_index_BS: jax.Array | None, lookup: Lookup
    ) -> jax.Array:
        """Visual tokens put into their places among the token embeddings."""
        if visual is not None and visual_index_BS is not None:
            placed_BSD = self.place(visual, visual_index_BS, lookup)
            x_BSD = jnp.where((visual_index_BS >= 0)[..., None], placed_BSD, x_BSD)
        return self.placement.constrain(x_BSD, RESIDUAL)

    def place(self, visual: jax.Array, index_BS: jax.Array, lookup: Lookup = gather_rows) -> jax.Array:
        """Visual tokens at their places [B, S, D], laid out as the residual stream.

        Left to the partitioner, the lookup's layout by width would spread to the whole residual stream.

        Args:
          visual: what `lookup` reads: of each row its own [B, N, D] (`gather_rows`), or a table (`table_rows`).
        """
        return self.placement.constrain(lookup(visual, index_BS, self.placement), RESIDUAL)

    def hidden(
        self,
        x_BSD: jax.Array,
        positions_B3S: jax.Array,
        segment_ids_BS: jax.Array,
        deepstack: jax.Array | None = None,
        visual_index_BS: jax.Array | None = None,
        dropout_keys_B2: jax.Array | None = None,
        lookup: Lookup = gather_rows,
    ) -> jax.Array:
        """What the head reads, [B, S, D].  `deepstack[j]`, as `visual` of `place`, is added after layer j."""
        x_BSD = self.enter(x_BSD, dropout_keys_B2)
        layers_input = (x_BSD, positions_B3S, segment_ids_BS, deepstack, visual_index_BS, dropout_keys_B2, lookup)
        return self.leave(self.run_layers(*layers_input))

    def run_layers(
        self,
        x_BSD: jax.Array,
        positions_B3S: jax.Array,
        segment_ids_BS: jax.Array,
        deepstack: jax.Array | None,
        visual_index_BS: jax.Array | None,
        dropout_keys_B2: jax.Array | None,
        lookup: Lookup,
    ) -> jax.Array:
        """All layers in turn, [B, S, D], on what `enter` gives."""
        angles_BSR, segments = self.angles(positions_B3S), self.row_segments(segment_ids_BS)
        num_features = 0 if deepstack is None else deepstack.shape[0]

        def step(layer, x_BSD, index):
            x_BSD = layer(x_BSD, angles_BSR, segments, index, dropout_keys_B2)
            if deepstack is not None and visual_index_BS is not None:
                feature = jax.lax.dynamic_index_in_dim(
                    deepstack, jnp.minimum(index, num_features - 1), keepdims=False
                )
                index_BS = jnp.where(index < num_features, visual_index_BS, -1)
                x_BSD = self.placement.constrain(x_BSD + self.place(feature, index_BS, lookup), RESIDUAL)
            return x_BSD

        return scan_layers(self.layers, step, x_BSD, jnp.arange(self.config.num_layers), self.segments, self.policies)

    def enter(self, x_BSD: jax.Array, dropout_keys_B2: jax.Array | None) -> jax.Array:
        """What the first layer reads, from what `embed` gives."""
        return dropout(x_BSD, dropout_keys_B2, 0, self.config.hidden_dropout, self.placement)

    def angles(self, positions_B3S: jax.Array) -> jax.Array:
        """Rotary angles of every layer, [B, S, K / 2] fp32."""
        return decoder_angles(positions_B3S, decoder_frequencies(self.config))

    def row_segments(self, segment_ids_BS: jax.Array) -> RowSegments:
        """What the attention of every layer reads of the segments."""
        return row_segments(segment_ids_BS, causal=True, backend=self.backend)

    def leave(self, x_BSD: jax.Array) -> jax.Array:
        """What the head reads, from what the last layer gives."""
        return self.whole(self.final_norm(x_BSD))

    def whole(self, hidden_BSD: jax.Array) -> jax.Array:
        """The final norm's output laid out as the head reads it; its cotangent stays as the residual stream."""
        return self.placement.reshard(hidden_BSD, RESIDUAL, WHOLE)

    @property
    def head_path(self) -> str:
        """The path of the head's table in the whole model."""
        return VOCABULARY_TABLES[0 if self.tied else 1]

    def head(self) -> jax.Array:
        return self.embedding_VD[...] if self.tied else self.head_VD[...]

    def loss(self, hidden_BSD: jax.Array, targets_BS: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`cross_entropy` of the next tokens."""
        return cross_entropy(
            hidden_BSD, self.head(), targets_BS, vocab_size=self.config.vocab_size, placement=self.placement
        )

    def score(self, hidden_BSD: jax.Array, targets_BS: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`score_tokens` of the next tokens."""
        if self.fused_loss is not None:
            return self.fused_loss.score(hidden_BSD, self.head(), targets_BS)
        return score_tokens(
            hidden_BSD, self.head(), targets_BS, vocab_size=self.config.vocab_size, placement=self.placement
        )
