"""Images as files hold them: every kind of pixel becomes the grey or RGB that one sees, upright."""

import struct
import zlib

import numpy as np
import pytest
from media_samples import as_bytes
from PIL import Image, JpegImagePlugin, PngImagePlugin
from synthetic_image import synthetic_image

from jaxforge.data.conversation import SampleError
from jaxforge.data.images import MAX_PIXELS, open_image, resized_pixels, upright, upright_size

ORIENTATION = 0x0112  # the tag's number in the EXIF standard


def pixels(file: bytes, channels: int = 3) -> list:
    with open_image(file) as image:
        return np.asarray(upright(image, channels)).tolist()


def turned(format: str, orientation: int, array: np.ndarray) -> bytes:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return as_bytes(array, format, exif=exif, **({"lossless": True} if format == "WEBP" else {}))


@pytest.mark.parametrize("format", ["PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize(
    "orientation, undo",
    [
        # where the EXIF standard says that the first row and column are, as NumPy sees it
        (1, lambda a: a),  # top, left
        (2, lambda a: a[:, ::-1]),  # top, right
        (3, lambda a: a[::-1, ::-1]),  # bottom, right
        (4, lambda a: a[::-1]),  # bottom, left
        (5, lambda a: a.swapaxes(0, 1)),  # left, top
        (6, lambda a: np.rot90(a, -1)),  # right, top
        (7, lambda a: a.swapaxes(0, 1)[::-1, ::-1]),  # right, bottom
        (8, lambda a: np.rot90(a)),  # left, bottom
    ],
)
def test_an_image_is_turned_as_exif_says_and_so_is_its_size(format, orientation, undo):
    array = synthetic_image(4, 6, 0)
    file = turned(format, orientation, array)
    assert pixels(file) == undo(array).tolist()
    with open_image(file) as image:
        assert upright_size(image) == undo(array).shape[:2]


def test_the_size_of_a_turned_photograph_is_that_of_the_turned_pixels():
    # JPEG is lossy, so only its size is compared
    with open_image(turned("JPEG", 6, synthetic_image(20, 30, 0))) as image:
        assert upright_size(image) == (30, 20)
        assert upright(image, 3).size == (20, 30)


def test_broken_exif_leaves_the_picture_usable():
    array = synthetic_image(4, 6, 0)
    assert pixels(as_bytes(array, exif=b"Exif\0\0not a directory")) == array.tolist()


@pytest.mark.parametrize(
    "format, reader", [("PNG", PngImagePlugin.PngImageFile), ("JPEG", JpegImagePlugin.JpegImageFile)]
)
def test_the_size_asks_for_no_pixels(format, reader, monkeypatch):
    loaded = []
    monkeypatch.setattr(reader, "load", lambda image: loaded.append(image))
    with open_image(as_bytes(synthetic_image(4, 6, 0), format)) as image:
        assert upright_size(image) == (4, 6)
    assert not loaded


def test_the_size_is_known_where_the_pixels_are_broken():
    # the file ends inside its pixels: the header is there, decoding fails
    file = as_bytes(synthetic_image(200, 300, 0))
    with open_image(file[: len(file) // 2]) as image:
        assert upright_size(image) == (200, 300)
        with pytest.raises(OSError):
            upright(image, 3)


def test_transparency_shows_white():
    rgba = np.array([[[10, 20, 30, 255], [10, 20, 30, 0], [0, 0, 0, 51]]], np.uint8)
    # alpha 51 of 255 is a fifth: black on white at a fifth is 204
    assert pixels(as_bytes(rgba)) == [[[10, 20, 30], [255, 255, 255], [204, 204, 204]]]
    grey = Image.merge(
        "LA", [Image.fromarray(np.array([[7, 7]], np.uint8)), Image.fromarray(np.array([[255, 0]], np.uint8))]
    )
    assert pixels(as_bytes(grey)) == [[[7, 7, 7], [255, 255, 255]]]


def test_a_palette_gives_its_colours_and_its_transparent_entry_white():
    image = Image.fromarray(np.array([[0, 1, 2]], np.uint8)).convert("P")
    image.putpalette([200, 0, 0, 0, 100, 0, 0, 0, 50])
    assert pixels(as_bytes(image)) == [[[200, 0, 0], [0, 100, 0], [0, 0, 50]]]
    assert pixels(as_bytes(image, transparency=1)) == [[[200, 0, 0], [255, 255, 255], [0, 0, 50]]]


@pytest.mark.parametrize("format", ["PNG", "TIFF", "PPM"])
def test_16_bits_of_grey_are_scaled_to_8(format):
    # 257 x 255 = 65535: the range of 16 bits is 257 times that of 8
    wide = np.array([[0, 200, 257, 32_896, 65_535]], np.uint16)
    assert pixels(as_bytes(wide, format), channels=1) == [[0, 1, 1, 128, 255]]


def test_16_bits_in_32_are_scaled_too():
    image = Image.fromarray(np.array([[0, 257, 65_535]], np.int32))
    assert image.mode == "I"
    assert pixels(as_bytes(image, "TIFF"), channels=1) == [[0, 1, 255]]


def test_grey_and_one_bit_become_colour_and_colour_becomes_grey():
    assert pixels(as_bytes(np.array([[0, 90]], np.uint8))) == [[[0, 0, 0], [90, 90, 90]]]
    assert pixels(as_bytes(Image.fromarray(np.array([[False, True]])))) == [[[0, 0, 0], [255, 255, 255]]]
    # ITU-R 601: 0.299 red, 0.587 green, 0.114 blue
    assert pixels(as_bytes(np.array([[[200, 100, 50]]], np.uint8)), channels=1) == [[124]]


def test_cmyk_becomes_rgb():
    cyan = Image.new("CMYK", (1, 1), (255, 0, 0, 0))
    assert pixels(as_bytes(cyan, "TIFF")) == [[[0, 255, 255]]]


def test_floating_point_pixels_are_refused_by_name():
    with pytest.raises(SampleError, match="floating-point pixels of unknown range") as error:
        pixels(as_bytes(Image.fromarray(np.array([[0.5]], np.float32)), "TIFF"))
    assert error.value.kind == "refused media"


def test_an_animation_gives_its_first_frame():
    frames = [Image.new("RGB", (4, 2), colour) for colour in ("red", "lime", "blue")]
    file = as_bytes(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert pixels(file) == [[[255, 0, 0]] * 4] * 2


def png_header(height: int, width: int) -> bytes:
    """A PNG of 8-bit grey that claims a size and has no pixels (PNG specification, 11.2.2)."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    data = b"IDAT" + zlib.compress(b"")
    chunks = [
        struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) for chunk in (header, data)
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


# between Pillow's warning and its error, beyond its error, and where Pillow's own limit was switched off
@pytest.mark.parametrize("side", [10_000, 50_000])
@pytest.mark.parametrize("limit", [MAX_PIXELS, None])
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_decompression_bomb_is_refused_by_its_header(side, limit, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    with pytest.raises(SampleError, match="make it smaller") as error:
        open_image(png_header(side, side))
    assert error.value.kind == "refused media"


@pytest.mark.filterwarnings("error::PIL.Image.DecompressionBombWarning")
def test_a_decompression_bomb_is_refused_where_warnings_are_errors():
    with pytest.raises(SampleError, match="make it smaller"):
        open_image(png_header(10_000, 10_000))


def test_a_format_that_starts_programs_is_never_opened():
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"
    with pytest.raises(OSError, match="cannot identify image file"):
        open_image(postscript)


def test_resized_pixels_keep_their_channel():
    assert resized_pixels(Image.new("L", (4, 6), 9), (2, 8)).tolist() == [[[9]] * 8] * 2
    assert resized_pixels(Image.new("RGB", (4, 6), (1, 2, 3)), (2, 1)).tolist() == [[[1, 2, 3]]] * 2
