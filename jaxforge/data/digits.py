"""The demo's data: questions about images of handwritten digits, with held-out digits for evaluation."""

import dataclasses
import functools
from typing import NamedTuple

import numpy as np

from jaxforge.config.errors import ConfigError
from jaxforge.config.schema import Config, EncoderConfig
from jaxforge.data.digit_images import CHANCES, Layout, digit_images, draw, largest_image, lay_out
from jaxforge.data.packing import Document, pack_row
from jaxforge.data.patches import patchify
from jaxforge.data.rows import RowFormat
from jaxforge.data.tokenizer import ByteTokenizer

# Two wordings each, and short: a byte is a token.
QUESTIONS = {
    "read": ("read", "digits?"),
    "count": ("count", "how many?"),
    "largest": ("largest", "max?"),
}
# Reading asks most of the model and teaches it most.
KINDS = ("read", "read", "count", "largest")
SPLITS = ("train", "eval")
# Held-out samples are the same whatever the run's seed, so that runs can be compared.
EVAL_SEED = 0
# Samples that may be passed over to fill the end of a row; each favours short samples a little.
TRIES = 3
# Mean and standard deviation of the training images' pixels, from 0 (ink) to 1 (paper).
PIXEL_MEAN, PIXEL_STD = 0.89, 0.23
_BLOCK = 16


@dataclasses.dataclass(frozen=True)
class Sample:
    """An image [H, W] uint8 (0 is black), the kind of question, its text, and the true answer."""

    image: np.ndarray
    kind: str
    question: str
    answer: str


@dataclasses.dataclass(frozen=True)
class EvalDocument:
    """Where a held-out sample lies in the evaluation's rows.

    Attributes:
      row: its row.
      prompt_end: position in the row of the last token of the prompt, whose prediction is the answer's first token.
        The document has digits_max + 1 tokens after it: room for the longest answer and its end token.
      answer: the true answer.
      kind: the kind of question.
      sample_index: `DigitsSource.sample(sample_index)` is the sample.
    """

    row: int
    prompt_end: int
    answer: str
    kind: str
    sample_index: int


