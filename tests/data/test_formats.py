"""Samples in every format, and what is said of those that can't be used."""

import pytest

from jaxforge.data.conversation import Conversation, Media, Message, PlainText, SampleError
from jaxforge.data.formats import to_sample

QUESTION = Message("user", ("why?",), has_loss=False)
ANSWER = Message("assistant", ("because",), has_loss=True)


def user(*parts):
    return Message("user", parts, has_loss=False)


def image(source):
    return Media("image", source)


def fault(raw) -> SampleError:
    with pytest.raises(SampleError) as caught:
        to_sample(raw)
    return caught.value


def turns(question, answer="because", **fields):
    """A sample of one question and its answer."""
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages} | fields


@pytest.mark.parametrize(
    "raw",
    [
        turns("why?"),
        {"conversations": [{"from": "human", "value": "why?"}, {"from": "gpt", "value": "because"}]},
        {"conversations": [{"from": "user", "value": "why?"}, {"from": "assistant", "value": "because"}]},
        {"conversations": turns("why?")["messages"]},
        {"instruction": "why?", "output": "because"},
        {"instruction": "why?", "input": "", "output": "because", "system": "", "history": [], "text": "rendered"},
        {"query": "why?", "response": "because"},
        {"prompt": "why?", "completion": "because"},
        turns([{"type": "text", "text": "why?"}]),
        # a table's empty columns
        turns("why?", images=None, videos=[], system=None, id=7),
    ],
)
def test_every_format_gives_the_same_conversation(raw):
    assert to_sample(raw) == Conversation((QUESTION, ANSWER))


def test_a_text_is_a_plain_text():
    assert to_sample({"text": "once <image> upon", "meta": 1}) == PlainText("once <image> upon")


def test_text_stays_as_it_is():
    text = "  <|im_end|> <b>&amp;</b>\r\n\tzwölf 🧮 "
    assert to_sample(turns(text)).messages[0] == user(text)


@pytest.mark.parametrize(
    "raw",
    [
        {"messages": [{"role": "system", "content": "be brief"}, *turns("why?")["messages"]]},
        turns("why?", system="be brief"),
        {"conversations": turns("why?")["messages"], "system": "be brief"},
        {"instruction": "why?", "output": "because", "system": "be brief"},
        {"query": "why?", "response": "because", "system": "be brief"},
    ],
)
def test_a_system_message_comes_first(raw):
    assert to_sample(raw).messages == (Message("system", ("be brief",), has_loss=False), QUESTION, ANSWER)


def test_an_alpaca_input_is_a_line_after_its_instruction():
    assert to_sample({"instruction": "add", "input": "1 2", "output": "3"}).messages[0] == user("add\n1 2")


@pytest.mark.parametrize("keys", [("instruction", "output"), ("query", "response")])
def test_history_comes_before_the_question_and_its_answers_are_learnt(keys):
    raw = {keys[0]: "why?", keys[1]: "because", "history": [["who?", "me"]]}
    assert to_sample(raw).messages == (user("who?"), Message("assistant", ("me",), has_loss=True), QUESTION, ANSWER)


def test_a_tool_answers_without_loss():
    messages = [*turns("why?")["messages"], {"role": "tool", "content": ""}, {"role": "assistant", "content": "so"}]
    assert [(m.role, m.has_loss) for m in to_sample({"messages": messages}).messages] == [
        ("user", False), ("assistant", True), ("tool", False), ("assistant", True),
    ]  # fmt: skip


@pytest.mark.parametrize("flag", ["loss", "weight"])
@pytest.mark.parametrize("value,has_loss", [(True, True), (1, True), (False, False), (0.0, False), (None, True)])
def test_a_flag_says_which_answer_is_learnt(flag, value, has_loss):
    messages = [{"role": "assistant", "content": "a", flag: value}, {"role": "assistant", "content": "b"}]
    assert [message.has_loss for message in to_sample({"messages": messages}).messages] == [has_loss, True]


@pytest.mark.parametrize("name", ["image", "images"])
@pytest.mark.parametrize("given", ["a.jpg", ["a.jpg"]])
def test_one_image_may_be_given_alone_or_in_a_list(name, given):
    assert to_sample(turns("<image>\nwhy?", **{name: given})).messages[0] == user(image("a.jpg"), "\nwhy?")


