"""A tokenizer that needs no files: UTF-8 bytes and five special tokens."""

from collections.abc import Iterable


class ByteTokenizer:
    """One token for each byte, after the special tokens.

    `pad` is 0, the token of a row's padding; `image` stands where a visual token's features go; a question starts
    with `question`, its answer with `answer` and ends with `end`.
    """

    pad, image, question, answer, end = range(5)
    num_special = 5
    vocab_size = num_special + 256

    def encode(self, text: str) -> list[int]:
        """The UTF-8 bytes of a text as tokens; no special token is added."""
        return [self.num_special + byte for byte in text.encode()]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of the byte tokens; special tokens are left out and broken UTF-8 becomes U+FFFD.

        Raises ValueError for a token outside the vocabulary.
        """
        tokens = [int(token) for token in tokens]
        outside = [token for token in tokens if not 0 <= token < self.vocab_size]
        if outside:
            raise ValueError(f"token {outside[0]} is outside the vocabulary of {self.vocab_size}")
        return bytes(token - self.num_special for token in tokens if token >= self.num_special).decode(errors="replace")
