"""From a sample to documents: the tokens, which of them are learnt, and where the media are among them."""

import dataclasses
import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from jaxforge.config.errors import ConfigError
from jaxforge.config.hf_config import read_config_json
from jaxforge.config.schema import Config
from jaxforge.data.conversation import Conversation, Media, Message, PlainText, Sample, SampleError
from jaxforge.data.hf_tokenizer import HFTokenizer, choose_template
from jaxforge.data.packing import Document
from jaxforge.data.patches import Patches
from jaxforge.data.rows import RowFormat
from jaxforge.data.templates import ChatTemplate, Piece

VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
PADS = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
# Two noncharacters of Unicode around a control token that a sample's own text spells out.
_LITERAL_START, _LITERAL_END = "\ufdd0", "\ufdd1"
_LITERAL = re.compile(f"{_LITERAL_START}([^{_LITERAL_END}]*){_LITERAL_END}")
_NONCHARACTER = re.compile("[\ufdd0-\ufdef]")
# Part of `settings`: changes when this file gives other tokens for the same settings.
_VERSION = 1


class MediaShape(Protocol):
    """What the tokens of an image or video depend on.

    Attributes:
      grids: (frames, patches down, patches across) of each run of consecutive visual tokens.
      timestamps: seconds of each run, where they stand in the text; None where they don't.
      num_patches: patches of all runs.
    """

    @property
    def grids(self) -> tuple[tuple[int, int, int], ...]: ...

    @property
    def timestamps(self) -> tuple[float, ...] | None: ...

    @property
    def num_patches(self) -> int: ...


class MediaReader(Protocol):
    """Reads images and videos; both methods raise SampleError.

    Attributes:
      settings: stable text of all that shapes depend on besides the file.
    """

    @property
    def settings(self) -> str: ...

    def shape(self, media: Media, root: Path) -> MediaShape:
        """From the file's header alone; paths start from `root`."""
        ...

    def read(self, media: Media, root: Path) -> tuple[Patches, ...]:
        """The pixels, one Patches for each grid of `shape`."""
        ...