class DigitsSource:
    """Rows of packed samples, and the samples themselves, as pure functions of (train.seed, split, index).

    "train" composes images of its own four fifths of the digits, varied in shape and ink; "eval" composes them of the
    rest as they are.  Raises ConfigError when the model can't read the samples or the largest may not fit a row.
    """

    def __init__(self, config: Config, split: str):
        if split not in SPLITS:
            raise ValueError(f"split={split!r} is not one of {', '.join(SPLITS)}")
        self.tokenizer = ByteTokenizer()
        self._encoder = checked_encoder(config)
        self.split = split
        self.row_format = RowFormat.from_config(config)
        self._seed = config.train.seed if split == "train" else EVAL_SEED
        self._digits_max = config.data.digits_max
        self._eval_samples = config.data.eval_samples
        self._digits = digit_images(split)
        self._factor = self._encoder.patch_size * self._encoder.spatial_merge_size
        # a row is planned to know its cost, and again to be made
        self._row_plans = functools.lru_cache(maxsize=256)(self._find_plans)

    def sample(self, index: int) -> Sample:
        """One sample."""
        return self._draw(self._plan(index))

    def document(self, sample: Sample, room: int = 0) -> Document:
        """A sample as question, image, answer and end token; the loss counts the last two.

        The question comes first, so that what is seen can be read for it.  Padding tokens follow until the answer has
        at least `room` tokens.
        """
        tokenizer = self.tokenizer
        pixels_HW1 = (sample.image[..., None] / np.float32(255) - np.float32(PIXEL_MEAN)) / np.float32(PIXEL_STD)
        image = patchify(np.repeat(pixels_HW1, self._encoder.in_channels, axis=-1), self._encoder)
        question = [tokenizer.question, *tokenizer.encode(sample.question)]
        visual = [tokenizer.image] * (len(image.patches_PC) // self._encoder.spatial_merge_size**2)
        answer = [*tokenizer.encode(sample.answer), tokenizer.end]
        padding = [tokenizer.pad] * (room - len(answer))
        tokens = np.array([*question, *visual, tokenizer.answer, *answer, *padding], np.int32)
        prompt = len(question) + len(visual) + 1
        place = np.arange(len(tokens))
        mask = (place >= prompt) & (place < prompt + len(answer))
        return Document(tokens, mask, tokens == tokenizer.image, (image,))

    def row(self, index: int) -> dict[str, np.ndarray]:
        """Row `index`: samples from `index * seq_length` on, until no more fit; no two rows share a sample."""
        return pack_row([self.document(self._draw(plan)) for plan in self._row_plans(index)], self.row_format)

    def costs(self, first: int, count: int) -> np.ndarray:
        """Patches of the rows `first` to `first + count - 1`: [count] float64; of tokens all have about as many."""
        rows = [self._row_plans(index) for index in range(first, first + count)]
        return np.array([sum(self._size(plan)[1] for plan in plans) for plans in rows], np.float64)

    def _find_plans(self, index: int) -> tuple["_Plan", ...]:
        """The samples of row `index`, before any is drawn."""
        first = index * self.row_format.seq_length
        plans: list[_Plan] = []
        tokens = patches = passed = 0
        for number in range(first, first + self.row_format.seq_length):
            plan = self._plan(number)
            more_tokens, more_patches = self._size(plan)
            if self.row_format.holds(tokens + more_tokens, patches + more_patches):
                plans.append(plan)
                tokens, patches = tokens + more_tokens, patches + more_patches
            elif passed == TRIES:
                break
            else:
                passed += 1
        return tuple(plans)

    def eval_rows(self, rows_multiple: int = 1) -> tuple[list[dict[str, np.ndarray]], list[EvalDocument]]:
        """data.eval_samples samples packed into rows, and where each lies.

        The rows hold the true answers, so the same rows give the loss; generation writes over them.  Empty rows
        (all padding) make their number a multiple of `rows_multiple`.
        """
        packed: list[list[Document]] = [[]]
        places: list[EvalDocument] = []
        start = patches = 0
        for index in range(self._eval_samples):
            sample = self.sample(index)
            document = self.document(sample, room=self._digits_max + 1)
            if not self.row_format.holds(start + len(document.tokens), patches + document.num_patches):
                packed.append([])
                start = patches = 0
            prompt_end = start + int(np.argmax(document.loss_mask)) - 1
            places.append(EvalDocument(len(packed) - 1, prompt_end, sample.answer, sample.kind, index))
            packed[-1].append(document)
            start, patches = start + len(document.tokens), patches + document.num_patches
        packed.extend([] for _ in range(-len(packed) % rows_multiple))
        return [pack_row(documents, self.row_format) for documents in packed], places

    def _plan(self, index: int) -> "_Plan":
        block, place = divmod(index, _BLOCK)
        (chances, *layout_chances) = _chances(self._seed, self.split, block, self._digits_max)[place].tolist()
        # a cell is a visual token, so a digit is never spread over several: a small model learns that in minutes
        layout = lay_out(layout_chances, self._digits, self._digits_max, self._factor)
        kind = KINDS[int(chances[0] * len(KINDS))]
        question = QUESTIONS[kind][int(chances[1] * len(QUESTIONS[kind]))]
        shown = "".join(self._digits.labels[box.number] for box in layout.boxes)
        answer = {"read": shown, "count": str(len(shown)), "largest": max(shown)}[kind]
        return _Plan(layout, kind, question, answer)

    def _draw(self, plan: "_Plan") -> Sample:
        image = draw(plan.layout, self._digits, augment=self.split == "train")
        return Sample(image, plan.kind, plan.question, plan.answer)

    def _size(self, plan: "_Plan") -> tuple[int, int]:
        """Tokens and patches of the document of a plan, without drawing it."""
        squares = plan.layout.height * plan.layout.width // self._factor**2
        text = len(self.tokenizer.encode(plan.question)) + len(self.tokenizer.encode(plan.answer))
        return squares + text + 3, squares * self._encoder.spatial_merge_size**2


@functools.lru_cache(maxsize=256)
def _chances(seed: int, split: str, block: int, digits_max: int) -> np.ndarray:
    """Random numbers in [0, 1) of a block of samples: [_BLOCK, 2 + digits_max, CHANCES] float64.

    They come in blocks because a generator takes longer to start than to draw a sample's numbers.
    """
    rng = np.random.default_rng((seed, SPLITS.index(split), block))
    return rng.random((_BLOCK, 2 + digits_max, CHANCES))


class _Plan(NamedTuple):
    """A sample before its image is drawn."""

    layout: Layout
    kind: str
    question: str
    answer: str


def checked_encoder(config: Config) -> EncoderConfig:
    """The model's encoder, once it is sure that every sample fits the model and a row.

    Raises:
      ConfigError: where one doesn't.
    """
    encoder, data, tokenizer = config.model.encoder, config.data, ByteTokenizer()
    if encoder is None:
        raise ConfigError("data.source=digits shows images, model.encoder=None reads none; give the model an encoder")
    if encoder.in_channels not in (1, 3):
        raise ConfigError(
            f"model.encoder.in_channels={encoder.in_channels} does not suit data.source=digits; use 1 (grey) or 3"
        )
    if config.model.decoder.vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"model.decoder.vocab_size={config.model.decoder.vocab_size} is smaller than the byte tokenizer's"
            f" vocabulary; use {tokenizer.vocab_size} or more with data.source=digits"
        )
    if data.digits_max < 1 or data.eval_samples < 1:
        raise ConfigError(
            f"data.digits_max={data.digits_max} and data.eval_samples={data.eval_samples} must be at least 1"
        )
    height, width = largest_image(data.digits_max, encoder.patch_size * encoder.spatial_merge_size)
    patches = height * width // encoder.patch_size**2
    wording = max(len(tokenizer.encode(wording)) for pair in QUESTIONS.values() for wording in pair)
    tokens = patches // encoder.spatial_merge_size**2 + 1 + wording + 1 + data.digits_max + 1
    available = RowFormat.from_config(config)
    largest = f"data.digits_max={data.digits_max} makes samples of up to"
    if tokens > available.seq_length:
        raise ConfigError(
            f"{largest} {tokens} tokens, train.seq_length={available.seq_length}; use train.seq_length={tokens} or"
            " more, or fewer digits"
        )
    if patches > available.max_patches:
        raise ConfigError(
            f"{largest} {patches} patches, data.max_patches_per_row={available.max_patches}; use {patches} or more,"
            " or fewer digits"
        )
    if height * width > encoder.image_size[0] * encoder.image_size[1]:
        raise ConfigError(
            f"{largest} {height}x{width} pixels, more than model.encoder.image_size={encoder.image_size}; use a larger"
            " image_size, or fewer digits"
        )
    return encoder