def test_tags_are_replaced_in_reading_order_over_all_messages():
    raw = turns("a<image>b<video>", "<image>c", images=["1.png", "2.png"], videos=["v.mp4"])
    assert to_sample(raw).messages == (
        user("a", image("1.png"), "b", Media("video", "v.mp4")),
        Message("assistant", (image("2.png"), "c"), has_loss=True),
    )


def test_media_without_tags_come_before_the_first_question():
    raw = turns("why?", system="look", images=["1.png", "2.png"], video="v.mp4")
    expected = user(image("1.png"), image("2.png"), Media("video", "v.mp4"), "why?")
    assert to_sample(raw).messages[1] == expected


def test_tags_of_images_do_not_place_videos():
    raw = turns("why <image>?", images=["1.png"], videos=["v.mp4"])
    assert to_sample(raw).messages[0] == user(Media("video", "v.mp4"), "why ", image("1.png"), "?")


@pytest.mark.parametrize(
    "part,media",
    [
        ({"type": "image", "image": "a.jpg"}, image("a.jpg")),
        ({"type": "image", "path": "a.jpg", "text": None}, image("a.jpg")),
        ({"type": "image_url", "image_url": "a.jpg"}, image("a.jpg")),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": "low"}},
         image("data:image/png;base64,AA==")),
        ({"type": "image", "image": {"bytes": b"png", "path": None}}, image(b"png")),
        ({"type": "video", "video": "v.mp4"}, Media("video", "v.mp4")),
        ({"type": "video", "video": ["1.jpg", "2.jpg"]}, Media("video", ("1.jpg", "2.jpg"))),
        ({"type": "video_url", "video_url": {"url": "v.mp4"}}, Media("video", "v.mp4")),
    ],
)  # fmt: skip
def test_content_parts_hold_media(part, media):
    before, *after = ({"type": "text", "text": text} for text in ("what is ", "now", "?"))
    content = [before, part, *after]
    assert to_sample(turns(content)).messages[0] == user("what is ", media, "now?")


def test_a_part_without_a_source_stands_for_the_next_of_the_list():
    content = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}]
    raw = turns(content, images=[{"bytes": b"1", "path": "x"}, {"path": "2.png"}])
    assert to_sample(raw).messages[0] == user(image(b"1"), "and", image("2.png"))


def test_a_video_may_be_a_list_of_frames():
    raw = turns("<video><video>", videos=[["1.jpg", "2.jpg"], "v.mp4"])
    assert to_sample(raw).media == (Media("video", ("1.jpg", "2.jpg")), Media("video", "v.mp4"))


@pytest.mark.parametrize(
    "raw,message",
    [
        (turns("<image> <image>", images=["1.png"]),
         "the text has 2 <image> and images holds 1; expected one image for each <image>"),
        (turns("<image>"), "the text has 1 <image> and images holds 0; expected one image for each <image>"),
        (turns("<video>", video=["a", "b"]),
         "the text has 1 <video> and video holds 2; expected one video for each <video>"),
        (turns([{"type": "image"}]), "the text has 1 <image> and images holds 0; expected one image for each <image>"),
    ],
)  # fmt: skip
def test_tags_and_media_must_agree_in_number(raw, message):
    error = fault(raw)
    assert (error.kind, str(error)) == ("media count", message)


@pytest.mark.parametrize(
    "raw",
    [
        {"messages": [{"role": "user", "content": "why?"}]},
        {"messages": [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "so", "loss": False}]},
    ],
)
def test_a_conversation_must_have_something_to_learn(raw):
    error = fault(raw)
    assert error.kind == "no target" and str(error).startswith("no message has loss; expected an answer")


