"""Small byte-level tokenizers in the form of Hugging Face folders, with the special tokens of Qwen and Llama 3.

The id of a byte is its value, so the expected ids of a text are its UTF-8 bytes.  Two merges show where texts were
joined: a double newline is 256, "hi" is 257.  Special tokens follow from 258.
"""

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

NEWLINES, HI = 256, 257
QWEN = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>", "<|box_start|>",
)  # fmt: skip
ENDOFTEXT, IM_START, IM_END, VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD, BOX_START = range(258, 266)
LLAMA = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
BEGIN_OF_TEXT, END_OF_TEXT, START_HEADER, END_HEADER, EOT = range(258, 263)


def byte_level(special: tuple[str, ...]) -> tokenizers.Tokenizer:
    """The tokenizer without a folder."""
    vocab = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    newline = _byte_symbols()[ord("\n")]
    vocab |= {newline * 2: NEWLINES, "hi": HI}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[(newline, newline), ("h", "i")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def qwen_folder(folder: Path, **config) -> Path:
    """A tokenizer as Qwen's: no beginning-of-text token.  `config` changes tokenizer_config.json."""
    return save(byte_level(QWEN), folder, **{"bos_token": None, "eos_token": "<|im_end|>"} | config)


def llama_folder(folder: Path, adds_bos=True, **config) -> Path:
    """A tokenizer as Llama 3's, which puts a beginning-of-text token before every text."""
    tokenizer = byte_level(LLAMA)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", BEGIN_OF_TEXT)]
        )
    return save(tokenizer, folder, **{"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"} | config)


def save(tokenizer: tokenizers.Tokenizer, folder: Path, **config) -> Path:
    """Writes tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def _byte_symbols() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2): itself where it is printable."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
