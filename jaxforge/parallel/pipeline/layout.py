"""Which stage of the pipeline holds which layers, and where they lie among the parameters of its rank.

The decoder is cut into S = pipeline_size x virtual_stages stages, in the order of its layers.  Stage s is chunk
s // pipeline_size of rank s % pipeline_size, as in interleaved 1F1B (Narayanan et al. 2021, arXiv:2104.04473, section
2.2).  A layout comes from a string (`layout_string.py`) or from numbers (`balance.py`).
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxforge.words import counted


class Stage(NamedTuple):
    """What one stage holds.  Decoder layers are `first_layer` and following, counted over the whole decoder."""

    first_layer: int
    num_layers: int
    num_mtp_layers: int
    has_embedding: bool
    has_loss: bool

    @property
    def is_empty(self) -> bool:
        return not (self.num_layers or self.num_mtp_layers or self.has_embedding or self.has_loss)


@dataclasses.dataclass(frozen=True)
class PipelineLayout:
    """Where every layer lies.  Two layouts that place everything alike are equal, whatever they were made from.

    The embedding lies in the first stage and the loss in the last.  The layers of a rank fill its slots, chunk by
    chunk: slot j of rank r is row [r, j] of parameters that are stacked [ranks, slots_per_rank, ...].  A rank with
    fewer layers than the fullest one has unused slots at its end.  MTP layers are numbered after the decoder's, and
    have slots as these have.

    Attributes:
      pipeline_size: ranks.
      num_layers_by_stage: decoder layers of each of the S stages; S is a multiple of `pipeline_size`.
      num_mtp_layers_by_stage: MTP layers of each stage.
    """

    pipeline_size: int
    num_layers_by_stage: tuple[int, ...]
    num_mtp_layers_by_stage: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        return len(self.num_layers_by_stage)

    @property
    def virtual_stages(self) -> int:
        """Chunks of each rank."""
        return self.num_stages // self.pipeline_size

    @property
    def num_layers(self) -> int:
        """Decoder layers of all stages together."""
        return sum(self.num_layers_by_stage)

    @functools.cached_property
    def stages(self) -> tuple[Stage, ...]:
        """What each stage holds."""
        first = itertools.accumulate(self.num_layers_by_stage, initial=0)
        counts = zip(first, self.num_layers_by_stage, self.num_mtp_layers_by_stage, strict=False)
        last = self.num_stages - 1
        return tuple(Stage(*count, has_embedding=s == 0, has_loss=s == last) for s, count in enumerate(counts))

    @property
    def mtp_stage(self) -> int | None:
        """The number of the stage that holds the MTP layers; None where there are none."""
        return next((number for number, count in enumerate(self.num_mtp_layers_by_stage) if count), None)

    def chunks_of_rank(self, rank: int) -> tuple[Stage, ...]:
        """The stages of a rank, chunk 0 first."""
        return self.stages[rank :: self.pipeline_size]

    def layers_of_rank(self, rank: int) -> tuple[int, ...]:
        """Layers of a rank in the order of its slots."""
        return tuple(layer for chunk in self.chunks_of_rank(rank) for layer in self._layers_of_chunk(chunk))

    def _layers_of_chunk(self, chunk: Stage) -> list[int]:
        """Its decoder layers, then its MTP layers, all of which one stage holds."""
        own = range(chunk.first_layer, chunk.first_layer + chunk.num_layers)
        return [*own, *range(self.num_layers, self.num_layers + chunk.num_mtp_layers)]

    @functools.cached_property
    def slots_per_rank(self) -> int:
        """Layers of the fullest rank."""
        return max(len(self.layers_of_rank(rank)) for rank in range(self.pipeline_size))

    @functools.cached_property
    def chunk_table(self) -> np.ndarray:
        """First slot and number of decoder layers of each chunk: [ranks, chunks, 2] int32."""
        num_layers_RV = np.array(self.num_layers_by_stage, np.int32).reshape(self.virtual_stages, self.pipeline_size).T
        return _read_only(np.stack([self.places()[1], num_layers_RV], axis=2))

    @functools.cached_property
    def layer_order(self) -> np.ndarray:
        """The layer in each slot, -1 in an unused one: [ranks, slots_per_rank] int32."""
        return _read_only(self.places()[0])

    def places(self, has: Sequence[bool] | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Where the layers that `has` names lie in a stack of these alone, by default of all layers.

        Returns:
          What lies in each place, a number among these layers or -1, [ranks, places of the fullest rank] int32; and the
          first place of each chunk, [ranks, chunks] int32.
        """
        has = [True] * (self.num_layers + sum(self.num_mtp_layers_by_stage)) if has is None else has
        number = np.cumsum(has) - 1
        ranks, first_RV = [], []
        for rank in range(self.pipeline_size):
            chunks = [
                [int(number[layer]) for layer in self._layers_of_chunk(chunk) if has[layer]]
                for chunk in self.chunks_of_rank(rank)
            ]
            ranks.append([layer for chunk in chunks for layer in chunk])
            first_RV.append(np.cumsum([0, *map(len, chunks)])[:-1])
        fullest = max(map(len, ranks))
        order = np.array([[*layers, *[-1] * (fullest - len(layers))] for layers in ranks], np.int32)
        return order, np.array(first_RV, np.int32)

    def describe(self) -> str:
        """What each rank holds, chunks divided by `|`: a line per rank, for a person to read."""
        mtp = sum(self.num_mtp_layers_by_stage)
        lines = [
            counted(self.num_layers, "decoder layer")
            + (f" and {counted(mtp, 'MTP layer')}" if mtp else "")
            + f" over {counted(self.pipeline_size, 'pipeline rank')}"
            + (f", {self.virtual_stages} chunks in each" if self.virtual_stages > 1 else "")
        ]
        width = len(str(self.pipeline_size - 1))
        for rank in range(self.pipeline_size):
            chunks = " | ".join(_describe_stage(stage) for stage in self.chunks_of_rank(rank))
            lines.append(f"rank {rank:>{width}}: {chunks}")
        return "\n".join(lines)

    def to_string(self) -> str:
        """The shortest usual layout string that `parse_layout` reads as this layout."""
        texts = [
            "E" * stage.has_embedding + _repeated("t", stage.num_layers) + _repeated("m", stage.num_mtp_layers)
            + "L" * stage.has_loss
            for stage in self.stages
        ]  # fmt: skip
        parts = []
        runs = [(text, len(list(run))) for text, run in itertools.groupby(texts)]
        for (text, length), following in zip(runs, [*runs[1:], None], strict=True):
            if following is None:
                parts.append(text)  # the stage with the loss, which no bar ends
            elif following[0] == "" and text:
                # the bar before an empty stage stands outside of a repeat, so that || can be seen
                parts.append(_repeated_stage(text, length - 1) + text + "|")
            else:
                parts.append(_repeated_stage(text, length))
        return "".join(parts)


def _repeated(symbol: str, count: int) -> str:
    return f"{symbol}*{count}" if count > 2 else symbol * count


def _repeated_stage(text: str, count: int) -> str:
    """`count` stages with their bars.  Empty ones are always written out."""
    return f"({text}|)*{count}" if count > 2 and text else f"{text}|" * count


def _describe_stage(stage: Stage) -> str:
    first, last = stage.first_layer, stage.first_layer + stage.num_layers - 1
    layers = f"layer {first}" if first == last else f"layers {first}-{last}"
    held = [
        "embedding" if stage.has_embedding else "",
        layers if stage.num_layers else "",
        counted(stage.num_mtp_layers, "MTP layer") if stage.num_mtp_layers else "",
        "loss" if stage.has_loss else "",
    ]
    return ", ".join(part for part in held if part) or "nothing"


def _read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array
