"""The chat template that a checkpoint brings along, a jinja text, run in a sandbox; and which of its text is learnt."""

import datetime
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from jaxforge.config.errors import ConfigError
from jaxforge.data.conversation import Conversation, Media, Message, SampleError
from jaxforge.data.templates import Piece, with_system

# Noncharacters of Unicode: no text has a use for them, no template looks for them, and trimming leaves them alone.
_BLOCK_START, _BLOCK_END, _ANSWER_START, _ANSWER_END = "\ufde0", "\ufde1", "\ufde2", "\ufde3"
_MEDIA = re.compile(r"<\|vision_start\|><\|(image|video)_pad\|><\|vision_end\|>")
# What strftime_now gives: the day that Llama 3.1's template names where it isn't told one.  A run that is resumed
# tomorrow must read the same tokens, so the real date has no place here.
_TODAY = datetime.datetime(2024, 7, 26)
_WAY_OUT = "use data.chat_template=chatml or llama3, if the model knows that format, or edit the template"


class JinjaTemplate:
    """A chat template as `transformers` runs it: the same variables, filters and functions, apart from today's date.

    Where the template marks answers with `{% generation %}`, the marked text is the target.  Otherwise an answer is
    found by rendering a second time with a sign in its place: the target is the answer and what follows it up to
    and including the next special token, which must come at once or after white space.

    Attributes:
      control_tokens: the special tokens that occur in the template.
      settings: stable text of all that the rendering depends on.
    """

    def __init__(
        self,
        template: str,
        variables: Mapping[str, str],
        special_tokens: Sequence[str],
        default_system: str | None = None,
    ):
        """Compiles a template.

        Args:
          template: the jinja text.
          variables: what the template knows besides the messages: `bos_token`, `eos_token` and other named tokens.
          special_tokens: the texts of all special tokens; one of them ends an answer.
          default_system: the system message of conversations without one; None leaves it to the template.

        Raises ConfigError where the template isn't valid jinja.
        """
        try:
            self._template = _environment().from_string(template)
        except jinja2.TemplateError as error:
            raise ConfigError(f"data.chat_template=checkpoint: the template isn't valid: {error}; {_WAY_OUT}") from None
        self._variables = dict(variables)
        self._default_system = default_system
        self._marks_answers = re.search(r"{%[-+]?\s*generation\s*[-+]?%}", template) is not None
        self._special = re.compile("|".join(map(re.escape, sorted(special_tokens, key=len, reverse=True))) or "(?!)")
        named = set(self._variables.values())
        self.control_tokens = tuple(token for token in special_tokens if token in template or token in named)
        digest = hashlib.sha256(json.dumps([template, self._variables], sort_keys=True).encode()).hexdigest()
        self.settings = f"jinja {digest}, system {default_system!r}"

    def render(self, conversation: Conversation) -> list[Piece | Media]:
        """Text and media in reading order, the answers with loss and their end tokens being targets.

        Raises SampleError where the template refuses the conversation, ConfigError where it can't be followed: it
        fails, changes or leaves out an answer, gives it no end token, or writes other media than the sample has.
        """
        messages = with_system(conversation, self._default_system)
        pieces = self._marked_blocks(messages) if self._marks_answers else self._found_answers(messages)
        return _with_media(pieces, conversation.media)

    def chatml_system(self) -> str | None:
        """The system message that a ChatML template writes for a conversation without one; None if it writes none."""
        message = Message("user", ("question",), has_loss=False)
        try:
            text = self._run([_as_dict(message, message.parts, as_list=False)])
        except (ConfigError, SampleError):
            return None
        found = re.match(r"<\|im_start\|>system\n(.*?)<\|im_end\|>", text, re.DOTALL)
        return found[1] if found else None

    def _marked_blocks(self, messages: Sequence[Message]) -> list[Piece]:
        """The pieces of a template that marks its answers."""
        text = self._run(_as_dicts(messages))
        outer, *blocks = text.split(_BLOCK_START)
        answers = [message for message in messages if message.role == "assistant"]
        if len(blocks) != len(answers):
            raise _unusable(f"marks {len(blocks)} blocks as generation where there are {len(answers)} answers")
        pieces = [Piece(outer, False)]
        for block, answer in zip(blocks, answers, strict=True):
            inside, _, after = block.partition(_BLOCK_END)
            pieces += [Piece(inside, answer.has_loss), Piece(after, False)]
        return pieces

    def _found_answers(self, messages: Sequence[Message]) -> list[Piece]:
        """The pieces of a template that marks nothing: its answers are found by a sign in their place."""
        text = self._run(_as_dicts(messages))
        answers = [part for message in messages if message.has_loss for part in message.parts if isinstance(part, str)]
        signs = [f"{_ANSWER_START}{number}{_ANSWER_END}" for number in range(len(answers))]
        signed = self._run(_as_dicts(messages, signs))
        found = re.findall(f"{_ANSWER_START}\\d+{_ANSWER_END}", signed)
        if found != signs:
            raise _unusable("leaves out, repeats or reorders answers")
        before, *between = re.split(f"{_ANSWER_START}\\d+{_ANSWER_END}", signed)
        if not text.startswith(before):
            raise _unusable("changes with what the answers say, as templates do that rewrite thinking")
        pieces, place = [Piece(before, False)], len(before)
        last_parts = _last_parts(messages)
        for answer, after, is_last_part in zip(answers, between, last_parts, strict=True):
            shown = next((shown for shown in _trimmings(answer) if text.startswith(shown + after, place)), None)
            if shown is None:
                raise _unusable(f"changes the answer {answer[:40]!r}")
            end = self._end_of_answer(after) if is_last_part else 0
            pieces += [Piece(shown + after[:end], True), Piece(after[end:], False)]
            place += len(shown) + len(after)
        if place != len(text):
            raise _unusable("changes with what the answers say, as templates do that rewrite thinking")
        return pieces

    def _end_of_answer(self, after: str) -> int:
        """Where the token that ends an answer itself ends, in the text after the answer."""
        end_token = self._special.search(after)
        if end_token is None or after[: end_token.start()].strip():
            raise _unusable("writes no special token after an answer, so that a model would never learn to stop")
        return end_token.end()

    def _run(self, messages: list[dict[str, Any]]) -> str:
        try:
            return self._template.render(
                self._variables, messages=messages, tools=None, documents=None, add_generation_prompt=False
            )
        except _Refused as error:
            raise SampleError("bad format", f"the chat template refuses the conversation: {error}") from None
        except Exception as error:  # a template is a program, and can fail in any way
            raise _unusable(f"fails: {type(error).__name__}: {error}") from None


