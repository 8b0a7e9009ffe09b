"""An image that the fixtures' script and the tests both make, exactly, with whole numbers alone."""

import numpy as np


def synthetic_image(height: int, width: int, seed: int) -> np.ndarray:
    """[height, width, 3] uint8: a slope in each channel, with noise of up to 64 levels on it."""
    y, x, channel = np.indices((height, width, 3)).astype(np.uint64)
    slope = (x * (channel + 1) * 150 // width + y * (3 - channel) * 150 // height) % 192
    noise = (x * 374_761_393 + y * 668_265_263 + channel * 2_246_822_519 + seed * 3_266_489_917) % 2**32
    noise = (noise ^ (noise >> 13)) * 1_274_126_177 % 2**32
    return (slope + (noise >> 16) % 64).astype(np.uint8)