class SampleEncoder:
    """Makes documents of samples.

    A conversation is one document.  Its text is encoded in stretches that end where targets begin or end, so that the
    tokens of a prompt are those that the model sees when it is asked.  An image is `<|vision_start|>`, a visual token
    for each merged square of patches, `<|vision_end|>`, as the processors of the Qwen VL models write it; so is each
    run of a video, after `<1.5 seconds>` where its time stands in the text (Qwen3-VL, arXiv:2511.21631).
    A plain text is one document for each row that it fills; all its tokens are targets.

    A text that spells out a token which gives the conversation its form, or a vision token, is encoded as the
    characters it has: no sample can end a turn by its words.  Other special tokens in a sample's text, such as those
    around boxes, stay tokens, and so do all those of a plain text, which may hold a rendered conversation.

    Where the tokenizer puts a beginning-of-text token before texts, a document begins with exactly one, whatever the
    template wrote; the later rows of a split text begin with none.

    Attributes:
      settings: stable text of all that lengths and tokens depend on besides the sample.
    """

    def __init__(
        self,
        tokenizer: HFTokenizer,
        template: ChatTemplate,
        reader: MediaReader | None,
        row_format: RowFormat,
        overlong: str = "drop",
    ):
        """Joins the parts.

        Args:
          tokenizer: encodes text.
          template: renders conversations.
          reader: reads images and videos; None for a language model, which refuses samples that have some.
          row_format: the size of a row, and the squares of patches that become one visual token.
          overlong: "drop" or "truncate", what happens to a conversation longer than a row.

        Raises ConfigError where there is a reader and the tokenizer lacks a vision token.
        """
        self._tokenizer, self._template, self._reader = tokenizer, template, reader
        self._row_format, self._truncates = row_format, overlong == "truncate"
        vision = (VISION_START, VISION_END, *PADS.values())
        lacking = [token for token in vision if tokenizer.token_id(token) is None]
        if reader is not None and lacking:
            raise ConfigError(
                f"data.tokenizer={tokenizer.folder} has no {lacking[0]}, which a model with an encoder needs; use the"
                " tokenizer of a Qwen VL checkpoint, or add the token to it"
            )
        ends = (tokenizer.named_tokens.get("bos_token"), tokenizer.named_tokens.get("eos_token"))
        control = {token for token in (*template.control_tokens, *vision, *ends) if token}
        known = sorted(token for token in control if tokenizer.token_id(token) is not None)
        longest_first = sorted(known, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self.settings = json.dumps(
            {
                "version": _VERSION,
                "tokenizer": tokenizer.fingerprint,
                "template": template.settings,
                "media": None if reader is None else reader.settings,
                "row": dataclasses.asdict(row_format),
                "overlong": overlong,
            },
            sort_keys=True,
        )

    @classmethod
    def from_config(cls, config: Config, reader: MediaReader | None) -> "SampleEncoder":
        """The encoder of a run.

        Raises ConfigError where no tokenizer is named or it can't be used, the model's vocabulary is too small for
        it, the checkpoint gives the vision tokens other ids, or the chat template doesn't fit it.
        """
        folder = config.data.tokenizer or config.checkpoint.init_from_hf
        if folder is None:
            raise ConfigError(
                "data.tokenizer=None and checkpoint.init_from_hf=None: files need a tokenizer; set data.tokenizer to a"
                " Hugging Face folder that has tokenizer.json"
            )
        tokenizer = HFTokenizer(folder)
        if tokenizer.vocab_size > config.model.decoder.vocab_size:
            raise ConfigError(
                f"model.decoder.vocab_size={config.model.decoder.vocab_size} is smaller than the vocabulary of"
                f" data.tokenizer={folder}, {tokenizer.vocab_size} tokens; use model.decoder.vocab_size="
                f"{tokenizer.vocab_size} or more"
            )
        if reader is not None and config.checkpoint.init_from_hf is not None:
            _check_vision_ids(tokenizer, Path(config.checkpoint.init_from_hf) / "config.json")
        template = choose_template(config.data.chat_template, tokenizer, config.data.system)
        return cls(tokenizer, template, reader, RowFormat.from_config(config), config.data.overlong)

    def sizes(self, sample: Sample, root: Path) -> list[tuple[int, int]]:
        """(tokens, patches) of each document of `documents`, without decoding pixels.  Raises SampleError."""
        return [(len(layout.tokens), layout.num_patches) for layout in self._layouts(sample, root)]

    def documents(self, sample: Sample, root: Path) -> list[Document]:
        """The documents of a sample: one of a conversation, one for each row that a plain text fills.

        Args:
          sample: the sample.
          root: the folder that the paths of its media start from.

        Raises SampleError: "too long" where it fits no row, "no target" where nothing is learnt, "bad format" where
        the template refuses it or the model reads no media; and what reading the media raises.
        """
        return [self._document(layout, root) for layout in self._layouts(sample, root)]

    def _document(self, layout: "_Layout", root: Path) -> Document:
        images: list[Patches] = []
        for media, shape in layout.media:
            assert self._reader is not None
            runs = self._reader.read(media, root)
            expected = [frames * down * across for frames, down, across in shape.grids]
            if [len(run.patches_PC) for run in runs] != expected:
                raise SampleError("corrupt media", f"{media.kind} whose pixels have another size than its header says")
            images += runs
        return Document(
            tokens=np.array(layout.tokens, np.int32),
            loss_mask=np.array(layout.is_target, bool),
            visual=np.array(layout.is_visual, bool),
            images=tuple(images),
        )

    def _layouts(self, sample: Sample, root: Path) -> list["_Layout"]:
        """All that a sample's documents are but the pixels."""
        if isinstance(sample, PlainText):
            return self._split(self._plain_text(sample))
        layout = self._conversation(sample, root)
        if not layout.num_targets:
            raise SampleError("no target", "no token of the conversation is a target; expected an answer with loss")
        return [self._fitted(layout)]

    def _plain_text(self, sample: PlainText) -> "_Layout":
        layout = _Layout()
        layout.add(self._tokenizer.encode(sample.text), is_target=True)
        self._settle_bos(layout)
        eos = self._tokenizer.eos
        if eos is not None and layout.tokens[-1:] != [eos]:
            layout.add([eos], is_target=True)
        return layout

    def _split(self, layout: "_Layout") -> list["_Layout"]:
        """Rows of a plain text.  A last row of one token has nothing to predict and is left out."""
        length = self._row_format.seq_length
        rows = [layout.part(start, start + length) for start in range(0, len(layout.tokens), length)]
        rows = [row for row in rows if row.num_targets]
        if not rows:
            raise SampleError("no target", f"a text of {len(layout.tokens)} tokens; expected two or more")
        return rows

    def _conversation(self, sample: Conversation, root: Path) -> "_Layout":
        layout, items = _Layout(), list[Piece | _Run]()
        for item in self._template.render(self._protected(sample)):
            if isinstance(item, Piece):
                items.append(item)
            else:
                shape = self._shape(item, root)
                layout.media.append((item, shape))
                items += self._visual_items(item, shape)
        items = [item for item in items if isinstance(item, _Run) or item.text]
        # neighbouring pieces are one text where both are targets or neither is
        for flag, stretch in itertools.groupby(items, lambda item: None if isinstance(item, _Run) else item.is_target):
            if flag is None:
                for run in stretch:
                    assert isinstance(run, _Run)
                    layout.add([run.token] * run.length, is_visual=True)
            else:
                layout.add(self._encode("".join(p.text for p in stretch if isinstance(p, Piece))), is_target=flag)
        self._settle_bos(layout)
        return layout

    def _shape(self, media: Media, root: Path) -> MediaShape:
        if self._reader is None:
            raise SampleError("bad format", f"{media.kind}s in the text; expected none, as the model has no encoder")
        return self._reader.shape(media, root)

    def _visual_items(self, media: Media, shape: MediaShape) -> list["Piece | _Run"]:
        """The runs of visual tokens of an image or video, and the text around them.

        Nothing stands around a whole video: so Qwen3-VL was released, while the processor of transformers 5 leaves the
        markers of the chat template around all runs as well.
        """
        token = self._tokenizer.token_id(PADS[media.kind])
        assert token is not None
        items: list[Piece | _Run] = []
        for number, (frames, down, across) in enumerate(shape.grids):
            time = "" if shape.timestamps is None else f"<{shape.timestamps[number]:.1f} seconds>"
            items.append(Piece(time + VISION_START, is_target=False))
            items.append(_Run(token, frames * down * across // self._row_format.merge**2))
            items.append(Piece(VISION_END, is_target=False))
        return items

    def _settle_bos(self, layout: "_Layout") -> None:
        """One beginning-of-text token where the tokenizer or the template puts one, however many are there."""
        bos = self._tokenizer.bos
        if bos is None:
            return
        found = next((number for number, token in enumerate(layout.tokens) if token != bos), len(layout.tokens))
        wanted = int(found > 0 or self._tokenizer.adds_bos)
        layout.tokens[:found] = [bos] * wanted
        layout.is_target[:found] = [False] * wanted
        layout.is_visual[:found] = [False] * wanted

    def _fitted(self, layout: "_Layout") -> "_Layout":
        """The layout, cut to a row where that is asked for; a visual token is never cut."""
        limit, num_tokens = self._row_format.seq_length, len(layout.tokens)
        if layout.num_patches > self._row_format.max_patches:
            raise SampleError(
                "too long",
                f"{layout.num_patches} image patches; a row holds data.max_patches_per_row="
                f"{self._row_format.max_patches}; a lower data.max_pixels makes images smaller",
            )
        if num_tokens <= limit:
            return layout
        fault = f"{num_tokens} tokens; a row holds train.seq_length={limit}"
        if not self._truncates:
            visual = sum(layout.is_visual)
            way_out = f"; {visual} are of images, which a lower data.max_pixels makes smaller" if visual else ""
            raise SampleError("too long", fault + way_out)
        if any(layout.is_visual[limit:]):
            raise SampleError("too long", f"{fault}, and an image is never cut")
        cut = layout.part(0, limit)
        if not cut.num_targets:
            raise SampleError("too long", f"{fault}, and no answer begins in them")
        return cut

    def _protected(self, conversation: Conversation) -> Conversation:
        """The conversation with signs around the control tokens that its own texts spell out."""
        return Conversation(
            tuple(
                Message(
                    message.role,
                    tuple(self._protected_text(part) if isinstance(part, str) else part for part in message.parts),
                    message.has_loss,
                )
                for message in conversation.messages
            )
        )

    def _protected_text(self, text: str) -> str:
        if _NONCHARACTER.search(text):
            raise SampleError("bad format", "a character from U+FDD0 to U+FDEF, which no text has a use for")
        return self._control.sub(f"{_LITERAL_START}\\g<0>{_LITERAL_END}", text)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for number, stretch in enumerate(_LITERAL.split(text)):  # spelt-out control tokens at odd places
            if number % 2:
                spelt = self._tokenizer.encode_literally(stretch)
                if self._tokenizer.token_id(stretch) in spelt:
                    raise SampleError("bad format", f"{stretch} in a text; the tokenizer can't spell it out")
                ids += spelt
            elif stretch:
                ids += self._tokenizer.encode(stretch)
        return ids


def _check_vision_ids(tokenizer: HFTokenizer, path: Path) -> None:
    """The export has this config.json, by whose ids transformers looks for the visual tokens."""
    values = read_config_json(path.parent) if path.is_file() else {}
    named = {"image_token_id": PADS["image"], "video_token_id": PADS["video"], "vision_start_token_id": VISION_START}
    for field, token in named.items():
        if values.get(field) not in (None, tokenizer.token_id(token)):
            raise ConfigError(
                f"data.tokenizer={tokenizer.folder} gives {token} the id {tokenizer.token_id(token)}, and {path} has"
                f" {field}={values[field]}; use the tokenizer of that checkpoint"
            )


@dataclasses.dataclass(frozen=True)
class _Run:
    """Visual tokens in a row."""

    token: int
    length: int


@dataclasses.dataclass
class _Layout:
    """A document before its pixels are read: three lists of one length, and the media with their shapes."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    is_target: list[bool] = dataclasses.field(default_factory=list)
    is_visual: list[bool] = dataclasses.field(default_factory=list)
    media: list[tuple[Media, MediaShape]] = dataclasses.field(default_factory=list)

    def add(self, tokens: Sequence[int], is_target: bool = False, is_visual: bool = False) -> None:
        self.tokens += tokens
        self.is_target += [is_target] * len(tokens)
        self.is_visual += [is_visual] * len(tokens)

    def part(self, start: int, stop: int) -> "_Layout":
        """The tokens from start to stop, and all media."""
        return _Layout(self.tokens[start:stop], self.is_target[start:stop], self.is_visual[start:stop], self.media)

    @property
    def num_patches(self) -> int:
        return sum(shape.num_patches for _, shape in self.media)

    @property
    def num_targets(self) -> int:
        """Tokens that are predicted: the first never is."""
        return sum(self.is_target[1:])
