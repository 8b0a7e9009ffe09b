"""Makes what `make demo-sft` fine-tunes: a tiny checkpoint in Hugging Face's format, and a JSONL file with images.

    python scripts/make_sft_demo.py FOLDER

FOLDER/hf is a Qwen2.5-VL with random weights (config.json, safetensors, tokenizer, image settings), FOLDER/train.jsonl
and FOLDER/eval.jsonl hold questions about coloured shapes, whose pictures lie in FOLDER/images.
"""

import json
import random
import sys
from pathlib import Path

import jax
from flax import nnx
from PIL import Image, ImageDraw
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxforge.checkpoint.arrays import DeviceArrays
from jaxforge.checkpoint.hf import export
from jaxforge.config.model_schema import DecoderConfig, EncoderConfig, ModelConfig, ProjectorConfig
from jaxforge.models import VisionLanguageModel

COLOURS = {"red": (210, 40, 40), "green": (40, 160, 60), "blue": (40, 70, 210), "yellow": (235, 205, 40)}
SHAPES = ("circle", "square", "triangle")
QUESTIONS = {
    "What colour is it?": "{colour}",
    "Which shape is this?": "a {shape}",
    "Describe the image.": "A {colour} {shape} on a {ground} ground.",
}
GROUNDS = {"white": (255, 255, 255), "black": (0, 0, 0)}
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
           "<|video_pad|>")  # fmt: skip
SIZES = {"train": 600, "eval": 64}


def main(folder: Path) -> None:
    if folder.exists():
        print(f"{folder} is there already")
        return
    unfinished = folder.with_name(folder.name + ".unfinished")
    texts = []
    (unfinished / "images").mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    for split, size in SIZES.items():
        lines = [make_sample(unfinished, split, number, rng) for number in range(size)]
        (unfinished / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        texts += [message["content"] for line in lines for message in line["messages"]]
    tokenizer = make_tokenizer([*texts, "system user assistant You are a helpful assistant."])
    make_checkpoint(unfinished / "hf", tokenizer)
    unfinished.rename(folder)
    print(f"made {folder}")


def make_sample(folder: Path, split: str, number: int, rng: random.Random) -> dict:
    """Draws a picture; a question about it and its answer, as a line of the JSONL file."""
    colour, shape, ground = rng.choice(list(COLOURS)), rng.choice(SHAPES), rng.choice(list(GROUNDS))
    width, height = rng.randint(56, 112), rng.randint(56, 112)
    image = Image.new("RGB", (width, height), GROUNDS[ground])
    size = rng.randint(30, 50)
    left, top = rng.randint(2, width - size - 2), rng.randint(2, height - size - 2)
    box, draw = (left, top, left + size, top + size), ImageDraw.Draw(image)
    if shape == "circle":
        draw.ellipse(box, fill=COLOURS[colour])
    elif shape == "square":
        draw.rectangle(box, fill=COLOURS[colour])
    else:
        draw.polygon([(left, box[3]), (box[2], box[3]), (left + size // 2, top)], fill=COLOURS[colour])
    path = f"images/{split}_{number:04d}.png"
    image.save(folder / path)
    question = rng.choice(list(QUESTIONS))
    answer = QUESTIONS[question].format(colour=colour, shape=shape, ground=ground)
    return {
        "messages": [
            {"role": "user", "content": f"<image>{question}"},
            {"role": "assistant", "content": answer},
        ],
        "images": [path],
    }


def make_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE of the demo's own words, with Qwen's special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return tokenizer


def make_checkpoint(folder: Path, tokenizer: Tokenizer) -> None:
    """Random weights, and the files that go along with them."""
    encoder = EncoderConfig(
        num_layers=2, hidden_size=64, ffn_hidden_size=128, num_attention_heads=4, kv_channels=16, patch_size=14,
        window_size=112, fullatt_block_indexes=(1,), init_method_std=0.05,
    )  # fmt: skip
    decoder = DecoderConfig(
        num_layers=2, hidden_size=96, ffn_hidden_size=256, num_attention_heads=4, num_query_groups=2, kv_channels=24,
        vocab_size=tokenizer.get_vocab_size(), add_qkv_bias=True, mrope_section=(4, 4, 4), rotary_base=1e4,
        untie_embeddings_and_output_weights=False, init_method_std=0.05,
    )  # fmt: skip
    model = ModelConfig(decoder=decoder, encoder=encoder, projector=ProjectorConfig())

    @jax.jit
    def initial():
        return nnx.to_pure_dict(nnx.state(VisionLanguageModel(model, rngs=nnx.Rngs(params=0))))

    export(folder, DeviceArrays(initial(), "float32"), model, dtype="float32")
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"})
    write_json(
        folder / "preprocessor_config.json",
        {
            "image_processor_type": "Qwen2VLImageProcessor",
            "min_pixels": 56 * 56,
            "max_pixels": 112 * 112,
            "patch_size": encoder.patch_size,
            "temporal_patch_size": encoder.temporal_patch_size,
            "merge_size": encoder.spatial_merge_size,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
    )
    config = json.loads((folder / "config.json").read_text())
    tokens = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
              "vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}  # fmt: skip
    write_json(folder / "config.json", config | {name: tokenizer.token_to_id(text) for name, text in tokens.items()})


def write_json(path: Path, values: dict) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
