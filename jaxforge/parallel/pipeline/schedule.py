"""1F1B and interleaved 1F1B as tables: what each rank computes in each tick.

A rank holds `virtual_stages` chunks of the model; stage s is chunk s // pipeline_size of rank s % pipeline_size.  All
ranks move in lockstep.  In a tick a rank may compute one chunk forward and then one chunk backward, and between two
ticks activations move to the next rank and gradients to the previous one, each by one permute.  So

    a forward in tick t needs what the stage before it computed in a tick before t
    a backward in tick t needs what the stage after it computed in a tick before t;
        the last stage's needs its own forward, which may be in the same tick

Microbatches pass in groups of `pipeline_size`: a group passes chunk 0 of every rank, then chunk 1, and so on, and comes
back with the chunks reversed; then the next group follows (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).  In
lockstep this order needs no search.  Microbatch m enters stage 0 in tick

    enter(m) = (m // pipeline_size) x num_stages + m % pipeline_size

moves on by one stage in each tick, turns round in the last stage in one tick, and moves back by one stage in each tick:

    forward of stage s    in tick enter(m) + s
    backward of stage s   in tick enter(m) + 2 (num_stages - 1) - s

No rank is asked for two forwards, or two backwards, in one tick: microbatches of one place in their groups enter
num_stages ticks apart, a rank computes one of them in every pipeline_size-th of these ticks, and those of other places
in the ticks between.

Nothing ever waits between stages: activations and gradients are used in the tick in which they arrive, and the gradient
of the loss in the tick in which it is computed.  So there are no inboxes; only what a forward keeps for its backward
needs memory (see `buffers.py`).
"""

import dataclasses
import functools

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """When every microbatch passes every stage; M microbatches, S = pipeline_size x virtual_stages stages.

    Attributes:
      forward_tick_MS, backward_tick_MS: [M, S] int32, the tick in which a microbatch passes a stage.
    """

    pipeline_size: int
    virtual_stages: int
    num_microbatches: int
    forward_tick_MS: np.ndarray
    backward_tick_MS: np.ndarray

    @property
    def num_stages(self) -> int:
        return self.pipeline_size * self.virtual_stages

    @functools.cached_property
    def num_ticks(self) -> int:
        return int(self.backward_tick_MS.max()) + 1

    @functools.cached_property
    def forward(self) -> np.ndarray:
        """(microbatch, chunk) that a rank computes forward, (-1, -1) where none: [ticks, ranks, 2] int32."""
        return self._by_tick(self.forward_tick_MS)

    @functools.cached_property
    def backward(self) -> np.ndarray:
        """(microbatch, chunk) that a rank computes backward, (-1, -1) where none: [ticks, ranks, 2] int32."""
        return self._by_tick(self.backward_tick_MS)

    @functools.cached_property
    def phases(self) -> tuple[slice, slice, slice]:
        """Ticks with forwards only, with both, with backwards only: one after the other, all ticks together.

        With a single stage the first and the last are empty; otherwise none is.  A forward-only pass (evaluation) is
        the forwards of the first two.
        """
        first_backward = int(self.backward_tick_MS.min())
        after_forwards = int(self.forward_tick_MS.max()) + 1
        return slice(0, first_backward), slice(first_backward, after_forwards), slice(after_forwards, self.num_ticks)

    @property
    def forward_ticks(self) -> int:
        """Ticks from the first forward to the last, and as many from the first backward to the last."""
        return self.phases[1].stop

    @property
    def bubble_fraction(self) -> float:
        """Share of the ticks with forwards in which a rank has none; the same for backwards, so of the whole step.

        (p - 1) / (M v + p - 1) for p ranks with v chunks where p divides M, whatever a backward costs.
        """
        return 1 - self.num_microbatches * self.virtual_stages / self.forward_ticks

    @functools.cached_property
    def max_chunks_in_flight(self) -> np.ndarray:
        """The most chunks of each rank that are between their forward and their backward at a time: [ranks] int64.

        At most (v + 1) p - 1 - 2 r on rank r of p with v chunks, however many microbatches there are.  For v > 1 that
        is Megatron's count.  For v = 1 it is nearly twice the p - r of 1F1B without lockstep: here a value moves on by
        one rank in the time of a forward and a backward.  A chunk counts in the ticks of both, as a tick's forward
        comes before its backward.
        """
        begun_TR = np.cumsum(self.forward[..., 0] >= 0, axis=0)
        ended_TR = np.cumsum(self.backward[..., 0] >= 0, axis=0)
        ended_before_TR = np.pad(ended_TR, ((1, 0), (0, 0)))[:-1]
        return (begun_TR - ended_before_TR).max(axis=0)

    def _by_tick(self, tick_MS: np.ndarray) -> np.ndarray:
        table = np.full((self.num_ticks, self.pipeline_size, 2), -1, np.int32)
        microbatch_MS, stage_MS = np.indices(tick_MS.shape, np.int32)
        chunk_MS, rank_MS = np.divmod(stage_MS, self.pipeline_size)
        table[tick_MS, rank_MS] = np.stack([microbatch_MS, chunk_MS], axis=-1)
        table.flags.writeable = False
        return table


def make_schedule(pipeline_size: int, virtual_stages: int, num_microbatches: int) -> Schedule:
    """The schedule of one optimizer step.  All arguments are at least 1.

    Where `pipeline_size` divides `num_microbatches` it has the ideal number of ticks with forwards, M x virtual_stages
    + pipeline_size - 1.  A last group of k < pipeline_size microbatches leaves gaps between its passes: it adds
    (virtual_stages - 1) x (pipeline_size - k) ticks with forwards, and as many with backwards.
    """
    num_stages = pipeline_size * virtual_stages
    group_M, place_M = np.divmod(np.arange(num_microbatches, dtype=np.int32), pipeline_size)
    enter_M1 = (group_M * num_stages + place_M)[:, None]
    stage_S = np.arange(num_stages, dtype=np.int32)
    return Schedule(
        pipeline_size,
        virtual_stages,
        num_microbatches,
        forward_tick_MS=enter_M1 + stage_S,
        backward_tick_MS=enter_M1 + 2 * (num_stages - 1) - stage_S,
    )
