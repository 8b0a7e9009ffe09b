"""The byte tokenizer."""

import pytest

from jaxforge.data.tokenizer import ByteTokenizer

tokenizer = ByteTokenizer()


@pytest.mark.parametrize("text", ["", "how many?", "3071", "zwölf", "数字 7", "\x00\x7f", "🧮"])
def test_a_text_survives(text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_byte_has_a_token_after_the_five_special_ones():
    # "A" is byte 65; "é" is bytes 195 and 169 in UTF-8
    assert tokenizer.encode("Aé") == [5 + 65, 5 + 195, 5 + 169]
    assert tokenizer.vocab_size == 5 + 256


def test_special_tokens_are_distinct_and_padding_is_0():
    special = [tokenizer.pad, tokenizer.image, tokenizer.question, tokenizer.answer, tokenizer.end]
    assert sorted(special) == [0, 1, 2, 3, 4]
    assert tokenizer.pad == 0


def test_special_tokens_are_not_text():
    assert tokenizer.decode([tokenizer.answer, *tokenizer.encode("42"), tokenizer.end, tokenizer.pad]) == "42"


def test_broken_utf8_is_marked_instead_of_raising():
    assert tokenizer.decode(tokenizer.encode("é")[:1]) == "�"


@pytest.mark.parametrize("token", [-1, 261])
def test_a_token_outside_the_vocabulary_is_refused(token):
    with pytest.raises(ValueError, match=f"token {token} is outside the vocabulary of 261"):
        tokenizer.decode([token])
