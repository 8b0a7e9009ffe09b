"""A sample once it is read, whatever its format: a conversation with media, or a plain text."""

import dataclasses

ROLES = ("system", "user", "assistant", "tool")


class SampleError(ValueError):
    """A sample that can't be used.

    Attributes:
      kind: short and fixed, for counting: "bad json", "bad format", "media count", "missing media", "corrupt media",
        "refused media", "aspect ratio", "too long", "no target".
    """

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


@dataclasses.dataclass(frozen=True)
class Media:
    """An image or a video among the text.

    Attributes:
      kind: "image" or "video".
      source: a path, a data URI, or the bytes of a file; for a video also the paths of its frames in order.
    """

    kind: str
    source: str | bytes | tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Message:
    """One turn.

    Attributes:
      role: one of ROLES.
      parts: text and media in reading order; no two texts follow each other.
      has_loss: whether the model learns to say this; true by default for the assistant alone.
    """

    role: str
    parts: tuple[str | Media, ...]
    has_loss: bool

    @property
    def text(self) -> str:
        """The text parts together."""
        return "".join(part for part in self.parts if isinstance(part, str))


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Messages in turn; a system message is the first, if there is one."""

    messages: tuple[Message, ...]

    @property
    def media(self) -> tuple[Media, ...]:
        """All images and videos in reading order."""
        return tuple(part for message in self.messages for part in message.parts if isinstance(part, Media))


@dataclasses.dataclass(frozen=True)
class PlainText:
    """A text for pretraining: every token is a target."""

    text: str


Sample = Conversation | PlainText
