"""Tokenizers of Hugging Face folders, and which chat template goes with them."""

import json
import re

import pytest
import tokenizers
from small_tokenizer import (
    BEGIN_OF_TEXT,
    END_OF_TEXT,
    HI,
    IM_END,
    NEWLINES,
    QWEN,
    byte_level,
    llama_folder,
    qwen_folder,
    save,
)

from jaxforge.config.errors import ConfigError
from jaxforge.data.conversation import Conversation, Message
from jaxforge.data.hf_tokenizer import HFTokenizer, choose_template
from jaxforge.data.jinja_template import JinjaTemplate
from jaxforge.data.templates import ChatML, Llama3

HELPFUL = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)
CHAT = Conversation((Message("user", ("a",), has_loss=False), Message("assistant", ("b",), has_loss=True)))


@pytest.fixture
def qwen(tmp_path):
    return HFTokenizer(qwen_folder(tmp_path))


@pytest.fixture
def llama(tmp_path):
    return HFTokenizer(llama_folder(tmp_path))


def plain(folder, special=()):
    """A tokenizer without the special tokens of any chat format."""
    return save(byte_level(special), folder)


def test_a_text_becomes_ids_and_nothing_is_added(llama):
    assert llama.encode("hi é\n\n") == [HI, 32, 0xC3, 0xA9, NEWLINES]
    assert llama.encode("") == []


def test_special_tokens_in_a_text_become_their_ids(qwen):
    assert qwen.encode("a<|im_end|>") == [97, IM_END]
    assert qwen.encode_literally("a<|im_end|>") == list(b"a<|im_end|>")


@pytest.mark.parametrize("text", ["", "hi\n\n", "zwölf 🧮", "<|im_start|>user\n<|im_end|>"])
def test_ids_become_their_text_again(qwen, text):
    assert qwen.decode(qwen.encode(text)) == text


def test_a_token_is_found_by_its_text(qwen):
    assert (qwen.token_id("<|im_end|>"), qwen.token_id("hi"), qwen.token_id("<|eot_id|>")) == (IM_END, HI, None)


def test_named_tokens_come_from_the_config(qwen, tmp_path):
    assert (qwen.bos, qwen.eos, qwen.named_tokens) == (None, IM_END, {"eos_token": "<|im_end|>"})
    llama = HFTokenizer(llama_folder(tmp_path / "llama", eos_token={"content": "<|end_of_text|>", "lstrip": False}))
    assert (llama.bos, llama.eos) == (BEGIN_OF_TEXT, END_OF_TEXT)


def test_named_tokens_may_be_in_their_map_alone(tmp_path):
    folder = plain(tmp_path, QWEN)
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    assert HFTokenizer(folder).eos == IM_END


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("eos", [IM_END, [IM_END, 258]])
def test_the_model_says_what_ends_a_text_where_the_tokenizer_does_not(tmp_path, name, eos):
    folder = plain(tmp_path, QWEN)
    (folder / name).write_text(json.dumps({"eos_token_id": eos}))
    assert HFTokenizer(folder).eos == IM_END


@pytest.mark.parametrize("eos", [266, -1, 151_645, "<|im_end|>"])
def test_an_end_that_the_tokenizer_does_not_know_is_refused(tmp_path, eos):
    # it would be learnt as a token, and lie outside the embedding
    folder = plain(tmp_path, QWEN)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(ConfigError, match=f"config.json has eos_token_id={re.escape(str(eos))}, which tokenizer.json"):
        HFTokenizer(folder)


def test_a_tokenizer_without_ends_has_none(tmp_path):
    tokenizer = HFTokenizer(plain(tmp_path))
    assert (tokenizer.bos, tokenizer.eos, tokenizer.adds_bos) == (None, None, False)


@pytest.mark.parametrize(
    "adds_bos,config,expected",
    [
        (True, {}, True),
        (False, {}, False),
        (False, {"add_bos_token": True}, True),
        (True, {"add_bos_token": False}, False),
    ],
)
def test_the_config_and_then_the_tokenizer_say_whether_a_text_begins_with_bos(tmp_path, adds_bos, config, expected):
    assert HFTokenizer(llama_folder(tmp_path, adds_bos, **config)).adds_bos is expected


def test_the_vocabulary_reaches_to_the_largest_id(tmp_path, qwen):
    # 256 bytes, 2 merges, 8 special tokens
    assert qwen.vocab_size == 266
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0, "b": 9}, merges=[]))
    assert HFTokenizer(save(tokenizer, tmp_path / "gap")).vocab_size == 10


def test_a_tokenizer_forgets_how_its_last_user_cut_and_padded_texts(tmp_path):
    tokenizer = byte_level(QWEN)
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    assert HFTokenizer(save(tokenizer, tmp_path)).encode("abcd") == list(b"abcd")


def test_a_folder_without_a_fast_tokenizer_is_refused(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"sentencepiece")
    with pytest.raises(ConfigError, match=r"data.tokenizer=.* has no tokenizer.json; .*save_pretrained"):
        HFTokenizer(tmp_path)


def test_a_name_on_a_hub_is_no_folder(tmp_path):
    with pytest.raises(ConfigError, match=r"data.tokenizer=Qwen/Qwen3-8B is no folder of this machine; download"):
        HFTokenizer("Qwen/Qwen3-8B")


