"""What a row costs, and rows dealt to data parallel ranks so that none waits for another.

In a microbatch the slowest rank sets the pace.  Rows have the same number of tokens, but attention costs more in long
documents than in short ones, and an encoder's work is that of the patches.  So the rows of a step change places; they
stay in their step, so the step's loss and gradients are the same sums.
"""

import numpy as np

from jaxforge.config.derived import patches_per_full_image
from jaxforge.config.part_flops import (
    decoder_flops,
    encoder_flops,
    projector_flops,
    window_patches,
)
from jaxforge.config.schema import Config


def document_costs(tokens_N: np.ndarray, patches_N: np.ndarray, config: Config) -> np.ndarray:
    """Forward FLOPs of each document [N] float64, alone in its row.

    Matrix products only, 2 FLOPs per multiply-add (Narayanan et al. 2021, arXiv:2104.04473, appendix): linear in tokens
    and patches, and attention, quadratic in what sees each other: the tokens of a document, the patches of an image or
    of a window.  Of images only the patches of a document together are known: they count as equal images of at most
    model.encoder.image_size.
    """
    model, tokens_N, patches_N = config.model, tokens_N.astype(np.float64), patches_N.astype(np.float64)
    decoder = model.decoder
    costs_N = tokens_N * decoder_flops(decoder, tokens_N)
    encoder = model.encoder
    if encoder is None:
        return costs_N
    image_N = patches_N / np.maximum(1, np.ceil(patches_N / patches_per_full_image(encoder)))
    per_patch_N = encoder_flops(encoder, image_N, np.minimum(image_N, window_patches(encoder)))
    return costs_N + patches_N * (per_patch_N + projector_flops(model) / encoder.spatial_merge_size**2)


def balanced_order(costs_R: np.ndarray, microbatches: int, ranks: int, rows_per_rank: int) -> np.ndarray:
    """Which row of a step goes where, so that the ranks of each microbatch, and of the whole step, cost about the same.

    Rows of similar cost make up a microbatch; in it each row, the most expensive first, goes to the rank that has the
    least to do so far in the step.

    Args:
      costs_R: [R] cost of each row, R = microbatches x ranks x rows_per_rank.

    Returns:
      [R] int64: the row at place m ranks rows_per_rank + rank rows_per_rank + i, row i of the rank's in microbatch m.
    """
    order = np.argsort(-costs_R, kind="stable")
    loads = np.zeros(ranks)
    places = np.empty((microbatches, ranks, rows_per_rank), np.int64)
    for microbatch, rows in enumerate(order.reshape(microbatches, -1)):
        held = np.zeros(ranks, np.int64)
        for row in rows:
            rank = np.argmin(np.where(held < rows_per_rank, loads, np.inf))
            places[microbatch, rank, held[rank]] = row
            held[rank] += 1
            loads[rank] += costs_R[row]
    return places.reshape(-1)
