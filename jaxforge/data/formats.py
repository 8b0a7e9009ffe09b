"""From a parsed JSON object to a Sample, whichever of the known formats it has.

The formats, sought in this order:

| format | fields |
|---|---|
| messages | `messages`: objects with `role` and `content`, a text or a list of OpenAI parts, perhaps `loss` |
| sharegpt | `conversations`: objects with `from` and `value` |
| alpaca | `instruction`, `output`, and perhaps `input`, `system`, `history` (pairs of question and answer) |
| query and response | `query`, `response`, and perhaps `system`, `history`; also `prompt` and `completion` |
| plain text | `text` |

Images and videos are named by `images` and `videos` (or `image`, `video`), a list or one alone.  Each `<image>` or
`<video>` in a text stands for the next of them.  Where no text has a tag, they come before the text of the first user
message.  Any other field is left alone: datasets carry ids and sources.  A field whose value is null counts as absent.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from jaxforge.data.conversation import Conversation, Media, Message, PlainText, Sample, SampleError

KNOWN = (
    "messages, conversations (sharegpt), instruction and output (alpaca), query and response, prompt and completion,"
    " or text"
)
ROLE_NAMES = {
    "system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant", "tool": "tool",
}  # fmt: skip
# What these hold would be lost without a word: a sample that has one is refused.
UNREAD = {
    "tools": "write the tools into the system message",
    "objects": "write the boxes into the text",
    "audios": "no model here hears",
    "audio": "no model here hears",
}
UNREAD_OF_MESSAGE = {
    "tool_calls": "write the calls into content",
    "function_call": "write the call into content",
    "reasoning_content": "write the reasoning into content",
}
SOURCE_KEYS = {
    "image": ("image", "image_url", "path", "url"),
    "video": ("video", "video_url", "path", "url"),
}
PART_KINDS = {"image": "image", "image_url": "image", "video": "video", "video_url": "video"}
_TAG = re.compile("<(image|video)>")


@dataclasses.dataclass(frozen=True)
class _Tag:
    """Stands where the next image or video of the sample's list belongs."""

    kind: str


@dataclasses.dataclass
class _Turn:
    """A message whose media may still be tags."""

    role: str
    parts: list[str | Media | _Tag]
    has_loss: bool


def to_sample(raw: Any) -> Sample:
    """The sample that a parsed JSON object describes, in any format of the module's docstring.

    Raises SampleError: "bad format" with the field, what was found and what is expected; "media count" where tags and
    media disagree in number; "no target" where no message has loss.
    """
    if not isinstance(raw, Mapping):
        raise _bad("a sample", "an object with fields", raw)
    fields = {key: value for key, value in raw.items() if value is not None}
    _refuse_unread(fields, UNREAD, "")
    if "messages" in fields:
        turns = _system(fields) + _message_list(fields["messages"], "messages")
    elif "conversations" in fields:
        turns = _system(fields) + _message_list(fields["conversations"], "conversations")
    elif "instruction" in fields:
        turns = _question_and_answer(fields, _alpaca_question(fields), "instruction", "output")
    elif "query" in fields:
        turns = _question_and_answer(fields, _text(fields, "query"), "query", "response")
    elif "prompt" in fields:
        turns = _question_and_answer(fields, _text(fields, "prompt"), "prompt", "completion")
    elif "text" in fields:
        return _plain_text(fields)
    else:
        raise SampleError("bad format", f"fields {', '.join(map(str, fields)) or 'none'}; expected {KNOWN}")
    _check_turns(turns)
    _place_media(turns, fields)
    return Conversation(tuple(Message(turn.role, _joined(turn.parts), turn.has_loss) for turn in turns))


def _message_list(messages: Any, field: str) -> list[_Turn]:
    if not isinstance(messages, list) or not messages:
        raise _bad(field, "a list of at least one message", messages)
    return [_message(message, f"{field}[{number}]") for number, message in enumerate(messages)]


def _message(message: Any, where: str) -> _Turn:
    if not isinstance(message, Mapping):
        raise _bad(where, "an object with role and content, or from and value", message)
    message = {key: value for key, value in message.items() if value is not None}
    _refuse_unread(message, UNREAD_OF_MESSAGE, f"{where}.")
    role_key = "from" if "from" in message and "role" not in message else "role"
    text_key = "value" if "value" in message and "content" not in message else "content"
    name = message.get(role_key)
    if not isinstance(name, str) or name not in ROLE_NAMES:
        raise _bad(f"{where}.{role_key}", f"one of {', '.join(ROLE_NAMES)}", name)
    # OpenAI's name for the flag is weight
    flag = "weight" if "weight" in message and "loss" not in message else "loss"
    return _turn(ROLE_NAMES[name], message.get(text_key), f"{where}.{text_key}", _loss(message.get(flag), name, where))


