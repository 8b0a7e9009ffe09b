"""Still images by Pillow: size from the header, and upright 8-bit pixels.

Pillow raises many types of error on broken files; they pass through here and become SampleErrors in
`jaxforge.data.media`.
"""

import io
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image

from jaxforge.data.conversation import SampleError

# Pillow's other readers are left out: some start programs (EPS), the rest hold no photographs.
FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "AVIF", "BMP", "TIFF", "PPM", "JPEG2000")
# Where Pillow starts to warn of decompression bombs.  Checked here again, because Pillow's limit is a global that any
# library may have changed.
MAX_PIXELS = 89_478_485
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def open_image(file: Path | bytes) -> Image.Image:
    """Opens an image, reading only its header.  Raises SampleError ("refused media") for a decompression bomb."""
    try:
        image = Image.open(io.BytesIO(file) if isinstance(file, bytes) else file, formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise SampleError("refused media", f"{error}; make it smaller") from error
    try:
        check_pixels(image.height, image.width)
    except SampleError:
        image.close()
        raise
    return image


def check_pixels(height: int, width: int) -> None:
    """Raises SampleError ("refused media") for more than MAX_PIXELS."""
    if height * width > MAX_PIXELS:
        raise SampleError(
            "refused media",
            f"{height}x{width} pixels are more than {MAX_PIXELS}, and would take much memory; make it smaller",
        )


def upright_size(image: Image.Image) -> tuple[int, int]:
    """Height and width in pixels of the image once it is turned as its EXIF orientation says; decodes no pixels."""
    return (image.width, image.height) if _orientation(image) >= 5 else (image.height, image.width)


def upright(image: Image.Image, channels: int) -> Image.Image:
    """The image as one shows it: turned as EXIF says, on white where it is transparent, 8 bits of grey (1) or RGB (3).

    The first frame of an animation, unless another was sought.  Raises SampleError ("corrupt media") where the pixels
    don't have the size that the header says, and what Pillow raises for broken files.
    """
    size, orientation = upright_size(image), _orientation(image)
    image.load()
    if orientation in _TURNS:
        image = image.transpose(_TURNS[orientation])
    if (image.height, image.width) != size:
        raise SampleError(
            "corrupt media",
            f"has {image.height}x{image.width} pixels, and its header says {size[0]}x{size[1]}; save it again",
        )
    mode = "L" if channels == 1 else "RGB"
    if image.mode.startswith("I"):
        # 16 bits of grey, also where Pillow holds them in 32; its own conversion would clip them at 255
        wide = np.asarray(image).astype(np.int64)
        return Image.fromarray(np.clip((wide * 255 + 32_767) // 65_535, 0, 255).astype(np.uint8)).convert(mode)
    if image.mode == "F":
        raise SampleError("refused media", "has floating-point pixels of unknown range; save it with 8 bits")
    if "A" in image.getbands() or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert(mode)


def resized_pixels(image: Image.Image, size: tuple[int, int]) -> np.ndarray:
    """The pixels [height, width, channels] uint8 after bicubic resizing to `size`, height and width."""
    pixels = np.asarray(image.resize(size[::-1], Image.Resampling.BICUBIC))
    return pixels.reshape(*size, -1)


def _orientation(image: Image.Image) -> int:
    """The EXIF orientation, 1 to 8, that is still to be applied; 1 where there is none, or EXIF is broken."""
    if image.format == "TIFF":
        return 1  # Pillow turns these by itself, and their header's size is that of the turned image
    try:
        # the base class's: that of PNG would decode the pixels in search of EXIF behind them
        return int(Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1))
    except Exception:  # Pillow raises half a dozen types here; broken metadata don't make the picture unusable
        return 1