@pytest.mark.parametrize(
    "raw,message",
    [
        (["a"], "a sample is list of 1; expected an object with fields"),
        ({"id": 1, "question": "why?"},
         "fields id, question; expected messages, conversations (sharegpt), instruction and output (alpaca), query and"
         " response, prompt and completion, or text"),
        ({}, "fields none; expected messages"),
        ({"messages": []}, "messages is list of 0; expected a list of at least one message"),
        ({"messages": "why?"}, "messages is 'why?'; expected a list of at least one message"),
        ({"conversations": ["hi"]}, "conversations[0] is 'hi'; expected an object with role and content"),
        ({"messages": [{"role": "human?", "content": "a"}]},
         "messages[0].role is 'human?'; expected one of system, user, human, assistant, gpt, tool"),
        ({"messages": [{"content": "a"}]}, "messages[0].role is nothing; expected one of"),
        ({"conversations": [{"from": 3, "value": "a"}]}, "conversations[0].from is 3; expected one of"),
        (turns(7), "messages[0].content is 7; expected a text or a list of content parts"),
        (turns("why?", None), "messages[1].content is nothing; expected a text or a list of content parts"),
        (turns("why?", " \n"), "messages[1].content is empty; expected a text"),
        (turns([]), "messages[0].content is empty; expected a text"),
        ({"conversations": [{"from": "human", "value": ""}]}, "conversations[0].value is empty; expected a text"),
        (turns([{"type": "audio", "audio": "a.wav"}]),
         "messages[0].content[0].type is 'audio'; expected text, image, image_url, video, video_url"),
        (turns(["a"]), "messages[0].content[0] is 'a'; expected an object with type"),
        (turns([{"type": "text"}]), "messages[0].content[0].text is nothing; expected a text"),
        (turns([{"type": "text", "text": "a", "image": "a.png"}]),
         "messages[0].content[0].image would be lost, as it is not read; give it a part of its own"),
        (turns([{"type": "image", "image": "a.png", "max_pixels": 9}]),
         "messages[0].content[0].max_pixels is not known; expected image, image_url, path, url alone"),
        (turns([{"type": "image", "image": ""}]), "messages[0].content[0].image is ''; expected a path, a data URI"),
        (turns("why?", images=[3]), "images[0] is 3; expected a path, a data URI"),
        (turns("why?", images=["a.png"], image="b.png"), "images and image are both given; expected one of them"),
        ({"messages": [{"role": "assistant", "content": "a"}], "images": ["a.png"]},
         "media without a user message; expected a tag where they belong"),
        (turns("why?", system="a") | {"messages": [{"role": "system", "content": "b"}, *turns("why?")["messages"]]},
         "a system message after another message; expected one at most, and first"),
        (turns("why?", system=3), "system is 3; expected a text"),
        ({"messages": [{"role": "user", "content": "a", "loss": True}]},
         "messages[0].loss is true in a message of user; only an answer can be learnt"),
        ({"messages": [{"role": "assistant", "content": "a", "loss": "yes"}]},
         "messages[0].loss is 'yes'; expected true, false, 1 or 0"),
        ({"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]},
         "messages[0].tool_calls would be lost, as it is not read; write the calls into content"),
        (turns("why?", tools=[{}]), "tools would be lost, as it is not read; write the tools into the system message"),
        ({"instruction": "why?"}, "output is nothing; expected a text"),
        ({"instruction": "", "output": "so"}, "instruction is empty; expected a text"),
        ({"instruction": "why?", "input": ["a"], "output": "so"}, "input is list of 1; expected a text"),
        ({"query": "why?", "response": ""}, "response is empty; expected a text"),
        ({"query": "why?", "response": "so", "history": "a"}, "history is 'a'; expected a list of [question, answer]"),
        ({"query": "why?", "response": "so", "history": [["a"]]},
         "history[0] is list of 1; expected [question, answer], two texts"),
        ({"text": ["a"]}, "text is list of 1; expected a text"),
        ({"text": ""}, "text is empty; expected a text"),
        ({"text": "a", "images": ["a.png"]}, "images beside text; expected messages, as a plain text has no images"),
        ({"text": {"a": "b" * 100}}, "text is dict of 1; expected a text"),
        (turns(1, "a") | {"messages": "x" * 100}, f"messages is '{'x' * 56}...; expected a list"),
    ],
)  # fmt: skip
def test_a_bad_sample_is_refused_with_its_field(raw, message):
    error = fault(raw)
    assert error.kind == "bad format"
    assert str(error).startswith(message)
