"""Rules on the architecture: each yields a message for each way in which the config breaks it."""

import math
from collections.abc import Iterator
from typing import Any

from jaxforge.config.derived import encoder_tensor_parallel_size, projector_ffn_hidden_size
from jaxforge.config.schema import Config, DecoderConfig, EncoderConfig


def divisors(number: int) -> list[int]:
    return [i for i in range(1, number + 1) if number % i == 0]


def one_of(values: list[int]) -> str:
    """`1, 2 or 4`."""
    words = [str(value) for value in values]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def query_groups_divide_the_heads(config: Config) -> Iterator[str]:
    """Every key/value head serves the same number of query heads."""
    decoder = config.model.decoder
    if not decoder.multi_latent_attention and decoder.num_attention_heads % decoder.num_query_groups:
        yield (
            f"model.decoder.num_query_groups={decoder.num_query_groups} does not divide"
            f" model.decoder.num_attention_heads={decoder.num_attention_heads};"
            f" use {one_of(divisors(decoder.num_attention_heads))}"
        )


def decoder_heads_can_rotate(config: Config) -> Iterator[str]:
    """RoPE rotates pairs of features."""
    decoder = config.model.decoder
    name = "qk_pos_emb_head_dim" if decoder.multi_latent_attention else "kv_channels"
    if (width := getattr(decoder, name)) % 2:
        yield f"model.decoder.{name}={width} must be even, because RoPE rotates pairs; use {width + 1}"


def rope_scaling_is_used(config: Config) -> Iterator[str]:
    """The numbers of Llama-3.1's scaling have an effect, and its two bounds are in order."""
    decoder = config.model.decoder
    low, high = decoder.rope_scaling_low_freq_factor, decoder.rope_scaling_high_freq_factor
    if decoder.use_rope_scaling:
        if low >= high:
            yield (
                f"model.decoder.rope_scaling_low_freq_factor={low} must be below"
                f" model.decoder.rope_scaling_high_freq_factor={high}; Llama-3.1 has 1 and 4"
            )
        return
    for name, value, default in _changed(
        decoder,
        "rope_scaling_factor",
        "rope_scaling_low_freq_factor",
        "rope_scaling_high_freq_factor",
        "rope_scaling_original_max_position_embeddings",
    ):
        yield (
            f"model.decoder.{name}={value} would have no effect, because model.decoder.use_rope_scaling=False;"
            f" set that to true or leave {name} at {default}"
        )


def _changed(decoder: DecoderConfig, *names: str) -> Iterator[tuple[str, Any, Any]]:
    """Those of the fields that aren't at their defaults: name, value, default."""
    for name in names:
        value, default = getattr(decoder, name), getattr(DecoderConfig, name)
        if value != default:
            yield name, value, default


def latent_attention_is_whole(config: Config) -> Iterator[str]:
    """Latent attention and attention with grouped queries have widths of their own, and none of the other's parts."""
    decoder = config.model.decoder
    if not decoder.multi_latent_attention:
        names = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
        for name, value, default in _changed(decoder, *names):
            yield (
                f"model.decoder.{name}={value} would have no effect, because model.decoder.multi_latent_attention="
                f"False; set that to true or leave {name} at {default}"
            )
        return
    widths = "its heads have q_lora_rank, kv_lora_rank, qk_head_dim, qk_pos_emb_head_dim and v_head_dim"
    refused = {
        "num_query_groups": widths,
        "kv_channels": widths,
        "add_qkv_bias": "its projections have no biases",
        "qk_layernorm": "its compressed queries, keys and values always have norms",
        "mrope_section": "it rotates by text position",
    }
    for name, value, default in _changed(decoder, *refused):
        yield (
            f"model.decoder.{name}={value} doesn't go with model.decoder.multi_latent_attention=True: {refused[name]};"
            f" leave {name} at {default}"
        )
    width = decoder.qk_head_dim + decoder.qk_pos_emb_head_dim
    if config.train.attention_backend == "cudnn" and decoder.v_head_dim != width:
        yield (
            f"train.attention_backend=cudnn needs values as wide as keys, but model.decoder.v_head_dim="
            f"{decoder.v_head_dim} and qk_head_dim + qk_pos_emb_head_dim={width}; use flash"
        )


def yarn_is_whole(config: Config) -> Iterator[str]:
    """YaRN's numbers have an effect, and its bounds are in order."""
    decoder = config.model.decoder
    if decoder.rope_type != "yarn":
        names = ("rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale")
        for name, value, default in _changed(decoder, *names, "mscale_all_dim"):
            yield (
                f"model.decoder.{name}={value} would have no effect with model.decoder.rope_type={decoder.rope_type};"
                f" set that to yarn or leave {name} at {default}"
            )
        return
    if not decoder.multi_latent_attention:
        yield (
            "model.decoder.rope_type=yarn needs model.decoder.multi_latent_attention=True; for Llama-3.1's scaling set"
            " rope_type to rope and use_rope_scaling to true"
        )
    if decoder.use_rope_scaling:
        yield (
            "model.decoder.rope_type=yarn and model.decoder.use_rope_scaling=True both scale RoPE; leave one of them"
            " out"
        )
    if decoder.beta_fast <= decoder.beta_slow:
        yield (
            f"model.decoder.beta_fast={decoder.beta_fast} must be above model.decoder.beta_slow={decoder.beta_slow};"
            " DeepSeek-V3 has 32 and 1"
        )
    if decoder.rotary_base <= 1:
        yield f"model.decoder.rotary_base={decoder.rotary_base} must be above 1 with model.decoder.rope_type=yarn"


