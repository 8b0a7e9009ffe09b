"""A decoder, alone or with a vision encoder and a projector before it."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxforge.config.schema import ModelConfig
from jaxforge.memory.policy import KEEP_ALL, Policies
from jaxforge.models.decoder import Decoder
from jaxforge.models.layer_order import LayerOrder
from jaxforge.models.moe import ExpertsRun, on_one_device
from jaxforge.models.multi_token import ahead, seen
from jaxforge.models.parameters import Segments
from jaxforge.models.projector import Projector
from jaxforge.models.vision import VisionEncoder
from jaxforge.ops.cross_entropy import Losses
from jaxforge.ops.linear_cross_entropy import LinearCrossEntropy
from jaxforge.ops.placement import SINGLE_DEVICE, Placement


class VisionLanguageModel(nnx.Module):
    """Reads a batch (the format is in docs/architecture.md) without its microbatch dimension: arrays [B, ...].

    Without `config.encoder` it is a language model, and the batch has no patch keys.  In training with dropout the
    batch also has `dropout_keys` [B, 2] uint32, a random key for each row; in training with experts also
    `targets_per_token`, a scalar (`StepTokens`); in training with multi-token prediction also what
    `multi_token.ahead` gives, and `mtp_weights` [J] fp32, by which the loss of each depth is multiplied.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        backend: str = "xla",
        decoder_segments: Segments | None = None,
        encoder_segments: Segments | None = None,
        decoder_policies: Policies = KEEP_ALL,
        encoder_policies: Policies = KEEP_ALL,
        decoder_layer_order: LayerOrder | None = None,
        decoder_placement: Placement = SINGLE_DEVICE,
        encoder_placement: Placement = SINGLE_DEVICE,
        fused_loss: LinearCrossEntropy | None = None,
        experts: ExpertsRun | None = None,
        recomputes_mtp: bool = False,
    ):
        self.has_encoder = config.encoder is not None
        if config.encoder is not None:
            assert config.projector is not None  # resolve gives an encoder one
            self.encoder = VisionEncoder(
                config.encoder,
                backend=backend,
                segments=encoder_segments or [(config.encoder.num_layers, 0)],
                policies=encoder_policies,
                placement=encoder_placement,
                rngs=rngs,
            )
            self.projector = Projector(
                config.encoder, config.projector, config.decoder.hidden_size, placement=encoder_placement, rngs=rngs
            )
        self.decoder = Decoder(
            config.decoder,
            backend=backend,
            segments=decoder_segments or [(config.decoder.num_layers, 0)],
            policies=decoder_policies,
            placement=decoder_placement,
            rngs=rngs,
            layer_order=decoder_layer_order,
            fused_loss=fused_loss,
            experts=experts or on_one_device(config.decoder),
            recomputes_mtp=recomputes_mtp,
        )

    def encode(self, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array | None]:
        """Visual tokens [B, N, D] of the patch arrays, and DeepStack's features [J, B, N, D] or None."""
        dtype = self.encoder.patch_CD[...].dtype
        features_BPD, taps_JBPD = self.encoder(batch | {"patches": batch["patches"].astype(dtype)})
        return self.projector(features_BPD, taps_JBPD)

    def hidden(self, batch: dict[str, jax.Array]) -> jax.Array:
        """What the head reads to predict the next token, [B, S, D] in the dtype of the parameters."""
        return self._states(batch, 0)[0]

    def states(self, batch: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
        """The same, and what it reads to predict the tokens further on, where layers for that are trained."""
        return self._states(batch, self.decoder.num_depths)

    def _states(self, batch: dict[str, jax.Array], num_depths: int) -> tuple[jax.Array, ...]:
        visual_BND = deepstack_JBND = visual_index_BS = None
        if self.has_encoder:
            visual_BND, deepstack_JBND = self.encode(batch)
            visual_index_BS = batch["visual_index"]
        x_BSD = self.decoder.embed(batch["tokens"], visual_BND, visual_index_BS)
        embedded_ahead = [
            self.decoder.embed(one["tokens"], visual_BND, one.get("visual_index")) for one in seen(batch, num_depths)
        ]
        return self.decoder.states(
            x_BSD,
            batch["positions"],
            batch["segment_ids"],
            deepstack_JBND,
            visual_index_BS,
            batch.get("dropout_keys"),
            targets_per_token=batch.get("targets_per_token"),
            embedded_ahead=embedded_ahead,
        )

    def loss(self, batch: dict[str, jax.Array]) -> Losses:
        """Sums over target tokens."""
        return self.decoder.loss(self.states(batch), batch)

    def score(self, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """For evaluation: the cross-entropy sum, and the most likely next token of each token, [B, S] int32."""
        return self.decoder.score(self.hidden(batch), batch["targets"])

    def logits(self, batch: dict[str, jax.Array]) -> jax.Array:
        """All logits [B, S, V] in fp32, true vocabulary only.  On one device; for comparison with other code."""
        return self._logits(self.hidden(batch))

    def all_logits(self, batch: dict[str, jax.Array]) -> jax.Array:
        """The same, and after them those of each depth of multi-token prediction, [1 + J, B, S, V]."""
        batch = batch | ahead(batch, self.decoder.num_depths)
        return jnp.stack([self._logits(states_BSD) for states_BSD in self.states(batch)])

    def _logits(self, states_BSD: jax.Array) -> jax.Array:
        table_VD = self.decoder.head()[: self.decoder.config.vocab_size]
        return jnp.einsum("BSD,VD->BSV", states_BSD, table_VD, preferred_element_type=jnp.float32)
