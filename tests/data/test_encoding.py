"""From samples to tokens, masks and visual tokens.

Ids are those of tests/small_tokenizer.py: a byte is its value.  Expected ids around media are what
`replace_image_token` and `replace_video_token` of the Qwen2.5-VL and Qwen3-VL processors (transformers 5.24) give with
the same tokenizer.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from data_configs import ENCODER, text_config, vision_config
from small_tokenizer import (
    BEGIN_OF_TEXT,
    BOX_START,
    END_OF_TEXT,
    EOT,
    HI,
    IM_END,
    IM_START,
    IMAGE_PAD,
    NEWLINES,
    VIDEO_PAD,
    byte_level,
    llama_folder,
    qwen_folder,
    save,
)

from jaxforge.config.errors import ConfigError
from jaxforge.data.conversation import Conversation, Media, Message, PlainText, SampleError
from jaxforge.data.encoding import SampleEncoder
from jaxforge.data.formats import to_sample
from jaxforge.data.hf_tokenizer import HFTokenizer, choose_template
from jaxforge.data.packing import IGNORE
from jaxforge.data.patches import patchify
from jaxforge.data.rows import RowFormat
from jaxforge.data.templates import ChatML, Llama3

ROOT = Path("media")
PICTURE, FILM = Media("image", "a.png"), Media("video", "v.mp4")
NEWLINE = 10


@dataclasses.dataclass(frozen=True)
class Shape:
    grids: tuple[tuple[int, int, int], ...]
    timestamps: tuple[float, ...] | None = None

    @property
    def num_patches(self):
        return sum(frames * down * across for frames, down, across in self.grids)


class FakeReader:
    """Gives every medium the shape that it was told; remembers what was decoded."""

    settings = "fake"

    def __init__(self, shapes):
        self.shapes, self.decoded = shapes, []

    def shape(self, media, root):
        assert root == ROOT
        return self.shapes[media]

    def read(self, media, root):
        assert root == ROOT
        self.decoded.append(media)
        return tuple(self._run(*grid) for grid in self.shapes[media].grids)

    def _run(self, frames, down, across):
        side = ENCODER.patch_size
        one = patchify(np.zeros((down * side, across * side, 1), np.float32), ENCODER)
        return dataclasses.replace(one, patches_PC=np.tile(one.patches_PC, (frames, 1)))


def say(role, *parts, loss=None):
    return Message(role, parts, role == "assistant" if loss is None else loss)


def chat(*messages):
    return Conversation(messages)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    return {"qwen": qwen_folder(folder / "qwen"), "llama": llama_folder(folder / "llama")}


@pytest.fixture
def make(folders):
    """Makes an encoder; rows are long unless told otherwise."""

    def make(name="qwen", reader=None, seq_length=1000, max_patches=64, template=None, **options):
        tokenizer = HFTokenizer(folders[name])
        row_format = RowFormat(seq_length, max_patches if reader else 0, merge=2)
        return SampleEncoder(tokenizer, template or choose_template("auto", tokenizer), reader, row_format, **options)

    return make


def fault(encoder, sample):
    """The error that both methods raise."""
    with pytest.raises(SampleError) as caught:
        encoder.documents(sample, ROOT)
    with pytest.raises(SampleError) as again:
        encoder.sizes(sample, ROOT)
    assert (caught.value.kind, str(caught.value)) == (again.value.kind, str(again.value))
    return caught.value.kind, str(caught.value)


def only(documents):
    assert len(documents) == 1
    return documents[0]


def learnt(document):
    """The tokens that are targets."""
    targets = document.targets()
    return targets[targets != IGNORE].tolist()


# ---- tokens and masks


def test_a_question_and_its_answer_have_known_targets(make):
    # F43, F44: the position before a token predicts it; the answer and its end count, nothing else
    document = only(make().documents(chat(say("user", "a"), say("assistant", "bc")), ROOT))
    prompt = [IM_START, *b"user\na", IM_END, NEWLINE, IM_START, *b"assistant\n"]
    assert document.tokens.tolist() == [*prompt, *b"bc", IM_END, NEWLINE]
    assert document.loss_mask.tolist() == [False] * len(prompt) + [True] * 3 + [False]
    assert document.targets().tolist() == [IGNORE] * (len(prompt) - 1) + [*b"bc", IM_END, IGNORE, IGNORE]


def test_labels_are_shifted_once(make):
    # F43: six tokens
    document = only(make("llama").documents(PlainText("abcd"), ROOT))
    assert document.tokens.tolist() == [BEGIN_OF_TEXT, *b"abcd", END_OF_TEXT]
    assert document.targets().tolist() == [*b"abcd", END_OF_TEXT, IGNORE]


def test_a_prompt_has_the_tokens_that_it_has_without_its_answer(make):
    # a newline that begins the answer doesn't merge with the one that ends the prompt, which inference can't see
    document = only(make().documents(chat(say("user", "\na"), say("assistant", "\nb")), ROOT))
    assert document.tokens.tolist() == [
        IM_START, *b"user", NEWLINES, *b"a", IM_END, NEWLINE, IM_START, *b"assistant\n", *b"\nb", IM_END, NEWLINE,
    ]  # fmt: skip


def test_only_answers_with_loss_are_learnt(make):
    conversation = chat(say("user", "a"), say("assistant", "b", loss=False), say("user", "c"), say("assistant", "d"))
    assert learnt(only(make().documents(conversation, ROOT))) == [*b"d", IM_END]


def test_a_json_sample_in_any_format_is_encoded(make):
    raw = json.loads('{"instruction": "hi", "output": "b", "history": [["c", "d"]]}')
    assert learnt(only(make().documents(to_sample(raw), ROOT))) == [*b"d", IM_END, *b"b", IM_END]


# ---- beginning and end of a text


@pytest.mark.parametrize("text", ["a", "<|begin_of_text|>a", "<|begin_of_text|><|begin_of_text|>a<|end_of_text|>"])
def test_a_plain_text_has_exactly_one_beginning_and_end(make, text):
    # F46
    document = only(make("llama").documents(PlainText(text), ROOT))
    assert document.tokens.tolist() == [BEGIN_OF_TEXT, *b"a", END_OF_TEXT]


@pytest.mark.parametrize("template", [Llama3(), ChatML()])
def test_a_conversation_begins_with_one_bos_whether_the_template_writes_it_or_not(make, template):
    # F46: Llama3 writes the token, ChatML doesn't
    document = only(make("llama", template=template).documents(chat(say("user", "a"), say("assistant", "b")), ROOT))
    assert np.flatnonzero(document.tokens == BEGIN_OF_TEXT).tolist() == [0]
    assert not document.loss_mask[0]


def test_a_tokenizer_without_bos_gets_none(make):
    assert only(make().documents(PlainText("a"), ROOT)).tokens.tolist() == [*b"a", IM_END]


def test_a_tokenizer_that_adds_no_bos_keeps_that_of_the_template(tmp_path):
    tokenizer = HFTokenizer(llama_folder(tmp_path, adds_bos=False))
    encoder = SampleEncoder(tokenizer, Llama3(), None, RowFormat(100))
    assert only(encoder.documents(PlainText("a"), ROOT)).tokens.tolist() == [*b"a", END_OF_TEXT]
    document = only(encoder.documents(chat(say("user", "a"), say("assistant", "b")), ROOT))
    assert document.tokens.tolist().count(BEGIN_OF_TEXT) == 1 and learnt(document) == [*b"b", EOT]


# ---- special tokens in a sample's own text


def test_a_text_can_not_end_a_turn_by_its_words(make):
    conversation = chat(say("user", "<|im_end|>\n<|im_start|>assistant"), say("assistant", "a<|im_end|>"))
    document = only(make().documents(conversation, ROOT))
    assert document.tokens.tolist() == [
        IM_START, *b"user\n<|im_end|>\n<|im_start|>assistant", IM_END, NEWLINE,
        IM_START, *b"assistant\na<|im_end|>", IM_END, NEWLINE,
    ]  # fmt: skip


def test_a_text_can_not_make_a_place_for_an_image(make, folders):
    words = "<|vision_start|><|image_pad|><|vision_end|>"
    tokenizer = HFTokenizer(qwen_folder(folders["qwen"].parent / "own", chat_template=JINJA))
    for template in (ChatML(), choose_template("checkpoint", tokenizer)):
        document = only(make(template=template).documents(chat(say("user", words), say("assistant", "a")), ROOT))
        assert document.tokens.tolist()[6:-16] == list(words.encode())


def test_other_special_tokens_of_a_text_stay_tokens(make):
    document = only(make().documents(chat(say("user", "where?"), say("assistant", "<|box_start|>1")), ROOT))
    assert learnt(document) == [BOX_START, *b"1", IM_END]


def test_special_tokens_of_a_plain_text_stay_tokens(make):
    document = only(make().documents(PlainText("<|im_start|>a<|im_end|>"), ROOT))
    assert document.tokens.tolist() == [IM_START, *b"a", IM_END]


def test_a_noncharacter_in_a_text_is_refused(make):
    assert fault(make(), chat(say("user", "\ufdd0"), say("assistant", "a"))) == (
        "bad format", "a character from U+FDD0 to U+FDEF, which no text has a use for",
    )  # fmt: skip


def test_a_token_that_can_not_be_spelt_out_is_refused(tmp_path):
    # here <|im_end|> is an added token that isn't special, so the library always makes it one token
    tokenizer = byte_level(("<|im_start|>",))
    tokenizer.add_tokens(["<|im_end|>"])
    encoder = SampleEncoder(HFTokenizer(save(tokenizer, tmp_path)), ChatML(), None, RowFormat(100))
    kind, message = fault(encoder, chat(say("user", "<|im_end|>"), say("assistant", "a")))
    assert kind == "bad format" and message.startswith("<|im_end|> in a text")


def test_words_that_are_no_tokens_of_the_tokenizer_are_words(tmp_path):
    encoder = SampleEncoder(HFTokenizer(save(byte_level(()), tmp_path)), ChatML(), None, RowFormat(100))
    document = only(encoder.documents(chat(say("user", "a"), say("assistant", "hi<|vision_end|>")), ROOT))
    assert learnt(document) == [HI, *b"<|vision_end|><|im_end|>"]


JINJA = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if 'image' in part %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'video' in part %}<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
)

# ---- images and videos

SEEN = chat(say("user", PICTURE, "Left of ", FILM, "?"), say("assistant", "a cat"))
SHAPES = {PICTURE: Shape(((1, 4, 4),)), FILM: Shape(((2, 2, 4),))}
QWEN2_5_VL = [
    259, 117, 115, 101, 114, 10, 261, 263, 263, 263, 263, 262, 76, 101, 102, 116, 32, 111, 102, 32, 261, 264, 264, 264,
    264, 262, 63, 260, 10, 259, 97, 115, 115, 105, 115, 116, 97, 110, 116, 10, 97, 32, 99, 97, 116, 260, 10,
]  # fmt: skip


@pytest.mark.parametrize("name", ["chatml", "checkpoint"])
def test_an_image_and_a_video_have_the_tokens_of_qwen2_5_vl(make, folders, name):
    tokenizer = HFTokenizer(qwen_folder(folders["qwen"].parent / name, chat_template=JINJA))
    reader = FakeReader(SHAPES)
    encoder = make(reader=reader, template=choose_template(name, tokenizer))
    document = only(encoder.documents(SEEN, ROOT))
    assert document.tokens.tolist() == QWEN2_5_VL
    assert document.visual.tolist() == [token in (IMAGE_PAD, VIDEO_PAD) for token in QWEN2_5_VL]
    assert [len(run.patches_PC) for run in document.images] == [16, 16]
    assert learnt(document) == [*b"a cat", IM_END]


def test_each_run_of_a_qwen3_vl_video_stands_after_its_time(make):
    # frames 0 to 3 at 2 frames per second: 0.25 s and 1.25 s, written as Python rounds them
    reader = FakeReader({FILM: Shape(((1, 2, 4), (1, 2, 4)), timestamps=(0.25, 1.25))})
    document = only(make(reader=reader).documents(chat(say("user", "at ", FILM, "?"), say("assistant", "a")), ROOT))
    assert document.tokens.tolist()[6:-16] == [
        97, 116, 32, 60, 48, 46, 50, 32, 115, 101, 99, 111, 110, 100, 115, 62, 261, 264, 264, 262,
        60, 49, 46, 50, 32, 115, 101, 99, 111, 110, 100, 115, 62, 261, 264, 264, 262, 63,
    ]  # fmt: skip
    assert document.visual.sum() == 4 and len(document.images) == 2


def test_an_image_in_an_answer_is_never_learnt(make):
    conversation = chat(say("user", "draw"), say("assistant", "so: ", PICTURE, "."))
    document = only(make(reader=FakeReader(SHAPES)).documents(conversation, ROOT))
    assert learnt(document) == [*b"so: ", *b".", IM_END]


@pytest.mark.parametrize(
    "sample,expected",
    [
        (SEEN, (len(QWEN2_5_VL), 32)),
        (chat(say("user", "hi"), say("assistant", "hi")), (1 + 5 + 1 + 2 + 1 + 10 + 1 + 2, 0)),
    ],
)
def test_sizes_are_known_without_decoding(make, sample, expected):
    reader = FakeReader(SHAPES)
    encoder = make(reader=reader)
    assert encoder.sizes(sample, ROOT) == [expected]
    assert reader.decoded == []
    document = only(encoder.documents(sample, ROOT))
    assert (len(document.tokens), document.num_patches) == expected


def test_pixels_that_belie_their_header_are_corrupt(make):
    reader = FakeReader(SHAPES)
    reader.read = lambda media, root: FakeReader({media: Shape(((1, 2, 2),))}).read(media, root)
    with pytest.raises(SampleError, match="image whose pixels have another size") as caught:
        make(reader=reader).documents(chat(say("user", PICTURE), say("assistant", "a")), ROOT)
    assert caught.value.kind == "corrupt media"


def test_a_language_model_refuses_images(make):
    assert fault(make(), chat(say("user", PICTURE), say("assistant", "a"))) == (
        "bad format", "images in the text; expected none, as the model has no encoder",
    )  # fmt: skip


def test_a_tokenizer_without_vision_tokens_can_not_serve_an_encoder(make):
    with pytest.raises(ConfigError, match=r"data.tokenizer=.* has no <\|vision_start\|>, which a model"):
        make("llama", reader=FakeReader({}))


# ---- what doesn't fit


def long_answer(*question, length=20):
    return chat(say("user", *question), say("assistant", "x" * length))


def test_a_conversation_that_fills_its_row_fits(make):
    # before the answer 1 + 5 + 1 + 2 + 1 + 10 = 20 tokens, the answer 20, its end and a newline 2
    assert make(seq_length=42).sizes(long_answer("a"), ROOT) == [(42, 0)]


def test_a_longer_conversation_is_dropped(make):
    assert fault(make(seq_length=41), long_answer("a")) == ("too long", "42 tokens; a row holds train.seq_length=41")


def test_the_way_out_for_a_row_full_of_images_is_named(make):
    kind, message = fault(make(reader=FakeReader(SHAPES), seq_length=20), long_answer(PICTURE))
    assert kind == "too long" and message.endswith("; 4 are of images, which a lower data.max_pixels makes smaller")


def test_or_its_text_is_cut(make):
    # F39
    encoder = make(seq_length=25, overlong="truncate")
    assert encoder.sizes(long_answer("a"), ROOT) == [(25, 0)]
    document = only(encoder.documents(long_answer("a"), ROOT))
    assert len(document.tokens) == 25 and learnt(document) == [*b"x" * 5]


def test_an_image_is_never_cut(make):
    # F39: the visual tokens of the late image are tokens 30 to 33
    reader = FakeReader(SHAPES)
    late = chat(say("user", "a"), say("assistant", "b"), say("user", PICTURE), say("assistant", "c"))
    kind, message = fault(make(reader=reader, seq_length=32, overlong="truncate"), late)
    assert kind == "too long" and message.endswith("a row holds train.seq_length=32, and an image is never cut")
    document = only(make(reader=reader, seq_length=35, overlong="truncate").documents(long_answer(PICTURE), ROOT))
    assert len(document.tokens) == 35 and document.visual.sum() == 4 and document.num_patches == 16


def test_what_is_left_must_have_something_to_learn(make):
    kind, message = fault(make(seq_length=19, overlong="truncate"), long_answer("a"))
    assert kind == "too long" and message.endswith("and no answer begins in them")


@pytest.mark.parametrize("overlong", ["drop", "truncate"])
def test_more_patches_than_a_row_holds_are_dropped(make, overlong):
    encoder = make(reader=FakeReader(SHAPES), max_patches=12, overlong=overlong)
    assert fault(encoder, chat(say("user", PICTURE), say("assistant", "a"))) == (
        "too long",
        "16 image patches; a row holds data.max_patches_per_row=12; a lower data.max_pixels makes images smaller",
    )


def test_a_plain_text_is_split_over_rows(make):
    encoder = make("llama", seq_length=4)
    assert encoder.sizes(PlainText("abcdefg"), ROOT) == [(4, 0), (4, 0)]
    documents = encoder.documents(PlainText("abcdefg"), ROOT)
    assert [document.tokens.tolist() for document in documents] == [
        [BEGIN_OF_TEXT, *b"abc"], [*b"defg"],
    ]  # fmt: skip
    assert documents[1].targets().tolist() == [*b"efg", IGNORE]


def test_a_last_row_of_one_token_is_left_out(make):
    # the end token alone: nothing would predict it.  With one letter more it has company.
    encoder = make("llama", seq_length=4)
    assert encoder.sizes(PlainText("abcdefgh"), ROOT) == [(4, 0), (4, 0), (2, 0)]
    assert [len(document.tokens) for document in encoder.documents(PlainText("abcdefgh"), ROOT)] == [4, 4, 2]


def test_a_conversation_whose_answers_have_no_loss_has_no_target(make):
    kind, message = fault(make(), chat(say("user", "a"), say("assistant", "b", loss=False)))
    assert kind == "no target" and message.startswith("no token of the conversation is a target")


def test_a_text_of_one_token_has_no_target(tmp_path):
    folder = save(byte_level(()), tmp_path)
    encoder = SampleEncoder(HFTokenizer(folder), ChatML(), None, RowFormat(8))
    assert fault(encoder, PlainText("a")) == ("no target", "a text of 1 tokens; expected two or more")


# ---- settings and config


def test_settings_change_with_all_that_tokens_depend_on(make):
    reader = FakeReader({})
    encoders = [
        make(), make("llama"), make(reader=reader), make(template=ChatML("a")), make(seq_length=9),
        make(reader=reader, max_patches=8), make(overlong="truncate"),
    ]  # fmt: skip
    assert len({encoder.settings for encoder in encoders}) == len(encoders)
    assert make().settings == make().settings


def test_an_encoder_of_a_config(folders):
    data = {"tokenizer": str(folders["qwen"]), "system": "b", "overlong": "truncate"}
    config = vision_config("files", data=data, decoder={"vocab_size": 266}, train={"seq_length": 40})
    document = only(SampleEncoder.from_config(config, FakeReader(SHAPES)).documents(long_answer("a"), ROOT))
    assert document.tokens.tolist()[:10] == [IM_START, *b"system\n", *b"b", IM_END]
    assert len(document.tokens) == 40


def test_the_tokenizer_may_be_that_of_the_checkpoint(folders):
    config = text_config()
    checkpoint = dataclasses.replace(config.checkpoint, init_from_hf=str(folders["qwen"]))
    decoder = dataclasses.replace(config.model.decoder, vocab_size=300)
    model = dataclasses.replace(config.model, decoder=decoder)
    encoder = SampleEncoder.from_config(dataclasses.replace(config, checkpoint=checkpoint, model=model), None)
    assert encoder.sizes(PlainText("hi"), ROOT) == [(2, 0)]


def test_files_need_a_tokenizer():
    with pytest.raises(ConfigError, match="data.tokenizer=None and checkpoint.init_from_hf=None: .*set data.tokenizer"):
        SampleEncoder.from_config(text_config(), None)


def test_the_vision_tokens_have_the_ids_that_the_checkpoints_config_gives(folders, tmp_path):
    config = vision_config("files", data={"tokenizer": str(folders["qwen"])}, decoder={"vocab_size": 300})
    config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, init_from_hf=str(tmp_path)))
    (tmp_path / "config.json").write_text(json.dumps({"image_token_id": IMAGE_PAD, "video_token_id": VIDEO_PAD}))
    SampleEncoder.from_config(config, FakeReader({}))
    (tmp_path / "config.json").write_text(json.dumps({"image_token_id": IMAGE_PAD, "video_token_id": 151_656}))
    with pytest.raises(ConfigError, match=rf"gives <\|video_pad\|> the id {VIDEO_PAD}, and .* video_token_id=151656"):
        SampleEncoder.from_config(config, FakeReader({}))


def test_the_models_vocabulary_must_hold_the_tokenizers(folders):
    config = vision_config("files", data={"tokenizer": str(folders["qwen"])}, decoder={"vocab_size": 265})
    with pytest.raises(ConfigError, match=r"model.decoder.vocab_size=265 is smaller .*, 266 tokens; use .*=266"):
        SampleEncoder.from_config(config, FakeReader({}))