class _Refused(jinja2.TemplateError):
    """What a template raises by `raise_exception`."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` ... `{% endgeneration %}`: puts the text between two signs."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_sign"), [], [], body).set_lineno(line)

    def _sign(self, caller: Any) -> str:
        return f"{_BLOCK_START}{caller()}{_BLOCK_END}"


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without private names, which the sandbox would trust once they are set."""

    def __init__(*args: Any, **kwargs: Any):
        values = dict(*args[1:], **kwargs)
        for name in values:
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)


def _refuse_private(name: Any) -> None:
    if str(name).startswith("_"):
        raise jinja2.sandbox.SecurityError(f"a namespace with the private name {name}")


def _environment() -> jinja2.Environment:
    """Jinja as chat templates expect it, which reaches no file, no object but the messages, and no clock."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.globals = {
        "range": environment.globals["range"],
        "namespace": _Namespace,
        "raise_exception": _raise_exception,
        "strftime_now": _TODAY.strftime,
    }
    environment.filters["tojson"] = _to_json
    return environment


def _raise_exception(message: str) -> None:
    raise _Refused(message)


def _to_json(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Jinja's own filter would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _as_dicts(messages: Sequence[Message], signs: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Messages as a template reads them, `signs` in the place of the text of answers with loss."""
    as_list = any(isinstance(part, Media) for message in messages for part in message.parts)
    following = iter(signs or ())
    dicts = []
    for message in messages:
        parts = message.parts
        if message.has_loss and signs is not None:
            parts = tuple(next(following) if isinstance(part, str) else part for part in parts)
        dicts.append(_as_dict(message, parts, as_list))
    return dicts


def _as_dict(message: Message, parts: Sequence[str | Media], as_list: bool) -> dict[str, Any]:
    """A message; its content is a list of content parts where the conversation has media, as processors give it."""
    if not as_list:
        return {"role": message.role, "content": "".join(part for part in parts if isinstance(part, str))}
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": part.kind, part.kind: ""}
        for part in parts
    ]
    return {"role": message.role, "content": content}


def _last_parts(messages: Sequence[Message]) -> list[bool]:
    """For each text part of the answers with loss, whether its answer ends with it."""
    return [
        number == len(message.parts) - 1
        for message in messages
        if message.has_loss
        for number, part in enumerate(message.parts)
        if isinstance(part, str)
    ]


def _trimmings(answer: str) -> list[str]:
    """The answer as it is, and as templates trim it."""
    return [answer, answer.strip(), answer.lstrip(), answer.rstrip(), answer.strip("\n"), answer.lstrip("\n")]


def _with_media(pieces: Sequence[Piece], media: Sequence[Media]) -> list[Piece | Media]:
    """The pieces with the sample's media in the place of the vision tokens that the template wrote for them."""
    parts: list[Piece | Media] = []
    following = list(media)
    kinds: list[str] = []
    for piece in pieces:
        texts = _MEDIA.split(piece.text)  # texts at even places, kinds of media at odd ones
        for number, text in enumerate(texts):
            if number % 2 == 0:
                parts += [Piece(text, piece.is_target)] if text else []
                continue
            kinds.append(text)
            if len(kinds) <= len(following):
                parts.append(following[len(kinds) - 1])
    expected = [item.kind for item in media]
    if kinds != expected:
        raise _unusable(
            f"writes places for {', '.join(kinds) or 'no media'} where the sample has"
            f" {', '.join(expected) or 'no media'}"
        )
    return parts


def _unusable(what: str) -> ConfigError:
    return ConfigError(f"data.chat_template=checkpoint: the template {what}; {_WAY_OUT}")
