"""Where what a forward keeps for its backward lies: slots of a buffer, each used again as soon as its value is dead.

A value is written by a forward and read by the backward of the same (microbatch, stage), in the same tick or a later
one.  In a tick the forward comes first, so a slot that a backward reads in tick t is free from tick t + 1.  Each rank
hands out its slots by the left-edge method (Hashimoto and Stevens 1971), which takes as many as there are values at the
same time, and no more.  A buffer has the slots that its fullest rank needs, since one program runs on all ranks.  So
memory doesn't grow with the number of microbatches, and stages of different sizes waste none.
"""

import dataclasses
import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxforge.parallel.pipeline.schedule import Schedule

if TYPE_CHECKING:
    from jaxforge.parallel.pipeline.pieces import Kind, Unit


@dataclasses.dataclass(frozen=True, eq=False)
class Slots:
    """A buffer of `num_slots` slots, and which of them each rank writes and reads in each tick.

    Attributes:
      write: [ticks, ranks, ...] int32, the slots into which the forward of a tick writes, -1 for none.
      read: [ticks, ranks, ...] int32, the slots from which the backward of a tick reads, -1 for none.
    """

    num_slots: int
    write: np.ndarray
    read: np.ndarray


def visit_slots(schedule: Schedule, slots_by_stage: Sequence[int]) -> Slots:
    """Slots for the values that each visit of a stage keeps from its forward to its backward.

    Args:
      slots_by_stage: how many values of this buffer a visit of each stage keeps.  Layers of several kinds, whose
        residuals have different shapes, have a buffer each: then these are the layers of one kind.

    Returns:
      Tables [ticks, ranks, max(slots_by_stage)].
    """
    microbatch_N, stage_N, value_N = _values(schedule.num_microbatches, slots_by_stage)
    first_N = schedule.forward_tick_MS[microbatch_N, stage_N]
    last_N = schedule.backward_tick_MS[microbatch_N, stage_N]
    rank_N = stage_N % schedule.pipeline_size
    slot_N = np.full(len(rank_N), -1, np.int32)
    num_slots = 0
    for rank in range(schedule.pipeline_size):
        of_rank = np.flatnonzero(rank_N == rank)
        slot_N[of_rank], needed = _left_edge(first_N[of_rank], last_N[of_rank])
        num_slots = max(num_slots, needed)
    write = np.full((schedule.num_ticks, schedule.pipeline_size, max(slots_by_stage)), -1, np.int32)
    read = write.copy()
    write[first_N, rank_N, value_N] = slot_N
    read[last_N, rank_N, value_N] = slot_N
    return Slots(num_slots, write, read)


def unit_slots(schedule: Schedule, units_by_stage: Sequence[Sequence["Unit"]]) -> dict["Kind", Slots]:
    """Slots for what each kind of unit keeps; units of a kind have residuals of the same shapes."""
    kinds = sorted({unit.kind for units in units_by_stage for unit in units})
    return {
        kind: visit_slots(schedule, [sum(unit.kind == kind for unit in units) for units in units_by_stage])
        for kind in kinds
    }


def _values(num_microbatches: int, slots_by_stage: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Microbatch, stage, and number within its visit, of every value: three arrays [N]."""
    stage_V = np.repeat(np.arange(len(slots_by_stage)), slots_by_stage)
    value_V = np.concatenate([np.arange(count) for count in slots_by_stage])
    microbatch_N = np.repeat(np.arange(num_microbatches), len(stage_V))
    return microbatch_N, np.tile(stage_V, num_microbatches), np.tile(value_V, num_microbatches)


def _left_edge(first_N: np.ndarray, last_N: np.ndarray) -> tuple[np.ndarray, int]:
    """A slot for each value that is alive in the ticks first to last, both included; and how many slots there are.

    In the order of their first ticks, values take a slot that is free, and a new one only where none is.
    """
    slot_N = np.empty(len(first_N), np.int32)
    num_slots, free = 0, list[int]()
    alive: list[tuple[int, int]] = []  # heap of (last tick, slot)
    for n in np.argsort(first_N, kind="stable").tolist():
        while alive and alive[0][0] < first_N[n]:
            free.append(heapq.heappop(alive)[1])
        if not free:
            free.append(num_slots)
            num_slots += 1
        slot_N[n] = free.pop()
        heapq.heappush(alive, (int(last_N[n]), int(slot_N[n])))
    return slot_N, num_slots
