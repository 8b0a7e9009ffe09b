"""The language decoder."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxforge.config.activations import LAYER_INPUT
from jaxforge.config.derived import padded_vocab_size, stacked_layer_has_experts
from jaxforge.config.schema import DecoderConfig
from jaxforge.memory.policy import KEEP_ALL, Policies
from jaxforge.models.attention import RESIDUAL, WHOLE, SelfAttention
from jaxforge.models.dropout import dropout
from jaxforge.models.latent_attention import LatentAttention
from jaxforge.models.layer_order import FEED_FORWARDS, LayerOrder
from jaxforge.models.mlp import MLP
from jaxforge.models.moe import ExpertsRun, MoE, StepTokens
from jaxforge.models.multi_token import Batch, Depth, of_depths, targets_and_weights
from jaxforge.models.norm import RMSNorm
from jaxforge.models.parameters import Segments, layer_keys, normal, scan_layers, segments_between, stack
from jaxforge.models.rope import decoder_angles, decoder_frequencies
from jaxforge.ops.attention import RowSegments, row_segments
from jaxforge.ops.cross_entropy import Losses, cross_entropy, score_tokens
from jaxforge.ops.embedding import embed, gather_rows
from jaxforge.ops.linear_cross_entropy import LinearCrossEntropy
from jaxforge.ops.placement import Placement
from jaxforge.ops.sharded_weight import whole

# Paths, in the whole model, of the parameters with a row for each token.
VOCABULARY_TABLES = ("decoder/embedding_VD", "decoder/head_VD")
# (visual tokens, their index [B, S], placement) -> [B, S, D]
Lookup = Callable[[jax.Array, jax.Array, Placement], jax.Array]


class DecoderLayer(nnx.Module):
    """x + dropout(attention(norm(x))), then x + dropout(feed_forward(norm(x))).  x_BSD -> x_BSD.

    The feed-forward is `moe` where the layer has experts, else `mlp`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        backend: str,
        placement: Placement,
        rngs: nnx.Rngs,
        experts: ExpertsRun | None = None,
    ):
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_epsilon)
        self.attention = _attention(config, backend=backend, placement=placement, rngs=rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_epsilon)
        if experts is not None:
            self.moe = MoE(config, run=experts, placement=placement, rngs=rngs)
        else:
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
        tokens: StepTokens | None = None,
    ) -> jax.Array:
        def drop(branch_BSD, which):
            return dropout(branch_BSD, dropout_keys_B2, 1 + 2 * index + which, self.dropout_rate, self.placement)

        def named(norm_BSD, name):
            # the layout of what was kept, and is read again: else what gathers it would have it kept whole
            return self.placement.constrain(checkpoint_name(norm_BSD, name), RESIDUAL)

        normed_BSD = named(self.attention_norm(x_BSD), "attn_norm")
        x_BSD = x_BSD + drop(self.attention(normed_BSD, angles_BSR, segments), 0)
        x_BSD = checkpoint_name(x_BSD, "mlp_norm_input")
        normed_BSD = named(self.mlp_norm(x_BSD), "mlp_norm")
        if hasattr(self, "moe"):
            assert tokens is not None
            return x_BSD + drop(self.moe(normed_BSD, tokens), 1)
        return x_BSD + drop(self.mlp(normed_BSD), 1)