@pytest.mark.parametrize(
    "name,content,message",
    [
        ("tokenizer.json", "{}", "tokenizer.json can't be read"),
        ("tokenizer.json", b"\xff\xfe{}", "tokenizer.json can't be read"),
        ("tokenizer_config.json", "{", "tokenizer_config.json can't be read as JSON"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json holds no JSON object"),
        ("tokenizer_config.json", '{"eos_token": "<end>"}', "eos_token is '<end>', which tokenizer.json does not know"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"9": {"content": "<|im_end|>"}}}',
         "tokenizer_config.json gives '<|im_end|>' the id 9, tokenizer.json 260"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "rag", "template": "a"}]}',
         "has the chat templates rag and none named default"),
    ],
)  # fmt: skip
def test_a_broken_folder_is_refused(tmp_path, name, content, message):
    folder = qwen_folder(tmp_path)
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as caught:
        HFTokenizer(folder)
    assert str(caught.value).startswith("data.tokenizer") and message in str(caught.value)


def test_a_chat_template_is_found_in_each_place_it_may_be(tmp_path):
    folder = qwen_folder(tmp_path)
    assert HFTokenizer(folder).chat_template is None
    qwen_folder(tmp_path, chat_template="of the config")
    assert HFTokenizer(folder).chat_template == "of the config"
    named = [{"name": "tool_use", "template": "for tools"}, {"name": "default", "template": "of a list"}]
    qwen_folder(tmp_path, chat_template=named)
    assert HFTokenizer(folder).chat_template == "of a list"
    (folder / "chat_template.json").write_text('{"chat_template": "of the processor"}')
    assert HFTokenizer(folder).chat_template == "of the processor"
    (folder / "chat_template.jinja").write_text("of a file")
    assert HFTokenizer(folder).chat_template == "of a file"


def test_the_fingerprint_changes_with_whatever_changes_tokens(tmp_path):
    folders = [
        qwen_folder(tmp_path / "1"),
        qwen_folder(tmp_path / "2", chat_template="a"),
        qwen_folder(tmp_path / "3", eos_token="<|endoftext|>"),
        plain(tmp_path / "4"),
        llama_folder(tmp_path / "5"),
        llama_folder(tmp_path / "6", add_bos_token=False),
    ]
    assert len({HFTokenizer(folder).fingerprint for folder in folders}) == 6
    assert HFTokenizer(qwen_folder(tmp_path / "7")).fingerprint == HFTokenizer(folders[0]).fingerprint


def test_auto_knows_a_format_by_its_special_tokens(qwen, tmp_path):
    assert choose_template("auto", qwen) == ChatML(None)
    assert choose_template("auto", HFTokenizer(llama_folder(tmp_path / "llama"))) == Llama3(None)


def test_auto_goes_by_the_folder_where_it_knows_no_special_token(tmp_path):
    folder = plain(tmp_path, ("</s>",))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}</s>{% endfor %}")
    template = choose_template("auto", HFTokenizer(folder))
    assert isinstance(template, JinjaTemplate)
    assert [piece.text for piece in template.render(CHAT)] == ["a</s>", "b</s>"]


@pytest.mark.parametrize(
    "template,system",
    [
        (HELPFUL, "You are a helpful assistant."),
        (HELPFUL.replace("You", "You are Qwen, created by Alibaba Cloud. You"),
         "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."),
        (HELPFUL[HELPFUL.index("{% for") :], None),
        (None, None),
    ],
)  # fmt: skip
def test_chatml_has_the_system_message_of_the_folders_template(tmp_path, template, system):
    tokenizer = HFTokenizer(qwen_folder(tmp_path, chat_template=template))
    assert choose_template("auto", tokenizer) == choose_template("chatml", tokenizer) == ChatML(system)


@pytest.mark.parametrize("name,form", [("chatml", ChatML), ("llama3", Llama3)])
def test_a_system_message_of_the_config_comes_before_that_of_the_folder(tmp_path, name, form):
    folder = {"chatml": qwen_folder, "llama3": llama_folder}[name](tmp_path, chat_template=HELPFUL)
    assert choose_template(name, HFTokenizer(folder), "Be brief.") == form("Be brief.")


def test_a_system_message_of_the_config_is_put_into_the_folders_template(tmp_path):
    tokenizer = HFTokenizer(qwen_folder(tmp_path, chat_template=HELPFUL))
    rendered = choose_template("checkpoint", tokenizer, "Be brief.").render(CHAT)
    assert rendered[0].text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user")


@pytest.mark.parametrize("name,token", [("chatml", r"<\|im_start\|>"), ("llama3", r"<\|begin_of_text\|>")])
def test_a_format_whose_tokens_are_missing_is_refused(tmp_path, name, token):
    with pytest.raises(ConfigError, match=f"data.chat_template={name} .*the tokenizer has no {token}; use"):
        choose_template(name, HFTokenizer(plain(tmp_path)))


def test_checkpoint_needs_a_template_in_the_folder(qwen):
    with pytest.raises(ConfigError, match="data.chat_template=checkpoint .* has no chat template; put one there"):
        choose_template("checkpoint", qwen)


def test_without_any_template_the_first_conversation_is_refused(tmp_path):
    template = choose_template("auto", HFTokenizer(plain(tmp_path)))
    with pytest.raises(ConfigError, match="neither ChatML nor Llama 3, and the folder no chat template; put one"):
        template.render(CHAT)


@pytest.mark.parametrize(
    "step",
    [
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}]}},
        {"pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
    ],
)
def test_a_tokenizer_that_puts_spaces_before_texts_reads_no_conversations(tmp_path, step):
    folder = qwen_folder(tmp_path)
    description = json.loads((folder / "tokenizer.json").read_text()) | step
    (folder / "tokenizer.json").write_text(json.dumps(description))
    tokenizer = HFTokenizer(folder)
    assert tokenizer.adds_space
    with pytest.raises(ConfigError, match="puts a space before every text"):
        choose_template("chatml", tokenizer).render(CHAT)


def test_byte_level_tokenizers_put_no_space_before_texts(qwen):
    assert not qwen.adds_space
