"""The images of a step, divided among the devices that encode them (encoder hetero DP and full hetero DP).

The decoder needs a data parallel rank's tokens on all devices of its model-parallel group; its images need to be
encoded once.  The encoder's attention never leaves a frame (an image, or a temporal patch of a video), so any device
can encode any frame, beside any others.  What the devices make is one table of visual tokens, and each visual token of
a row knows its row of the table.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jaxforge.data.balance import balanced_order
from jaxforge.data.rows import PATCH_KEYS


@dataclasses.dataclass(frozen=True, eq=False)
class Division:
    """Which device encodes what, of the rows of one data parallel rank in one step.

    Attributes:
      patch_arrays: the patch arrays of docs/architecture.md as [K, devices, P, ...]: K rounds of one encoder row, of P
        patches, on each of the devices that were asked for.  In each, frames and windows are numbered from 1.
      visual_index: [M, Bl, S] int32; where the token is a visual token, its row of the table; else -1.
      patches_G: [G] int64, the patches that each device encodes, padding aside.
    """

    patch_arrays: dict[str, np.ndarray]
    visual_index: np.ndarray
    patches_G: np.ndarray


def num_rounds(rows: int, devices: int) -> int:
    """K, the encoder rows of each device: together the devices have room for the patches of so many full rows."""
    return -(-rows // devices)


def divide(
    rows: dict[str, np.ndarray], *, stages: int, tensor: int, merge: int, devices: Sequence[int] | None = None
) -> Division:
    """Deals the frames of a data parallel rank's rows to G = stages x tensor devices, which get about equal patches.

    A pure function of the rows, so processes that share a rank agree.  Of the table, device s * tensor + t (stage s,
    tensor rank t) makes, in round k, the N = P / merge^2 rows from ((t * stages + s) * K + k) * N on.

    Args:
      rows: at least `visual_index` and the patch arrays of the rank's rows, [M, Bl, ...].
      stages: pipeline stages whose devices encode different frames; 1 where all stages encode the same.
      tensor: devices of the tensor group.
      merge: side, in patches, of the square that becomes one visual token.
      devices: of the G, those whose patch arrays are wanted; by default all.
    """
    num_microbatches, rows_at_once, room = rows["patch_segments"].shape
    num_rows, group = num_microbatches * rows_at_once, stages * tensor
    rounds = num_rounds(num_rows, group)
    frames = _place_frames(rows["patch_segments"].reshape(num_rows, room), group, rounds)

    square = merge**2
    table_row_RN = np.full((num_rows, room // square), -1, np.int32)
    patches_G = np.zeros(group, np.int64)
    for frame in frames:
        stage, tensor_rank = divmod(frame.device, tensor)
        encoder_row = (tensor_rank * stages + stage) * rounds + frame.turn
        first, count = (encoder_row * room + frame.offset) // square, frame.length // square
        table_row_RN[frame.row, frame.start // square :][:count] = np.arange(first, first + count)
        patches_G[frame.device] += frame.length
    index_RS = rows["visual_index"].reshape(num_rows, -1)
    of_visual_RS = np.take_along_axis(table_row_RN, np.maximum(index_RS, 0), axis=1)
    return Division(
        patch_arrays=_encoder_rows(rows, frames, rounds, range(group) if devices is None else devices),
        visual_index=np.where(index_RS >= 0, of_visual_RS, -1).reshape(rows["visual_index"].shape),
        patches_G=patches_G,
    )


class _Frame(NamedTuple):
    """A frame of `length` patches: from patch `start` of a row to patch `offset` of a device's encoder row."""

    row: int
    start: int
    length: int
    device: int
    turn: int
    offset: int


def _encoder_rows(
    rows: dict[str, np.ndarray], frames: Iterable[_Frame], rounds: int, devices: Sequence[int]
) -> dict[str, np.ndarray]:
    """The patch arrays [K, devices, P, ...]; the frames of an encoder row come in its order."""
    arrays = {key: np.zeros((rounds, len(devices), *rows[key].shape[2:]), rows[key].dtype) for key in PATCH_KEYS}
    arrays["patch_grids"].fill(1)
    columns = {device: column for column, device in enumerate(devices)}
    rows_at_once = rows["patches"].shape[1]
    for frame in frames:
        if frame.device not in columns:
            continue
        source = (*divmod(frame.row, rows_at_once), slice(frame.start, frame.start + frame.length))
        place = frame.turn, columns[frame.device]
        target = (*place, slice(frame.offset, frame.offset + frame.length))
        for key in ("patches", "patch_positions", "patch_grids"):
            arrays[key][target] = rows[key][source]
        windows = rows["patch_windows"][source]
        arrays["patch_windows"][target] = windows - windows.min() + 1 + arrays["patch_windows"][place].max()
        arrays["patch_segments"][target] = 1 + arrays["patch_segments"][place].max()
    return arrays


def _place_frames(segments_RP: np.ndarray, devices: int, rounds: int) -> list[_Frame]:
    """A place for each frame, in the order of device, round and place in the encoder row."""
    framed_RP = np.pad(segments_RP, ((0, 0), (1, 1)))
    changes_RP = framed_RP[:, 1:] != framed_RP[:, :-1]
    row_F, start_F = np.nonzero(changes_RP[:, :-1] & (segments_RP > 0))
    _, last_F = np.nonzero(changes_RP[:, 1:] & (segments_RP > 0))
    length_F = last_F + 1 - start_F
    places = _deal_frames(length_F, devices, rounds, segments_RP.shape[1])
    if places is None:
        device_R, turn_R = _deal_rows((segments_RP > 0).sum(axis=1), devices, rounds)
        places = device_R[row_F], turn_R[row_F], start_F
    columns = (column.tolist() for column in (row_F, start_F, length_F, *places))
    return sorted(map(_Frame, *columns), key=lambda frame: (frame.device, frame.turn, frame.offset))


def _deal_frames(
    length_F: np.ndarray, devices: int, rounds: int, room: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Device, round and first patch there of each frame; None where some frame finds no room.

    The largest frame comes first, and each goes to the least loaded device that has room for it (longest processing
    time first: Graham 1969, doi:10.1137/0117039); there to the fullest round that it fits, so that others stay free for
    large ones.
    """
    free_GK = np.full((devices, rounds), room)
    places_3F = np.empty((3, len(length_F)), np.int64)
    for frame in np.argsort(-length_F, kind="stable"):
        fits_GK = free_GK >= length_F[frame]
        if not fits_GK.any():
            return None
        device = np.argmax(np.where(fits_GK.any(axis=1), free_GK.sum(axis=1), -1))
        turn = np.argmin(np.where(fits_GK[device], free_GK[device], room + 1))
        places_3F[:, frame] = device, turn, room - free_GK[device, turn]
        free_GK[device, turn] -= length_F[frame]
    return places_3F[0], places_3F[1], places_3F[2]


def _deal_rows(patches_R: np.ndarray, devices: int, rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """Device and round of each whole row: there is always room for these."""
    padded = np.zeros(devices * rounds)
    padded[: len(patches_R)] = patches_R
    order = balanced_order(padded, 1, devices, rounds)
    place_of_row = np.empty_like(order)
    place_of_row[order] = np.arange(len(order))
    return np.divmod(place_of_row[: len(patches_R)], rounds)