def mrope_sections_fill_the_head(config: Config) -> Iterator[str]:
    """Three sections share the rotary frequencies, and interleaved ones all find their places."""
    decoder = config.model.decoder
    section, half = decoder.mrope_section, decoder.kv_channels // 2
    if section is None:
        if decoder.mrope_interleaved:
            yield (
                "model.decoder.mrope_interleaved=True would have no effect without model.decoder.mrope_section;"
                " set both or neither"
            )
        return
    if len(section) != 3:
        yield f"model.decoder.mrope_section={section} needs 3 entries: frequencies for time, height and width"
    elif sum(section) != half:
        yield (
            f"model.decoder.mrope_section={section} sums to {sum(section)}, but model.decoder.kv_channels="
            f"{decoder.kv_channels} has {half} frequencies; make them sum to {half}"
        )
    elif decoder.mrope_interleaved:
        # frequency i belongs to height where i % 3 == 1, to width where i % 3 == 2, until their counts are used up
        for name, offset, count in (("height", 1, section[1]), ("width", 2, section[2])):
            places = len(range(offset, half, 3))
            if count > places:
                yield (
                    f"model.decoder.mrope_section={section}: {count} interleaved frequencies for {name} don't fit"
                    f" among {half}, which have {places} places for them; use at most {places},"
                    " or mrope_interleaved=False"
                )


def _decoder_tensor_sizes(config: Config) -> dict[str, int]:
    names = ["num_query_groups", "num_attention_heads", "ffn_hidden_size", "hidden_size"]
    if config.model.decoder.multi_latent_attention:
        names.remove("num_query_groups")
    sizes = {f"model.decoder.{name}": getattr(config.model.decoder, name) for name in names}
    # the multiple and not the padded size itself, so that checkpoints have the same shapes at every layout
    padding = config.model.decoder.make_vocab_size_divisible_by
    return sizes | {"model.decoder.make_vocab_size_divisible_by": padding}


def tensor_parallel_divides_the_decoder(config: Config) -> Iterator[str]:
    """Each device holds whole heads and equal shares of the widths and of the padded vocabulary."""
    sizes, tensor = _decoder_tensor_sizes(config), config.parallel.tensor_model_parallel_size
    for name, size in sizes.items():
        if size % tensor:
            fitting = one_of(divisors(math.gcd(*sizes.values())))
            way_out = f"use {fitting}"
            if name.endswith("make_vocab_size_divisible_by"):
                way_out = f"use {math.lcm(size, tensor)} there, or a tensor parallel size of {fitting}"
            yield f"parallel.tensor_model_parallel_size={tensor} does not divide {name}={size}; {way_out}"


def projector_needs_an_encoder(config: Config) -> Iterator[str]:
    """Without an encoder there is nothing to project."""
    if config.model.encoder is None and config.model.projector is not None:
        yield "model.projector would have no effect, because model.encoder is None; set model.projector to None"
    if config.model.encoder is not None and config.model.projector is None:
        yield "model.projector is None, but model.encoder is not; resolve() gives it one"


def encoder_tensor_parallel_divides(config: Config) -> Iterator[str]:
    """Encoder TP divides decoder TP (it is a part of the same mesh axis) and the encoder's and projector's sizes."""
    encoder = config.model.encoder
    if encoder is None:
        return
    tensor, decoder_tensor = encoder_tensor_parallel_size(config), config.parallel.tensor_model_parallel_size
    sizes = {
        "parallel.tensor_model_parallel_size": decoder_tensor,
        "model.encoder.num_attention_heads": encoder.num_attention_heads,
        "model.encoder.ffn_hidden_size": encoder.ffn_hidden_size,
        "model.encoder.hidden_size": encoder.hidden_size,
        "model.projector.ffn_hidden_size": projector_ffn_hidden_size(config.model),
    }
    inherited = " (inherited from the decoder)" if encoder.tensor_model_parallel_size is None else ""
    field = f"model.encoder.tensor_model_parallel_size={tensor}{inherited}"
    for name, size in sizes.items():
        if size % tensor:
            fitting = one_of(divisors(math.gcd(*sizes.values())))
            yield f"{field} does not divide {name}={size}; use {fitting}"


