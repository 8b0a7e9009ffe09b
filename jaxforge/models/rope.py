"""Rotary position embeddings: plain, Llama-3.1-scaled, YaRN, mRoPE for text with images, and 2D for patches."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxforge.config.schema import DecoderConfig


def decoder_frequencies(config: DecoderConfig) -> np.ndarray:
    """Angle per unit of time, height and width position: [3, K / 2] fp32; K counts the features of a head that rotate.

    Without mRoPE every frequency turns with the first row, the text position.  mRoPE (Qwen2-VL, arXiv:2409.12191, 2.1)
    gives each frequency to one of the three; in blocks, or interleaved t, h, w as in Qwen3-VL.
    """
    half = (config.qk_pos_emb_head_dim if config.multi_latent_attention else config.kv_channels) // 2
    frequencies = config.rotary_base ** (-np.arange(half, dtype=np.float64) / half)
    if config.use_rope_scaling:
        frequencies = _llama31_scaling(frequencies, config)
    if config.rope_type == "yarn":
        frequencies = _yarn_scaling(frequencies, config)
    axis = np.zeros(half, np.int64)
    if config.mrope_section is not None:
        if config.mrope_interleaved:
            index = np.arange(half)
            for which in (1, 2):
                axis[(index % 3 == which) & (index < 3 * config.mrope_section[which])] = which
        else:
            axis = np.repeat(np.arange(3), config.mrope_section)
    return np.where(axis == np.arange(3)[:, None], frequencies, 0).astype(np.float32)


def _llama31_scaling(frequencies, config: DecoderConfig):
    """Long wavelengths are stretched by the factor, short ones left, and between the two it is interpolated.

    (The Llama 3 Herd of Models, arXiv:2407.21783, and Meta's reference code of Llama 3.1.)
    """
    original = config.rope_scaling_original_max_position_embeddings
    low, high = config.rope_scaling_low_freq_factor, config.rope_scaling_high_freq_factor
    turns = original * frequencies / (2 * np.pi)
    keep = np.clip((turns - low) / (high - low), 0, 1)
    return keep * frequencies + (1 - keep) * frequencies / config.rope_scaling_factor


def _yarn_scaling(frequencies, config: DecoderConfig):
    """Slow frequencies are divided by the factor, fast ones left, and between the two it is interpolated by index.

    (Peng et al. 2023, arXiv:2309.00071, 3.2, whose bounds the authors' code rounds outwards to whole indexes.)
    """
    half = len(frequencies)

    def index_with(turns):
        """Of the frequency that turns so often in the original context."""
        return half * math.log(config.original_max_position_embeddings / (2 * math.pi * turns), config.rotary_base)

    first = max(math.floor(index_with(config.beta_fast)), 0)
    last = min(math.ceil(index_with(config.beta_slow)), 2 * half - 1)
    # where they are one there is a step
    scaled = np.clip((np.arange(half) - first) / max(last - first, 1e-3), 0, 1)
    return (1 - scaled) * frequencies + scaled * frequencies / config.rotary_scaling_factor


def rotation_scale(config: DecoderConfig) -> float:
    """What rotated features are multiplied by: 1 without YaRN."""
    return _yarn_growth(config, config.mscale) / _yarn_growth(config, config.mscale_all_dim)


def score_scale(config: DecoderConfig) -> float:
    """What attention scores are multiplied by beside 1 / sqrt(K): 1 without YaRN."""
    return _yarn_growth(config, config.mscale_all_dim) ** 2


def _yarn_growth(config: DecoderConfig, coefficient: float) -> float:
    """0.1 c ln(factor) + 1.  (YaRN, 3.4; with a coefficient as in DeepSeek-V2, arXiv:2405.04434, 3.1.4)"""
    return 0.1 * coefficient * math.log(config.rotary_scaling_factor) + 1 if config.rope_type == "yarn" else 1.0


def decoder_angles(positions_B3S: jax.Array, frequencies_3R: np.ndarray) -> jax.Array:
    """Angles [B, S, K / 2] fp32.  Sums by hand: a matmul might round positions to TF32 or bf16."""
    positions_B3S = positions_B3S.astype(jnp.float32)
    return sum(positions_B3S[:, axis, :, None] * frequencies_3R[axis] for axis in range(3))


def patch_angles(positions_BP2: jax.Array, head_width: int, base: float) -> jax.Array:
    """2D RoPE of the Qwen vision encoders: half of the frequencies turn with the row, half with the column.

    [B, P, K / 2] fp32 for `head_width` K.
    """
    quarter = head_width // 4
    frequencies = (base ** (-np.arange(quarter, dtype=np.float64) / quarter)).astype(np.float32)
    angles_BP2R = positions_BP2.astype(jnp.float32)[..., None] * frequencies
    return angles_BP2R.reshape(*positions_BP2.shape[:2], 2 * quarter)


def rotate(x_BSHK: jax.Array, angles_BSR: jax.Array, scale: float = 1.0) -> jax.Array:
    """Rotates the pairs (x[i], x[i + K / 2]) by angle i, times `scale`, in fp32.  (Su et al. 2021, arXiv:2104.09864)"""
    cos_BS1R, sin_BS1R = scale * jnp.cos(angles_BSR)[:, :, None], scale * jnp.sin(angles_BSR)[:, :, None]
    first, second = jnp.split(x_BSHK.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate(
        [first * cos_BS1R - second * sin_BS1R, second * cos_BS1R + first * sin_BS1R], axis=-1
    )
    return rotated.astype(x_BSHK.dtype)
