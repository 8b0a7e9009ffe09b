"""Chat formats.  Expected texts are those of `transformers` 5.24 with short templates of the same form."""

import pytest

from jaxforge.config.errors import ConfigError
from jaxforge.data.conversation import Conversation, Media, Message, SampleError
from jaxforge.data.templates import ChatML, Llama3, NoTemplate, Piece


def say(role, *parts, loss=None):
    return Message(role, parts, role == "assistant" if loss is None else loss)


def texts(pieces):
    return "".join(piece.text for piece in pieces if isinstance(piece, Piece))


def targets(pieces):
    return "|".join(piece.text for piece in pieces if isinstance(piece, Piece) and piece.is_target)


SUM = (say("user", " What is 2+2?\n"), say("assistant", "4"))
BRIEF = say("system", "Be brief.")


def test_chatml_is_the_text_of_qwen():
    tools = (say("tool", "a"), say("tool", "b"), say("assistant", " done "))
    pieces = ChatML("You are a helpful assistant.").render(Conversation(SUM + tools))
    assert texts(pieces) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n What is 2+2?\n<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\na\n</tool_response>\n<tool_response>\nb\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n done <|im_end|>\n"
    )


def test_a_system_message_replaces_the_default_one():
    pieces = ChatML("You are a helpful assistant.").render(Conversation((BRIEF, *SUM)))
    assert texts(pieces).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n What")


def test_without_a_default_chatml_writes_no_system_message():
    assert texts(ChatML().render(Conversation(SUM))).startswith("<|im_start|>user\n What")


def test_the_answer_and_its_end_token_are_the_targets_of_chatml():
    # F44: neither the header before the answer nor the newline after its end
    assert targets(ChatML().render(Conversation((BRIEF, *SUM)))) == "4|<|im_end|>"


@pytest.mark.parametrize("template,expected", [(ChatML(), "4|<|im_end|>"), (Llama3(), "4<|eot_id|>")])
def test_an_answer_without_loss_is_no_target(template, expected):
    pieces = template.render(Conversation((*SUM, say("user", "more"), say("assistant", "no", loss=False))))
    assert targets(pieces) == expected


def test_media_stand_where_they_are_among_the_text():
    picture = Media("image", "a.png")
    pieces = ChatML().render(Conversation((say("user", "see ", picture, "?"), say("assistant", "a cat"))))
    assert pieces[:4] == [Piece("<|im_start|>user\n", False), Piece("see ", False), picture, Piece("?", False)]


def test_llama3_is_the_text_of_llama_3():
    more = (say("user", "And 3?"), say("assistant", " done "))
    pieces = Llama3().render(Conversation((BRIEF, *SUM, *more)))
    assert texts(pieces) == (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nWhat is 2+2?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n4<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nAnd 3?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\ndone<|eot_id|>"
    )
    assert targets(pieces) == "4<|eot_id|>|done<|eot_id|>"


def test_a_tool_is_ipython_to_llama3():
    pieces = Llama3("Be brief.").render(Conversation((*SUM, say("tool", "a"))))
    assert texts(pieces).endswith("<|start_header_id|>ipython<|end_header_id|>\n\na<|eot_id|>")
    header = "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
    assert texts(pieces).startswith(header + "Be brief.<|eot_id|>")


def test_llama3_has_no_place_for_images():
    with pytest.raises(SampleError, match="an image or video; expected text alone") as caught:
        Llama3().render(Conversation((say("user", Media("image", "a.png")), say("assistant", "a cat"))))
    assert caught.value.kind == "bad format"


def test_a_default_system_message_is_part_of_the_settings():
    assert len({ChatML().settings, ChatML("").settings, ChatML("Be brief.").settings, Llama3().settings}) == 4


def test_without_a_template_a_conversation_is_refused_with_the_reason():
    with pytest.raises(ConfigError, match="put one into the folder"):
        NoTemplate("no template; put one into the folder").render(Conversation(SUM))