def encoder_heads_are_whole(config: Config) -> Iterator[str]:
    """2D RoPE rotates pairs for rows and pairs for columns; the encoders have no grouped-query attention."""
    encoder = config.model.encoder
    if encoder is None:
        return
    if encoder.kv_channels % 4:
        yield (
            f"model.encoder.kv_channels={encoder.kv_channels} must be a multiple of 4, because 2D RoPE rotates pairs"
            f" for rows and for columns; use {-(-encoder.kv_channels // 4) * 4}"
        )
    if encoder.num_query_groups not in (None, encoder.num_attention_heads):
        yield (
            f"model.encoder.num_query_groups={encoder.num_query_groups} must equal"
            f" model.encoder.num_attention_heads={encoder.num_attention_heads}; leave it out or make them equal"
        )


def encoder_gating_agrees(config: Config) -> Iterator[str]:
    """`gated_linear_unit` is another name for `swiglu`."""
    encoder = config.model.encoder
    if encoder is not None and encoder.gated_linear_unit not in (None, encoder.swiglu):
        yield (
            f"model.encoder.gated_linear_unit={encoder.gated_linear_unit} contradicts model.encoder.swiglu="
            f"{encoder.swiglu}; leave it out or make them equal"
        )


def _layer_indexes_exist(encoder: EncoderConfig, name: str) -> Iterator[str]:
    indexes = getattr(encoder, name)
    wrong = [index for index in indexes if not 0 <= index < encoder.num_layers]
    if wrong:
        yield (
            f"model.encoder.{name}={indexes} names layer {wrong[0]}, but model.encoder.num_layers={encoder.num_layers}"
            f" has layers 0 to {encoder.num_layers - 1}; set both"
        )
    elif list(indexes) != sorted(set(indexes)):
        yield f"model.encoder.{name}={indexes} must be increasing; use {tuple(sorted(set(indexes)))}"


def _has_no_effect(encoder: EncoderConfig, *names: str) -> Iterator[str]:
    for name in names:
        value, default = getattr(encoder, name), getattr(EncoderConfig, name)
        if value != default:
            yield (
                f"model.encoder.{name}={value} would have no effect with model.encoder.model_type="
                f"{encoder.model_type}; leave it at {default}"
            )


def windowed_encoder_is_consistent(config: Config) -> Iterator[str]:
    """qwen2_5_vit: windows are whole visual tokens, full-attention layers exist, and nothing of qwen3_vit is set."""
    encoder = config.model.encoder
    if encoder is None or encoder.model_type != "qwen2_5_vit":
        return
    yield from _has_no_effect(encoder, "num_position_embeddings", "deepstack_visual_indexes")
    yield from _layer_indexes_exist(encoder, "fullatt_block_indexes")
    token_side = encoder.patch_size * encoder.spatial_merge_size
    if encoder.window_size % token_side:
        nearest = max(1, round(encoder.window_size / token_side)) * token_side
        yield (
            f"model.encoder.window_size={encoder.window_size} must be a multiple of patch_size x spatial_merge_size="
            f"{token_side}; use {nearest}"
        )


def learned_position_encoder_is_consistent(config: Config) -> Iterator[str]:
    """qwen3_vit: a square position table, DeepStack layers that exist, and nothing of qwen2_5_vit is set."""
    encoder = config.model.encoder
    if encoder is None or encoder.model_type != "qwen3_vit":
        return
    yield from _has_no_effect(encoder, "window_size", "fullatt_block_indexes")
    rows = encoder.num_position_embeddings
    if rows is None:
        yield "model.encoder.num_position_embeddings=None, but qwen3_vit needs it; the released models have 2304"
    elif rows < 1 or math.isqrt(rows) ** 2 != rows:
        nearest = max(1, round(math.sqrt(max(rows, 1)))) ** 2
        yield f"model.encoder.num_position_embeddings={rows} must be a square number; use {nearest}"
    yield from _layer_indexes_exist(encoder, "deepstack_visual_indexes")
    deepstack, layers = encoder.deepstack_visual_indexes, config.model.decoder.num_layers
    if len(deepstack) > layers:
        yield (
            f"model.encoder.deepstack_visual_indexes={deepstack} feeds {len(deepstack)} decoder layers,"
            f" but model.decoder.num_layers={layers}; use at most {layers} indexes"
        )


def full_image_is_a_visual_token_at_least(config: Config) -> Iterator[str]:
    """`image_size` holds one square of merged patches."""
    encoder = config.model.encoder
    if encoder is None:
        return
    token_side = encoder.patch_size * encoder.spatial_merge_size
    if min(encoder.image_size) < token_side:
        yield (
            f"model.encoder.image_size={encoder.image_size} is smaller than one visual token of patch_size x"
            f" spatial_merge_size={token_side} pixels; use at least {(token_side, token_side)}"
        )


MODEL_RULES = (
    query_groups_divide_the_heads,
    decoder_heads_can_rotate,
    rope_scaling_is_used,
    latent_attention_is_whole,
    yarn_is_whole,
    mrope_sections_fill_the_head,
    tensor_parallel_divides_the_decoder,
    projector_needs_an_encoder,
    encoder_tensor_parallel_divides,
    encoder_heads_are_whole,
    encoder_gating_agrees,
    windowed_encoder_is_consistent,
    learned_position_encoder_is_consistent,
    full_image_is_a_visual_token_at_least,
)