def _loss(flag: Any, name: str, where: str) -> bool:
    """Whether a message counts in the loss: by its flag, else if it is the assistant's."""
    is_answer = ROLE_NAMES[name] == "assistant"
    if flag is None:
        return is_answer
    if not isinstance(flag, bool | int | float) or flag not in (0, 1):
        raise _bad(f"{where}.loss", "true, false, 1 or 0", flag)
    if flag and not is_answer:
        raise SampleError("bad format", f"{where}.loss is true in a message of {name}; only an answer can be learnt")
    return bool(flag)


def _turn(role: str, content: Any, where: str, has_loss: bool | None = None) -> _Turn:
    """A turn of a text or of content parts; a question or an answer may not be empty."""
    if isinstance(content, str):
        parts = _split_tags(content)
    elif isinstance(content, list):
        parts = [part for number, raw in enumerate(content) for part in _content_part(raw, f"{where}[{number}]")]
    else:
        raise _bad(where, "a text or a list of content parts", content)
    if role in ("user", "assistant") and not any(not isinstance(part, str) or part.strip() for part in parts):
        raise SampleError("bad format", f"{where} is empty; expected a text")
    return _Turn(role, parts, role == "assistant" if has_loss is None else has_loss)


def _content_part(part: Any, where: str) -> list[str | Media | _Tag]:
    """An OpenAI content part.  An image or video without a source stands for the next of the sample's list."""
    if not isinstance(part, Mapping):
        raise _bad(where, "an object with type", part)
    part = {key: value for key, value in part.items() if value is not None}
    if part.get("type") == "text":
        _refuse_unread(part, {name: "give it a part of its own" for name in PART_KINDS}, f"{where}.")
        return _split_tags(_text(part, "text", f"{where}."))
    kind = PART_KINDS.get(part["type"]) if isinstance(part.get("type"), str) else None
    if kind is None:
        raise _bad(f"{where}.type", f"text, {', '.join(PART_KINDS)}", part.get("type"))
    unknown = part.keys() - {"type", "detail", *SOURCE_KEYS[kind]}
    if unknown:
        raise SampleError(
            "bad format",
            f"{where}.{min(unknown)} is not known; expected {', '.join(SOURCE_KEYS[kind])} alone, as sizes and frame"
            " rates are those of config.data",
        )
    key = next((key for key in SOURCE_KEYS[kind] if key in part), None)
    return [_Tag(kind) if key is None else Media(kind, _source(part[key], kind, f"{where}.{key}"))]


def _alpaca_question(fields: Mapping[str, Any]) -> str:
    """Instruction and input on lines of their own."""
    texts = [_text(fields, "instruction", default=""), _text(fields, "input", default="")]
    return "\n".join(text for text in texts if text)


def _question_and_answer(fields: Mapping[str, Any], question: str, asked: str, answered: str) -> list[_Turn]:
    """System message, history, the question of field `asked` and the answer of field `answered`."""
    turns = _system(fields)
    history = fields.get("history", [])
    if not isinstance(history, list):
        raise _bad("history", "a list of [question, answer]", history)
    for number, pair in enumerate(history):
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise _bad(f"history[{number}]", "[question, answer], two texts", pair)
        turns.append(_turn("user", pair[0], f"history[{number}][0]"))
        turns.append(_turn("assistant", pair[1], f"history[{number}][1]"))
    turns.append(_turn("user", question, asked))
    turns.append(_turn("assistant", _text(fields, answered), answered))
    return turns


def _system(fields: Mapping[str, Any]) -> list[_Turn]:
    """The system message that `system` gives; tables have an empty text where there is none."""
    text = _text(fields, "system", default="")
    return [_turn("system", text, "system")] if text else []


def _plain_text(fields: Mapping[str, Any]) -> PlainText:
    text = _text(fields, "text")
    if not text:
        raise SampleError("bad format", "text is empty; expected a text")
    for kind in ("image", "video"):
        name, media = _media_list(fields, kind)
        if media:
            raise SampleError("bad format", f"{name} beside text; expected messages, as a plain text has no {kind}s")
    return PlainText(text)


