"""Model FLOPs of an optimizer step, in closed form: what utilisation (MFU) is measured by.

Counted are the matrix products that the mathematics needs, 2 FLOPs per multiply-add, at full rows (Narayanan et al.
2021, arXiv:2104.04473, appendix; Chowdhery et al. 2022, arXiv:2204.02311, appendix B):

    decoder layer, per token      2 D K (H + 2 G) + 2 H K D     query, key, value and output projections
                                  2 H K S                       causal attention: half of 4 H K S
      with latent attention       2 Q (D + H K) + 2 D (C + R) + 2 C H (N + Y) + 2 H Y D + H (K + Y) S
                                  6 D F                         gate, up, down; with experts, F is that of the
                                                                experts that a token goes to and of the shared ones,
                                                                and 2 D E, with E experts, the router's
    head, per token               2 D V
    multi-token prediction, per layer and token: that of a layer, of the head, and 4 D^2 for what joins its inputs
    encoder, per patch            2 C E                         patch embedding
    encoder layer, per patch      8 E H K                       projections
                                  4 H K A                       attention to A patches
                                  6 E F, or 4 E F ungated
    projector, per visual token   2 W I + 2 I D                 once, and once for each DeepStack feature

with D, E the widths of decoder and encoder, W = E merge^2, I the projector's inner width, S = train.seq_length,
V the true vocabulary.  Of latent attention Q, C are the widths of compressed queries and of what keys and values come
from, N, R the features of a key that don't rotate and that do, K = N + R, Y a value's; where queries aren't compressed
they take 2 D H K.  The backward pass costs twice the forward: once for the inputs, once for the weights.

What is left out: recomputation (it isn't the model's), norms, RoPE, softmax, lookups, the optimizer, and the adapters'
own products (rank 16 on a projection of 4096 x 4096 is 0.8 % of its).
What makes it an upper bound: a row counts as one document of S tokens and P = data.max_patches_per_row patches, where
packed documents attend to less and rows may have padding.  In full-attention layers a patch attends to an image of
model.encoder.image_size, in window layers to a full window.
"""

import dataclasses

from jaxforge.config.derived import patches_per_full_image
from jaxforge.config.lora_rules import has_adapters
from jaxforge.config.part_flops import (
    decoder_flops,
    encoder_flops,
    projector_flops,
    window_patches,
)
from jaxforge.config.patterns import takes_all, takes_some
from jaxforge.config.schema import Config


@dataclasses.dataclass(frozen=True)
class RowFlops:
    """Forward FLOPs of one full row, by module."""

    encoder: int
    projector: int
    decoder: int


def model_flops_per_step(config: Config) -> int:
    """FLOPs of the forward and backward pass over `train.global_batch_size` full rows, on all devices together.

    A module that `optimizer.freeze` takes as a whole has no weight gradients, and no input gradients where nothing
    below it trains.  With adapters weights have no gradients either, but in a module that `lora.train_also` takes as a
    whole.
    """
    forward = forward_flops_per_row(config)
    trains_below = False
    per_row = 0
    for module in ("encoder", "projector", "decoder"):  # in the order of the forward pass
        weights_train, trains = _what_trains(config, module)
        # the lowest trainable layer's input gradient is counted too, as 6 N does; it is one product of many
        passes = 1 + weights_train + (trains or trains_below)
        flops = getattr(forward, module)
        per_row += passes * flops
        trains_below |= trains and flops > 0
    return per_row * config.train.global_batch_size


def forward_flops_per_row(config: Config) -> RowFlops:
    """The formulas of the module docstring, for one row."""
    model, tokens = config.model, config.train.seq_length
    decoder = tokens * decoder_flops(model.decoder, tokens)
    if model.encoder is None:
        return RowFlops(encoder=0, projector=0, decoder=decoder)
    patches = config.data.max_patches_per_row
    assert patches is not None  # validate asks for it with an encoder
    visual_tokens = patches // model.encoder.spatial_merge_size**2
    image = min(patches, patches_per_full_image(model.encoder))
    window = min(image, window_patches(model.encoder))
    return RowFlops(
        encoder=patches * encoder_flops(model.encoder, image, window),
        projector=visual_tokens * projector_flops(model),
        decoder=decoder,
    )


def _what_trains(config: Config, module: str) -> tuple[bool, bool]:
    """Whether a module's weights have gradients, and whether anything in it does.

    Where some of the weights have, all are counted, but with adapters none: there they are few or none.
    """
    if takes_all(config.optimizer.freeze, module):
        return False, False
    if not has_adapters(config.lora):
        return True, True
    also = config.lora.train_also
    return takes_all(also, module), getattr(config.lora, module).rank > 0 or takes_some(also, module)
