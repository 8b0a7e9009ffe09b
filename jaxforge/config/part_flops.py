"""Forward FLOPs of the parts of a model: what utilisation, balance of rows and balance of stages are reckoned with.

Matrix products only, 2 FLOPs per multiply-add (Narayanan et al. 2021, arXiv:2104.04473, appendix).  The formulas are
written out in `jaxforge.training.flops`.  How much a token or a patch attends to may be an array, of documents.
"""

import numpy as np

from jaxforge.config.derived import (
    expert_ffn_hidden_size,
    layer_has_experts,
    merged_patch_width,
    projector_ffn_hidden_size,
    stacked_layer_has_experts,
)
from jaxforge.config.model_schema import DecoderConfig, EncoderConfig, ModelConfig


def decoder_flops[Count: (int, np.ndarray)](decoder: DecoderConfig, length: Count) -> Count:
    """Of all that a decoder computes in training, per token of a document of so many tokens.

    Its layers and head, and for multi-token prediction each layer with its projection, and the head once more.
    """
    num_depths = decoder.mtp_num_layers
    layers = _layers_flops(decoder, stacked_layer_has_experts(decoder), length)
    return layers + (1 + num_depths) * head_flops(decoder) + num_depths * mtp_projection_flops(decoder)


def decoder_layers_flops[Count: (int, np.ndarray)](decoder: DecoderConfig, length: Count) -> Count:
    """Of the decoder's own layers, likewise: causal, so that a token attends to half of its document.

    Of experts those that a token goes to.
    """
    return _layers_flops(decoder, layer_has_experts(decoder), length)


def _layers_flops[Count: (int, np.ndarray)](
    decoder: DecoderConfig, has_experts: tuple[bool, ...], length: Count
) -> Count:
    with_experts = sum(has_experts)
    feed_forward = (len(has_experts) - with_experts) * decoder.ffn_hidden_size
    if decoder.num_experts is not None:
        shared = decoder.moe_shared_expert_intermediate_size or 0
        feed_forward += with_experts * (decoder.moe_router_topk * expert_ffn_hidden_size(decoder) + shared)
    router = 2 * decoder.hidden_size * (decoder.num_experts or 0) * with_experts
    return len(has_experts) * attention_flops(decoder, length) + 6 * decoder.hidden_size * feed_forward + router


def mtp_projection_flops(decoder: DecoderConfig) -> int:
    """Of what a layer for multi-token prediction has before it, per token: from twice the width."""
    return 4 * decoder.hidden_size**2


def attention_flops[Count: (int, np.ndarray)](decoder: DecoderConfig, length: Count) -> Count:
    """Of the attention of a decoder layer, projections and all, per token of a document of so many tokens."""
    width, num_heads = decoder.hidden_size, decoder.num_attention_heads
    if not decoder.multi_latent_attention:
        heads, kv_heads = num_heads * decoder.kv_channels, decoder.num_query_groups * decoder.kv_channels
        return 2 * width * (heads + 2 * kv_heads) + 2 * heads * width + 2 * heads * length
    queries = num_heads * (decoder.qk_head_dim + decoder.qk_pos_emb_head_dim)
    keys, values = num_heads * decoder.qk_head_dim, num_heads * decoder.v_head_dim
    latent, shared = decoder.kv_lora_rank, decoder.qk_pos_emb_head_dim
    to_queries = width * queries
    if decoder.q_lora_rank is not None:
        to_queries = decoder.q_lora_rank * (width + queries)
    to_keys_and_values = width * (latent + shared) + latent * (keys + values)
    return 2 * (to_queries + to_keys_and_values + values * width) + (queries + values) * length


def head_flops(decoder: DecoderConfig) -> int:
    """Of the output head, per token."""
    return 2 * decoder.hidden_size * decoder.vocab_size


def encoder_flops[Count: (int, np.ndarray)](encoder: EncoderConfig, image: Count, window: Count) -> Count:
    """Of the encoder, per patch.

    Args:
      image, window: patches that a patch attends to in full-attention layers, and in window layers.
    """
    width, heads = encoder.hidden_size, encoder.num_attention_heads * encoder.kv_channels
    channels = encoder.in_channels * encoder.temporal_patch_size * encoder.patch_size**2
    seen = encoder.num_layers * image
    if encoder.model_type == "qwen2_5_vit":
        num_whole = len(encoder.fullatt_block_indexes)
        seen = num_whole * image + (encoder.num_layers - num_whole) * window
    feed_forward = (6 if encoder.swiglu else 4) * width * encoder.ffn_hidden_size
    return 2 * channels * width + encoder.num_layers * (8 * width * heads + feed_forward) + 4 * heads * seen


def window_patches(encoder: EncoderConfig) -> int:
    """Patches of a full attention window."""
    return (encoder.window_size // encoder.patch_size) ** 2


def projector_flops(model: ModelConfig) -> int:
    """Of the projector, per visual token."""
    assert model.encoder is not None
    inner = projector_ffn_hidden_size(model)
    merger = 2 * merged_patch_width(model.encoder) * inner + 2 * inner * model.decoder.hidden_size
    return (1 + len(model.encoder.deepstack_visual_indexes)) * merger