def _check_turns(turns: list[_Turn]) -> None:
    if any(turn.role == "system" for turn in turns[1:]):
        raise SampleError("bad format", "a system message after another message; expected one at most, and first")
    if not any(turn.has_loss for turn in turns):
        raise SampleError("no target", "no message has loss; expected an answer of the assistant whose loss is true")


def _place_media(turns: list[_Turn], fields: Mapping[str, Any]) -> None:
    """Puts the media of the sample's lists where the tags are, or before the first user message's text."""
    untagged: list[str | Media | _Tag] = []
    for kind in ("image", "video"):
        name, media = _media_list(fields, kind)
        tags = sum(part == _Tag(kind) for turn in turns for part in turn.parts)
        if tags == 0:
            untagged += media
        elif tags != len(media):
            raise SampleError(
                "media count",
                f"the text has {tags} <{kind}> and {name} holds {len(media)}; expected one {kind} for each <{kind}>",
            )
        else:
            following = iter(media)
            for turn in turns:
                turn.parts = [next(following) if part == _Tag(kind) else part for part in turn.parts]
    if untagged:
        first = next((turn for turn in turns if turn.role == "user"), None)
        if first is None:
            raise SampleError("bad format", "media without a user message; expected a tag where they belong")
        first.parts = untagged + first.parts


def _media_list(fields: Mapping[str, Any], kind: str) -> tuple[str, list[Media]]:
    """The name of the field that lists the media of a kind, and the media."""
    several, single = f"{kind}s", kind
    if fields.get(several) and fields.get(single):
        raise SampleError("bad format", f"{several} and {single} are both given; expected one of them")
    name = single if fields.get(single) else several
    given = fields.get(name) or []
    given = given if isinstance(given, list) else [given]
    return name, [Media(kind, _source(source, kind, f"{name}[{n}]")) for n, source in enumerate(given)]


def _source(source: Any, kind: str, where: str) -> str | bytes | tuple[str, ...]:
    """A path, address or data URI; bytes, as parquet files hold them; for a video also a list of its frames."""
    if isinstance(source, Mapping):
        source = next((source[key] for key in ("bytes", "path", "url") if source.get(key)), source)
    if isinstance(source, str | bytes) and source:
        return source
    if kind == "video" and isinstance(source, list) and source and all(isinstance(s, str) and s for s in source):
        return tuple(source)
    frames = ", or a list of frames" if kind == "video" else ""
    raise _bad(where, f"a path, a data URI, or an object with bytes, path or url{frames}", source)


def _split_tags(text: str) -> list[str | Media | _Tag]:
    """A text and its tags in reading order, without empty texts."""
    pieces = _TAG.split(text)  # texts at even places, kinds of tags at odd ones
    parts: list[str | Media | _Tag] = [_Tag(piece) if n % 2 else piece for n, piece in enumerate(pieces)]
    return [part for part in parts if part != ""]


def _joined(parts: list[str | Media | _Tag]) -> tuple[str | Media, ...]:
    """The parts of a turn whose tags are all placed, neighbouring texts made one."""
    joined: list[str | Media] = []
    for part in parts:
        assert not isinstance(part, _Tag)
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part)
    return tuple(joined)


def _text(fields: Mapping[str, Any], name: str, prefix: str = "", default: str | None = None) -> str:
    text = fields.get(name, default)
    if not isinstance(text, str):
        raise _bad(prefix + name, "a text", text)
    return text


def _refuse_unread(fields: Mapping[str, Any], unread: Mapping[str, str], prefix: str) -> None:
    for name, way_out in unread.items():
        if fields.get(name):
            raise SampleError("bad format", f"{prefix}{name} would be lost, as it is not read; {way_out}")


def _bad(where: str, expected: str, found: Any) -> SampleError:
    """What was found instead: short, as a sample can be long."""
    if found is None:
        shown = "nothing"
    elif isinstance(found, str | bool | int | float):
        text = repr(found)
        shown = text if len(text) <= 60 else f"{text[:57]}..."
    elif isinstance(found, list | tuple | dict):
        shown = f"{type(found).__name__} of {len(found)}"
    else:
        shown = type(found).__name__
    return SampleError("bad format", f"{where} is {shown}; expected {expected}")
