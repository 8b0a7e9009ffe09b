"""Rotary positions: plain, scaled for long contexts, in three dimensions and over patches."""

import math

import numpy as np
import numpy_reference
import pytest
from tiny_models import decoder_of

from jaxforge.models.rope import decoder_angles, decoder_frequencies, patch_angles, rotate


def random_positions(length=7, seed=0):
    """[1, 3, length], all three different."""
    return np.random.default_rng(seed).integers(0, 500, (1, 3, length)).astype(np.int32)


def angles_of(config, positions):
    return np.asarray(decoder_angles(positions, decoder_frequencies(config)))


def test_text_turns_with_the_first_position_alone():
    config = decoder_of(None, kv_channels=8, rotary_base=10000.0)
    positions = np.array([[[0, 1, 50], [7, 7, 7], [9, 9, 9]]], np.int32)
    expected = [[p, p / 10, p / 100, p / 1000] for p in (0, 1, 50)]
    np.testing.assert_allclose(angles_of(config, positions)[0], expected, rtol=1e-6)


def test_a_rotation_is_a_complex_product():
    rng = np.random.default_rng(0)
    x, angles = rng.normal(size=(2, 5, 3, 8)).astype(np.float32), rng.normal(size=(2, 5, 4)).astype(np.float32) * 3
    expected = [numpy_reference.rotate(x[b], angles[b]) for b in range(2)]
    np.testing.assert_allclose(rotate(x, angles), expected, atol=1e-6)


def test_only_the_distance_matters_to_a_product_of_two_rotated_heads():
    rng = np.random.default_rng(0)
    config = decoder_of(None, kv_channels=8)
    q, k = rng.normal(size=(2, 1, 1, 1, 8)).astype(np.float32)

    def product(s, t):
        turned = [rotate(x, angles_of(config, np.full((1, 3, 1), position))) for x, position in ((q, s), (k, t))]
        return float(np.sum(turned[0] * turned[1]))

    assert product(3, 1) == pytest.approx(product(13, 11), abs=1e-5)
    assert product(3, 1) != pytest.approx(product(3, 2), abs=1e-3)


def llama31_frequencies(head_width, base, factor, low, high, original):
    """By wavelengths, in the three cases of Meta's description."""
    scaled = []
    for i in range(head_width // 2):
        frequency = 1 / base ** (2 * i / head_width)
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high:
            scaled.append(frequency)
        elif wavelength > original / low:
            scaled.append(frequency / factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            scaled.append((1 - smooth) * frequency / factor + smooth * frequency)
    return scaled


@pytest.mark.parametrize(
    "factor, low, high, original", [(8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192), (4.0, 2.0, 3.0, 256)]
)
def test_llama_3_1_stretches_long_wavelengths(factor, low, high, original):
    config = decoder_of(
        None, kv_channels=128, rotary_base=5e5, use_rope_scaling=True, rope_scaling_factor=factor,
        rope_scaling_low_freq_factor=low, rope_scaling_high_freq_factor=high,
        rope_scaling_original_max_position_embeddings=original,
    )  # fmt: skip
    frequencies = decoder_frequencies(config)
    expected = llama31_frequencies(128, 5e5, factor, low, high, original)
    np.testing.assert_allclose(frequencies[0], expected, rtol=1e-6)
    assert not np.any(frequencies[1:])
    # all three cases occur
    plain = decoder_frequencies(decoder_of(None, kv_channels=128, rotary_base=5e5))[0]
    ratios = frequencies[0] / plain
    assert np.isclose(ratios[0], 1) and np.isclose(ratios[-1], 1 / factor)
    assert np.any((ratios > 1.01 / factor) & (ratios < 0.99))


@pytest.mark.parametrize("section, interleaved", [((16, 24, 24), False), ((24, 20, 20), True)])
def test_each_frequency_turns_with_its_own_position(section, interleaved):
    config = decoder_of(None, kv_channels=128, rotary_base=1e6, mrope_section=section, mrope_interleaved=interleaved)
    positions = random_positions()
    expected = numpy_reference.decoder_angles(positions[0], config)
    np.testing.assert_allclose(angles_of(config, positions)[0], expected, rtol=1e-6)
    used = np.count_nonzero(decoder_frequencies(config), axis=1)
    assert tuple(used) == section


def test_interleaved_frequencies_alternate_and_end_with_time():
    config = decoder_of(None, kv_channels=128, mrope_section=(24, 20, 20), mrope_interleaved=True)
    axis = np.argmax(decoder_frequencies(config) != 0, axis=0)
    # t h w twenty times; what remains of the 64 frequencies is time
    assert axis.tolist() == [0, 1, 2] * 20 + [0] * 4


@pytest.mark.parametrize("interleaved", [False, True])
def test_text_has_the_angles_of_plain_rope_under_mrope(interleaved):
    text = np.broadcast_to(np.arange(9, dtype=np.int32), (1, 3, 9))
    plain = decoder_of(None, kv_channels=16)
    mrope = decoder_of(None, kv_channels=16, mrope_section=(4, 2, 2), mrope_interleaved=interleaved)
    assert np.array_equal(angles_of(plain, text), angles_of(mrope, text))


def test_half_of_the_frequencies_turn_with_the_row_of_a_patch_and_half_with_its_column():
    positions = np.array([[[3, 5], [0, 2]]], np.int32)
    angles = patch_angles(positions, head_width=12, base=1000.0)
    # 3 frequencies each: 1, 1/10, 1/100
    expected = [[3, 0.3, 0.03, 5, 0.5, 0.05], [0, 0, 0, 2, 0.2, 0.02]]
    np.testing.assert_allclose(angles[0], expected, rtol=1e-6)
