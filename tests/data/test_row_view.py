"""A packed row shown as the documents that it was made of."""

import numpy as np
from data_configs import ENCODER

from jaxforge.data.packing import Document, pack_row
from jaxforge.data.patches import patchify
from jaxforge.data.row_view import PixelScale, document_views
from jaxforge.data.rows import RowFormat

ROWS = RowFormat(24, max_patches=64, merge=2, channels=64)


def decode(tokens):
    return "".join(map(chr, tokens))


def shown(view):
    return [(span.text, span.kind) for span in view.spans]


def text(words, learnt):
    return Document.text([ord(character) for character in words], [character == "1" for character in learnt])


def image(height, width, seed=0):
    return np.random.default_rng(seed).random((height, width, 1), np.float32)


def with_images(before, pixels, after):
    """Text, images of a square of 2 x 2 patches of 8 pixels for each visual token, and an answer."""
    patches = [patchify((each - 0.5) / 0.25, ENCODER) for each in pixels]
    num_visual = sum(len(each.patches_PC) for each in patches) // 4
    tokens = [*map(ord, before), *[0] * num_visual, *map(ord, after)]
    place = np.arange(len(tokens))
    visual = (place >= len(before)) & (place < len(before) + num_visual)
    return Document(np.array(tokens, np.int32), place >= len(before) + num_visual, visual, tuple(patches))


def test_documents_are_told_apart_and_their_learnt_parts_too():
    row = pack_row([text("question answer", "0" * 9 + "1" * 6), text("ab", "11")], RowFormat(24))
    one, two = document_views(row, decode)
    assert shown(one) == [("question ", "masked"), ("answer", "target")]
    # nothing predicts a document's first token
    assert shown(two) == [("a", "masked"), ("b", "target")]
    assert (one.num_tokens, one.num_targets, one.last_positions) == (15, 6, (14, 14, 14))


def test_images_stand_where_their_tokens_are_with_the_pixels_that_they_had():
    wide, small = image(16, 32), image(16, 16, seed=1)
    row = pack_row([text("x", "1"), with_images("see", [wide, small], "!")], ROWS)
    view = document_views(row, decode, ENCODER, PixelScale((0.5,), (0.25,)))[1]
    assert shown(view) == [
        ("see", "masked"),
        ("[image 1: 32x16 pixels, 4x2 patches, 2 tokens]", "visual"),
        ("[image 2: 16x16 pixels, 2x2 patches, 1 token]", "visual"),
        ("!", "target"),
    ]
    for found, pixels in zip(view.images, (wide, small), strict=True):
        np.testing.assert_allclose(found.pixels_HWC, pixels, atol=1e-6)  # rounding of the normalisation
    # text 0 to 2; the first image to 3 (two squares across: 4), the second from 5, the text from 6
    assert view.last_positions == (6, 6, 6)


def test_an_empty_row_has_no_documents():
    assert document_views(pack_row([], ROWS), decode, ENCODER, PixelScale((0.5,), (0.25,))) == []