def _attention(
    config: DecoderConfig, *, backend: str, placement: Placement, rngs: nnx.Rngs
) -> LatentAttention | SelfAttention:
    if config.multi_latent_attention:
        return LatentAttention(config, backend=backend, placement=placement, rngs=rngs)
    return SelfAttention(
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


class Decoder(nnx.Module):
    """Embedding, layers, final norm and head, and layers for multi-token prediction.

    `states` is `enter`, `run_layers`, the final norm and `states_ahead`; a pipeline calls the layers itself.

    Args:
      segments, policies: which layers are recomputed and what the others keep, as in `scan_layers`.
      fused_loss: a loss fused with the head, which then scores tokens too; its gradients aren't found by JAX.
      layer_order: the layer in each place of the stacks; other than None only for a pipeline.
      experts: how experts are computed, where there are some.
      recomputes_mtp: whether layers for multi-token prediction are recomputed.

    `layers` is a layer whose parameters are stacked, of all layers in turn or in `layer_order`; those for multi-token
    prediction are the last.  Where some layers are dense and others have experts it has both feed-forwards, each
    stacked over the layers that have it.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        backend: str,
        segments: Segments,
        placement: Placement,
        rngs: nnx.Rngs,
        layer_order: LayerOrder | None = None,
        policies: Policies = KEEP_ALL,
        fused_loss: LinearCrossEntropy | None = None,
        experts: ExpertsRun | None = None,
        recomputes_mtp: bool = False,
    ):
        table = (padded_vocab_size(config), config.hidden_size)
        self.embedding_VD = normal(rngs, table, ("vocab", "embed"), config.init_method_std)
        self.has_experts = stacked_layer_has_experts(config)

        def make_layer(has_experts, rngs):
            run = experts if has_experts else None
            return DecoderLayer(config, backend=backend, placement=placement, rngs=rngs, experts=run)

        self.layers = _stacked_layers(make_layer, self.has_experts, rngs, layer_order)
        self.final_norm = RMSNorm(config.hidden_size, config.norm_epsilon)
        self.tied = not config.untie_embeddings_and_output_weights
        if not self.tied:
            self.head_VD = normal(rngs, table, ("vocab", "embed"), config.init_method_std)
        self.num_depths = config.mtp_num_layers
        if self.num_depths:
            make_depth = functools.partial(Depth, config, placement=placement)
            keys = layer_keys(rngs, self.num_depths)
            self.mtp = stack(lambda rngs: make_depth(rngs=rngs), keys, name=None)
        self.config, self.segments, self.placement = config, tuple(segments), placement
        self.policies, self.recomputes_mtp, self.backend = policies, recomputes_mtp, backend
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

    def states(
        self,
        x_BSD: jax.Array,
        positions_B3S: jax.Array,
        segment_ids_BS: jax.Array,
        deepstack: jax.Array | None = None,
        visual_index_BS: jax.Array | None = None,
        dropout_keys_B2: jax.Array | None = None,
        lookup: Lookup = gather_rows,
        targets_per_token: jax.Array | None = None,
        embedded_ahead: Sequence[jax.Array] = (),
    ) -> tuple[jax.Array, ...]:
        """What the head reads, [B, S, D] each: of the decoder, and of each depth of multi-token prediction.

        Args:
          deepstack: `deepstack[j]`, as `visual` of `place`, is added after layer j.
          embedded_ahead: for each depth, what `embed` gives for the tokens that it sees; () for the decoder alone.
        """
        x_BSD = self.enter(x_BSD, dropout_keys_B2)
        layers_input = (x_BSD, positions_B3S, segment_ids_BS, deepstack, visual_index_BS, dropout_keys_B2, lookup)
        states_BSD = self.final_norm(self.run_layers(*layers_input, targets_per_token))
        if not embedded_ahead:
            return (self.whole(states_BSD),)
        ahead = self.states_ahead(
            of_depths(nnx.split(self.mtp)[1], self.num_depths),
            self.layers_ahead(nnx.split(self.layers)[1]),
            states_BSD,
            embedded_ahead,
            (
                self.angles(positions_B3S),
                self.row_segments(segment_ids_BS),
                dropout_keys_B2,
                self.step_tokens(segment_ids_BS, targets_per_token),
            ),
        )
        return tuple(map(self.whole, (states_BSD, *ahead)))

    def layers_ahead(self, layers: Any) -> list[Any]:
        """Of the parameters of `layers`, in turn and not in an order of stages, those of each depth's layer."""
        # the last ones of each stack that they are in
        kept = {name: layers[name] for name in layers if name not in FEED_FORWARDS or name == self._feed_forward_ahead}
        return [jax.tree.map(lambda a, i=i: a[i], kept) for i in range(-self.num_depths, 0)]

    @property
    def _feed_forward_ahead(self) -> str:
        return "moe" if self.has_experts[-1] else "mlp"

    def states_ahead(
        self,
        depths: Sequence[Any],
        layers: Sequence[Any],
        states_BSD: jax.Array,
        embedded_ahead: Sequence[jax.Array],
        layer_inputs: tuple,
    ) -> list[jax.Array]:
        """The states of each depth after its final norm, [B, S, D] each; all are laid out as the residual stream.

        Args:
          depths: for each depth the parameters of `mtp`.
          layers: those of the decoder layer of each depth, perhaps `ShardedWeight`s.
          states_BSD: of the decoder, after its final norm.
          embedded_ahead: as of `states`.
          layer_inputs: what a layer reads beside them: angles, segments, dropout keys, tokens.
        """
        depth_graph = nnx.graphdef(self.mtp)
        layer_graph = nnx.graphdef(self.only(self._feed_forward_ahead))
        angles_BSR, segments, dropout_keys_B2, tokens = layer_inputs

        def states_of(number, parameters, states_BSD, embedded_BSD):
            depth_parameters, layer_parameters = whole(parameters)
            depth, layer = nnx.merge(depth_graph, depth_parameters), nnx.merge(layer_graph, layer_parameters)
            x_BSD = checkpoint_name(depth.enter(embedded_BSD, states_BSD), LAYER_INPUT)
            x_BSD = layer(x_BSD, angles_BSR, segments, number, dropout_keys_B2, tokens)
            return depth.final_norm(x_BSD)

        ahead = []
        for number, (depth, layer, embedded_BSD) in enumerate(
            zip(depths, layers, embedded_ahead, strict=True), self.config.num_layers
        ):
            of_depth = self.policies.checkpoint(
                functools.partial(states_of, number), is_recomputed=self.recomputes_mtp
            )
            states_BSD = of_depth((depth, layer), states_BSD, embedded_BSD)
            ahead.append(states_BSD)
        return ahead

    def run_layers(
        self,
        x_BSD: jax.Array,
        positions_B3S: jax.Array,
        segment_ids_BS: jax.Array,
        deepstack: jax.Array | None,
        visual_index_BS: jax.Array | None,
        dropout_keys_B2: jax.Array | None,
        lookup: Lookup,
        targets_per_token: jax.Array | None = None,
    ) -> jax.Array:
        """All layers in turn, [B, S, D], on what `enter` gives; `targets_per_token` as in `StepTokens`."""
        angles_BSR, segments = self.angles(positions_B3S), self.row_segments(segment_ids_BS)
        tokens = self.step_tokens(segment_ids_BS, targets_per_token)
        num_features = 0 if deepstack is None else deepstack.shape[0]

        def step(layer, x_BSD, index):
            x_BSD = layer(x_BSD, angles_BSR, segments, index, dropout_keys_B2, tokens)
            if deepstack is not None and visual_index_BS is not None:
                feature = jax.lax.dynamic_index_in_dim(
                    deepstack, jnp.minimum(index, num_features - 1), keepdims=False
                )
                index_BS = jnp.where(index < num_features, visual_index_BS, -1)
                x_BSD = self.placement.constrain(x_BSD + self.place(feature, index_BS, lookup), RESIDUAL)
            return x_BSD

        for layers, first, segments_of_run in self._runs():
            numbers = jnp.arange(first, first + sum(count for count, _ in segments_of_run))
            x_BSD = scan_layers(layers, step, x_BSD, numbers, segments_of_run, self.policies)
        return x_BSD

    def _runs(self) -> Iterator[tuple[Any, int, Segments]]:
        """Layers with the same feed-forward in a row: their stack, the number of the first one, their segments."""
        if len(set(self.has_experts)) == 1 and not self.num_depths:
            yield self.layers, 0, self.segments
            return
        first, used = 0, {"mlp": 0, "moe": 0}
        for has_experts, run in itertools.groupby(self.has_experts[: self.config.num_layers]):
            count, name = len(list(run)), "moe" if has_experts else "mlp"
            graph, parameters = nnx.split(self.only(name))
            of_name = parameters.pop(name)

            def cut(tree, start, count=count):
                return jax.tree.map(lambda a: a[start : start + count], tree)

            parameters = cut(parameters, first)
            parameters[name] = cut(of_name, used[name])
            yield nnx.merge(graph, parameters), first, segments_between(self.segments, first, first + count)
            first, used[name] = first + count, used[name] + count

    def only(self, feed_forward: str) -> Any:
        """`layers` with one of its feed-forwards, "mlp" or "moe"."""
        layers = nnx.clone(self.layers)
        for name in {"mlp", "moe"} - {feed_forward}:
            if hasattr(layers, name):
                delattr(layers, name)
        return layers

    def step_tokens(self, segment_ids_BS: jax.Array, targets_per_token: jax.Array | None) -> StepTokens | None:
        """What routers are told; None where there are none."""
        if not any(self.has_experts):
            return None
        zero = jnp.zeros((), jnp.float32)
        return StepTokens(segment_ids_BS > 0, zero if targets_per_token is None else targets_per_token)

    def enter(self, x_BSD: jax.Array, dropout_keys_B2: jax.Array | None) -> jax.Array:
        """What the first layer reads, from what `embed` gives."""
        return dropout(x_BSD, dropout_keys_B2, 0, self.config.hidden_dropout, self.placement)

    def angles(self, positions_B3S: jax.Array) -> jax.Array:
        """Rotary angles of every layer, [B, S, K / 2] fp32, for the K features of a head that rotate."""
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

    def loss(self, states: Sequence[jax.Array], batch: Batch) -> Losses:
        """`cross_entropy` of the next tokens, and of those further on that each depth predicts.

        Args:
          states: as the method of this name gives them.
          batch: has the targets, and where there are depths their weights.
        """
        found = []
        for hidden_BSD, (targets_BS, weight) in zip(states, targets_and_weights(batch, self.num_depths), strict=True):
            loss, z = cross_entropy(
                hidden_BSD, self.head(), targets_BS, vocab_size=self.config.vocab_size, placement=self.placement
            )
            found.append((loss if weight is None else weight * loss, z))
        return Losses.joined(found)

    def score(self, hidden_BSD: jax.Array, targets_BS: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`score_tokens` of the next tokens."""
        if self.fused_loss is not None:
            return self.fused_loss.score(hidden_BSD, self.head(), targets_BS)
        return score_tokens(
            hidden_BSD, self.head(), targets_BS, vocab_size=self.config.vocab_size, placement=self.placement
        )


def _stacked_layers(
    make_layer: Callable[[bool, nnx.Rngs], nnx.Module],
    has_experts: tuple[bool, ...],
    rngs: nnx.Rngs,
    order: LayerOrder | None,
) -> Any:
    """The stacks of all layers, made by (whether it has experts, random numbers) -> layer."""
    num_layers = len(has_experts)
    keys = layer_keys(rngs, num_layers)

    def stacked(kind, layers, order):
        return stack(functools.partial(make_layer, kind), keys[jnp.asarray(layers)], order)

    every = range(num_layers)
    stacks = stacked(has_experts[0], every, order.layers if order else None)
    for kind, name in ((False, "mlp"), (True, "moe")):
        of_kind = [layer for layer in every if has_experts[layer] is kind]
        if of_kind and len(of_kind) < num_layers:
            setattr(stacks, name, getattr(stacked(kind, of_kind, order and getattr(order, name)), name))
    return stacks
