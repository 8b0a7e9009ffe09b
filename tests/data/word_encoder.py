"""An encoder of samples that needs no tokenizer: texts of numbers, which are the tokens."""

import json

import numpy as np
from data_configs import ENCODER

from jaxforge.data.conversation import SampleError
from jaxforge.data.packing import Document
from jaxforge.data.patches import patchify


class WordEncoder:
    """A token for each number of a plain text; a text longer than a row becomes several documents.

    "image" is an image of 2 x 2 squares before the text, "broken KIND" fails whenever it is looked at, and "rotten
    KIND" when it is read alone, after as many tokens as it has words.
    """

    def __init__(self, seq_length=32, settings="words"):
        self.seq_length, self.settings = seq_length, settings
        self.measured = []

    def sizes(self, sample, root):
        self.measured.append(sample.text)
        return [(len(tokens), 16 if image else 0) for tokens, image in self._parts(sample.text, reading=False)]

    def documents(self, sample, root):
        return [self._document(*part) for part in self._parts(sample.text, reading=True)]

    def _parts(self, text, reading):
        words = text.split()
        if words[0] == "broken" or (words[0] == "rotten" and reading):
            raise SampleError(" ".join(words[1:]), f"the text says {text!r}")
        image = words[0] == "image"
        tokens = [1] * 4 + [int(word) for word in words[1:]] if image else [int(w) if w.isdigit() else 9 for w in words]
        return [(tokens[i : i + self.seq_length], image) for i in range(0, len(tokens), self.seq_length)]

    def _document(self, tokens, image):
        visual = np.arange(len(tokens)) < (4 if image else 0)
        images = (patchify(np.zeros((32, 32, 1), np.float32), ENCODER),) if image else ()
        return Document(np.array(tokens, np.int32), ~visual, visual, images)


def write_texts(path, texts):
    """A .jsonl of plain texts; one that has them already is left alone, with its time of change."""
    content = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    if not path.exists() or path.read_text() != content:
        path.write_text(content)
    return str(path)
