"""Evaluation on held-out samples: loss, and where the source has answers, those generated greedily and compared."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxforge.data.batches import Batch, BatchLayout
from jaxforge.data.digits import DigitsSource, EvalDocument
from jaxforge.data.files_source import FilesSource
from jaxforge.data.packing import pack_row
from jaxforge.training.program import Program


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What an evaluation found.

    Attributes:
      loss: mean cross-entropy of the true answers, in nats per target token.
      target_tokens: how many.
      exact_match: fraction of generated answers that equal the truth; None where none are generated.
      answers: of each document, in the order of `documents`.
    """

    loss: float
    target_tokens: int
    exact_match: float | None
    documents: Sequence[EvalDocument]
    answers: Sequence[str]

    def row(self, step: int) -> dict[str, Any]:
        """A row of metrics.jsonl."""
        row = {"step": step, "eval/loss": self.loss, "eval/target_tokens": self.target_tokens}
        return row if self.exact_match is None else row | {"eval/exact_match": self.exact_match}

    def by_kind(self) -> dict[str, tuple[int, int]]:
        """(right answers, documents) of each kind of question."""
        counts: dict[str, tuple[int, int]] = {}
        for document, answer in zip(self.documents, self.answers, strict=True):
            right, total = counts.get(document.kind, (0, 0))
            counts[document.kind] = (right + (answer == document.answer), total + 1)
        return counts


def make_evaluator(
    source: DigitsSource | FilesSource | None, program: Program, layout: BatchLayout
) -> "Evaluator | LossEvaluator | None":
    """What evaluates a source, in microbatches like those of training; None where there is none."""
    if isinstance(source, FilesSource):
        return LossEvaluator(source, program, layout)
    return Evaluator(source, program, layout) if source is not None else None


class LossEvaluator:
    """Reads the evaluation's rows a microbatch at a time, and scores them; nothing is generated."""

    def __init__(self, source: FilesSource, program: Program, layout: BatchLayout):
        self.source = source
        self._program, self._layout = program, dataclasses.replace(layout, microbatches=1)

    def __call__(self, state: Any) -> Evaluation:
        loss_sum, target_tokens = 0.0, 0
        number, size = len(self.source.epoch_plan(0)), self._layout.rows
        empty = pack_row([], self.source.row_format)
        for first in range(0, number, size):
            # every process reads all rows: they are few, and each needs its own share alone
            rows = [self.source.row(index) for index in range(first, min(first + size, number))]
            rows += [empty] * (size - len(rows))
            batch = self._layout.batch({key: np.stack([row[key] for row in rows])[None] for key in empty})
            one_loss, one_count, _ = self._program.score(state, batch)
            loss_sum, target_tokens = loss_sum + float(one_loss), target_tokens + int(one_count)
        return Evaluation(loss_sum / max(target_tokens, 1), target_tokens, None, [], [])


class Evaluator:
    """Holds the evaluation set on the mesh as one batch, so scoring compiles once."""

    def __init__(self, source: DigitsSource, program: Program, layout: BatchLayout):
        self.source = source
        packed, self._documents = source.eval_rows(rows_multiple=layout.rows)
        self._program = program
        self._tokenizer = source.tokenizer
        self._layout = dataclasses.replace(layout, microbatches=len(packed) // layout.rows)
        arrays = {key: np.stack([row[key] for row in packed]) for key in packed[0]}
        self._tokens_RS = arrays["tokens"]
        self._batch = self._place(arrays)

    def __call__(self, state: Any) -> Evaluation:
        """Scores the true answers, then generates every document's answer, all documents of a row at once.

        A document's answer ends with its end token, or fills the room that the row has for it.  What follows a token in
        its row can't change its prediction, so the first pass already predicts the first token of every answer.
        """
        loss_sum, target_tokens, predicted = self._program.score(state, self._batch)
        rows = np.array([document.row for document in self._documents])
        ends = np.array([document.prompt_end for document in self._documents])
        room = self._room()
        tokens_RS = self._tokens_RS.copy()
        generated: list[np.ndarray] = []
        for length in range(room):
            if length:
                _, _, predicted = self._program.score(state, self._batch | self._place({"tokens": tokens_RS}))
            following = np.asarray(predicted).reshape(tokens_RS.shape)[rows, ends + length]
            generated.append(following)
            tokens_RS[rows, ends + length + 1] = following
            if np.all(np.any(np.stack(generated) == self._tokenizer.end, axis=0)):
                break
        answers = [self._text(tokens) for tokens in np.stack(generated, axis=1)]
        right = [answer == document.answer for answer, document in zip(answers, self._documents, strict=True)]
        count = int(target_tokens)
        return Evaluation(float(loss_sum) / max(count, 1), count, float(np.mean(right)), self._documents, answers)

    def _room(self) -> int:
        """Tokens that every document has room for after its prompt."""
        return max(len(document.answer) for document in self._documents) + 1

    def _text(self, tokens: np.ndarray) -> str:
        ends = np.flatnonzero(tokens == self._tokenizer.end)
        return self._tokenizer.decode(tokens[: ends[0]] if ends.size else tokens)

    def _place(self, arrays: dict[str, np.ndarray]) -> Batch:
        """Rows [R, ...] as a batch on the mesh."""
        leading = (self._layout.microbatches, self._layout.rows)
        return self._layout.batch({key: array.reshape(*leading, *array.shape[1:]) for key, array in arrays.items()})
