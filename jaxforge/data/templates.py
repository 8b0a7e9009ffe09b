"""How a conversation becomes text: the chat formats of Qwen (ChatML) and Llama 3, and which of the text is learnt."""

import dataclasses
from typing import Protocol

from jaxforge.config.errors import ConfigError
from jaxforge.data.conversation import Conversation, Media, Message, SampleError


@dataclasses.dataclass(frozen=True)
class Piece:
    """A stretch of a rendered conversation.

    Attributes:
      text: what stands there, special tokens written out.
      is_target: whether the model learns to say it.
    """

    text: str
    is_target: bool


class ChatTemplate(Protocol):
    """Renders conversations.

    Attributes:
      control_tokens: special tokens that give the conversation its form; a sample's own text must not act as them.
      settings: stable text of all that the rendering depends on.
    """

    @property
    def control_tokens(self) -> tuple[str, ...]: ...

    @property
    def settings(self) -> str: ...

    def render(self, conversation: Conversation) -> list[Piece | Media]:
        """Text and media in reading order.  Answers with loss and their end tokens are targets, nothing else is."""
        ...


def with_system(conversation: Conversation, default_system: str | None) -> tuple[Message, ...]:
    """The messages, after a system message of `default_system` if they have none."""
    messages = conversation.messages
    if default_system is None or messages[0].role == "system":
        return messages
    return (Message("system", (default_system,), has_loss=False), *messages)


@dataclasses.dataclass(frozen=True)
class ChatML:
    """ChatML as Qwen2.5, Qwen3 and their VL models use it, without thinking and tool calls of their own.

    A turn is `<|im_start|>role`, a newline, the content as it is, `<|im_end|>`, a newline.  Answers of tools that
    follow each other share a user turn, each in a `<tool_response>` block.  Qwen3's own template also removes the
    thinking of earlier answers; this one leaves every answer as the sample has it.

    Attributes:
      default_system: the system message of conversations without one; None writes none.
    """

    default_system: str | None = None

    control_tokens = ("<|im_start|>", "<|im_end|>")

    @property
    def settings(self) -> str:
        return f"chatml, system {self.default_system!r}"

    def render(self, conversation: Conversation) -> list[Piece | Media]:
        messages = with_system(conversation, self.default_system)
        roles = [message.role for message in messages]
        pieces: list[Piece | Media] = []
        for number, message in enumerate(messages):
            if message.role == "tool":
                opens = roles[number - 1 : number] != ["tool"]
                closes = roles[number + 1 : number + 2] != ["tool"]
                pieces.append(Piece(("<|im_start|>user" if opens else "") + "\n<tool_response>\n", False))
                pieces += _content(message)
                pieces.append(Piece("\n</tool_response>" + ("<|im_end|>\n" if closes else ""), False))
            else:
                pieces.append(Piece(f"<|im_start|>{message.role}\n", False))
                pieces += _content(message)
                pieces += [Piece("<|im_end|>", message.has_loss), Piece("\n", False)]
        return pieces


@dataclasses.dataclass(frozen=True)
class Llama3:
    """The chat format of Llama 3 (its model card): headers, trimmed contents, `<|eot_id|>` after each turn.

    Plain Llama 3: the lines on knowledge and today's date, which the template of Llama 3.1 adds to the system message,
    are not written.  The answer of a tool has the role `ipython`.

    Attributes:
      default_system: the system message of conversations without one; None writes none.
    """

    default_system: str | None = None

    control_tokens = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")

    @property
    def settings(self) -> str:
        return f"llama3, system {self.default_system!r}"

    def render(self, conversation: Conversation) -> list[Piece | Media]:
        if conversation.media:
            raise SampleError("bad format", "an image or video; expected text alone, as the format of Llama 3 has")
        pieces: list[Piece | Media] = [Piece("<|begin_of_text|>", False)]
        for message in with_system(conversation, self.default_system):
            role = "ipython" if message.role == "tool" else message.role
            pieces.append(Piece(f"<|start_header_id|>{role}<|end_header_id|>\n\n", False))
            pieces.append(Piece(message.text.strip() + "<|eot_id|>", message.has_loss))
        return pieces


@dataclasses.dataclass(frozen=True)
class NoTemplate:
    """Stands for a tokenizer that has no chat format: plain texts can still be read, a conversation can't.

    Attributes:
      reason: the message of the ConfigError that the first conversation raises.
    """

    reason: str

    control_tokens = ()
    settings = "none"

    def render(self, conversation: Conversation) -> list[Piece | Media]:
        raise ConfigError(self.reason)


def _content(message: Message) -> list[Piece | Media]:
    return [Piece(part, message.has_loss) if isinstance(part, str) else part for part in message.parts]
