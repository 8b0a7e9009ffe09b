"""Makes tests/parity/fixtures: tiny random models of `transformers`, what they read, and what they answer.

    python3.11 -m venv parity && parity/bin/pip install torch==2.13.0 transformers==5.24.0
    parity/bin/python scripts/make_parity_fixtures.py

(torch's CPU build is enough; twenty seconds, 9 MB.)  It runs in a venv of its own, because neither package is one of
JaxForge's; jaxforge isn't imported here.  The same machine and versions give the same files, byte for byte; another
CPU may round differently.

Each folder is a model as `save_pretrained` writes it, in fp32 (but Qwen3-VL's experts lie as in the published folders),
and beside it:

inputs.npz: documents, end to end.
  lengths [documents], and for each token: input_ids; loss_mask, whether it is to be predicted; token_types, 0 for text,
  1 for image, 2 for video.  With an encoder also media in reading order: media_document [media], the document of each;
  media_grids [media, 3], frames, patches down, patches across; media_is_video; media_seconds, from one frame of the
  grid to the next; and pixel_values, [patches of all media, C].

expected.npz: what the model makes of one document at a time, with its own rotary positions.
  logits [tokens, vocabulary] fp32; positions [3, tokens]; loss, the mean over the targets of all documents; and its
  gradients, "gradient/NAME" for every tensor NAME of the model's safetensors files that has one.
"""

import argparse
import dataclasses
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

FIXTURES = Path(__file__).parent.parent / "tests" / "parity" / "fixtures"

VOCABULARY = 131  # a multiple of nothing; padded to 256 and cut in two, it leaves the second device 3 true rows
VISION_START, VISION_END, IMAGE, VIDEO = 118, 119, 120, 121
TEXT_TOKENS = 118
IGNORE = -100
# attention and experts without kernels of their own
WRITTEN_OUT = dict(attn_implementation="eager", experts_implementation="eager")
SELECTION_BIAS = "e_score_correction_bias"


@dataclasses.dataclass(frozen=True)
class Media:
    """An image, or a video of several frames: a grid of patches."""

    frames: int
    down: int
    across: int
    is_video: bool = False
    seconds: float = 0.0


def image(down: int, across: int) -> Media:
    return Media(1, down, across)


def video(frames: int, down: int, across: int, seconds: float) -> Media:
    return Media(frames, down, across, True, seconds)


Spec = list[int | Media]  # a document: numbers of text tokens, and media among them

# Past the 32 positions of the Llama-3.1 fixture before scaling, far past, and within.
TEXT_DOCUMENTS: list[Spec] = [[96], [23], [61], [45]]
# With windows of 6 x 6 patches: whole ones, cut ones, images smaller than a window.  With a 6 x 6 table of positions:
# grids above and below it, in one direction and in both.  The second document has no image.  The video lasts no longer
# than its frames are high: this release numbers the text after a video by its height or width alone (Qwen2.5-VL), while
# JaxForge counts its last moment too, as the paper and the code released with the weights.
MEDIA_DOCUMENTS: list[Spec] = [
    [4, image(8, 10), 3, image(14, 4), 9],
    [19],
    [3, video(3, 8, 6, seconds=0.4), 7],
    [1, image(4, 4), 5, image(2, 12), 6],
]

TEXT = dict(
    vocab_size=VOCABULARY, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2,
    max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=None,
)  # fmt: skip
VISION = dict(
    depth=3, hidden_size=24, num_heads=2, patch_size=4, temporal_patch_size=2, spatial_merge_size=2, in_channels=3,
)  # fmt: skip
TOKENS = dict(
    image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=VISION_START, vision_end_token_id=VISION_END
)


def llama(tied: bool) -> transformers.PreTrainedConfig:
    # wavelengths 6, 12 and 23 lie on both sides of original / high = 8, 42 and more past original / low = 32
    rope = dict(
        rope_type="llama3", rope_theta=50.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=32,
    )  # fmt: skip
    return transformers.LlamaConfig(
        **TEXT, hidden_size=48, intermediate_size=70, rms_norm_eps=1e-3, rope_parameters=rope,
        tie_word_embeddings=tied,
    )  # fmt: skip


def qwen2() -> transformers.PreTrainedConfig:
    return transformers.Qwen2Config(
        **TEXT, hidden_size=48, intermediate_size=70, rms_norm_eps=2e-3,
        rope_parameters=dict(rope_type="default", rope_theta=7e4), tie_word_embeddings=True,
    )  # fmt: skip


def qwen3() -> transformers.PreTrainedConfig:
    return transformers.Qwen3Config(
        **TEXT, hidden_size=40, intermediate_size=58, head_dim=16, rms_norm_eps=1e-3,
        rope_parameters=dict(rope_type="default", rope_theta=3e5), tie_word_embeddings=False,
    )  # fmt: skip


def qwen2_5_vl(tied: bool) -> transformers.PreTrainedConfig:
    text = TEXT | dict(
        hidden_size=48, intermediate_size=70, rms_norm_eps=1e-3,
        rope_parameters=dict(rope_type="default", rope_theta=2e4, mrope_section=[1, 2, 3]),
    )  # fmt: skip
    vision = VISION | dict(
        intermediate_size=38, out_hidden_size=48, window_size=24, fullatt_block_indexes=[1], tokens_per_second=4,
        hidden_act="silu",
    )  # fmt: skip
    return transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=tied, **TOKENS)


def qwen3_vl(tied: bool) -> transformers.PreTrainedConfig:
    rope = dict(rope_type="default", rope_theta=2e4, mrope_section=[4, 2, 2], mrope_interleaved=True)
    text = TEXT | dict(
        num_hidden_layers=3, hidden_size=40, intermediate_size=58, head_dim=16, rms_norm_eps=1e-3, rope_parameters=rope
    )
    vision = VISION | dict(
        depth=4, intermediate_size=38, out_hidden_size=40, num_position_embeddings=36, deepstack_visual_indexes=[0, 2],
        hidden_act="gelu_pytorch_tanh",
    )  # fmt: skip
    return transformers.Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=tied, **TOKENS)


# Widths at which no matrix of an expert is square, and every projection's own.
EXPERTS = dict(hidden_size=40, intermediate_size=22, moe_intermediate_size=14, num_experts_per_tok=2)


def qwen3_moe(tied: bool) -> transformers.PreTrainedConfig:
    """With the first and the last of three layers of experts, or the second alone."""
    layers = dict(decoder_sparse_step=2, mlp_only_layers=[]) if tied else dict(mlp_only_layers=[1])
    return transformers.Qwen3MoeConfig(
        **TEXT | EXPERTS | dict(num_hidden_layers=3), **layers, num_experts=6, norm_topk_prob=not tied, head_dim=16,
        rms_norm_eps=1e-3, rope_parameters=dict(rope_type="default", rope_theta=3e5), tie_word_embeddings=tied,
    )  # fmt: skip


def qwen3_vl_moe() -> transformers.PreTrainedConfig:
    config = qwen3_vl(tied=False).to_dict()
    text = {key: value for key, value in config["text_config"].items() if key != "model_type"}
    vision = {key: value for key, value in config["vision_config"].items() if key != "model_type"}
    return transformers.Qwen3VLMoeConfig(
        text_config=text | EXPERTS | dict(num_experts=6, norm_topk_prob=True, tie_word_embeddings=False),
        vision_config=vision, tie_word_embeddings=False, **TOKENS,
    )  # fmt: skip


def deepseek_v3(is_small: bool) -> transformers.PreTrainedConfig:
    """With a dense layer first, and two shared experts; or without whatever a release may be without."""
    # of the four frequencies 3 ** -i one turns more than twice in 32 positions, one less than half a time
    yarn = dict(
        rope_type="yarn", rope_theta=81.0, factor=8.0, original_max_position_embeddings=32, beta_fast=2.0,
        beta_slow=0.5, mscale=0.7, mscale_all_dim=1.2,
    )  # fmt: skip
    large = dict(
        num_hidden_layers=3, first_k_dense_replace=1, n_shared_experts=2, n_group=4, topk_group=2, norm_topk_prob=True,
        q_lora_rank=12, rope_parameters=yarn, tie_word_embeddings=False,
    )  # fmt: skip
    small = dict(
        num_hidden_layers=2, first_k_dense_replace=0, n_shared_experts=1, n_group=1, topk_group=1, norm_topk_prob=False,
        q_lora_rank=None, rope_parameters=dict(rope_type="default", rope_theta=100.0), tie_word_embeddings=True,
    )  # fmt: skip
    fields = TEXT | EXPERTS | (small if is_small else large)
    return transformers.DeepseekV3Config(
        **fields | dict(num_key_value_heads=4, num_experts_per_tok=3), n_routed_experts=8, routed_scaling_factor=1.5,
        kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=8, v_head_dim=5, rms_norm_eps=1e-6, num_mtp_layers=0,
    )  # fmt: skip


def make_configs() -> dict[str, transformers.PreTrainedConfig]:
    """The models by their folders' names; the order seeds them."""
    return {
        "llama": llama(tied=False),
        "llama_tied": llama(tied=True),
        "qwen2_tied": qwen2(),
        "qwen3_sharded": qwen3(),
        "qwen2_5_vl": qwen2_5_vl(tied=False),
        "qwen2_5_vl_tied": qwen2_5_vl(tied=True),
        "qwen3_vl": qwen3_vl(tied=False),
        "qwen3_vl_tied": qwen3_vl(tied=True),
        "qwen3_moe": qwen3_moe(tied=False),
        "qwen3_moe_tied": qwen3_moe(tied=True),
        "qwen3_vl_moe": qwen3_vl_moe(),
        "deepseek_v3": deepseek_v3(is_small=False),
        "deepseek_v3_tied": deepseek_v3(is_small=True),
    }


def make_model(config: transformers.PreTrainedConfig) -> torch.nn.Module:
    """In fp32."""
    has_encoder = hasattr(config, "vision_config")
    auto = transformers.AutoModelForImageTextToText if has_encoder else transformers.AutoModelForCausalLM
    return auto.from_config(config, dtype=torch.float32, **WRITTEN_OUT).eval()


@torch.no_grad()
def draw_weights(model: torch.nn.Module, seed: int) -> None:
    """Weights with which every part counts: no scale is 1, no bias 0, activations and logits are of order 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in sorted(model.named_parameters()):
        values = torch.randn(weight.shape, generator=generator)
        if "norm" in name or "ln_q" in name:
            values = 0.3 * values + (1 if name.endswith("weight") else 0)
        elif "patch_embed" in name or "pos_embed" in name:
            # features of about 0.01, so that the first norm's epsilon of 1e-6 shows
            fan_in = weight[0].numel() if name.endswith("patch_embed.proj.weight") else 1
            values = 0.01 * values / fan_in**0.5
        elif name.endswith("bias"):
            values = 0.2 * values
        elif "embed_tokens" in name:
            values = values * (1.5 / weight.shape[1] ** 0.5 if _is_tied(model) else 1)
        elif "lm_head" in name:
            values = values * 1.5 / weight.shape[1] ** 0.5
        else:
            # the inputs are last, in the tensor of all experts too
            values = values / weight.shape[-1] ** 0.5
        weight.copy_(values)
    for name, bias in sorted(model.named_buffers()):
        if name.endswith(SELECTION_BIAS):
            # scores lie around 0.5: some choices change, and no expert is left without tokens
            bias.copy_(0.15 * torch.randn(bias.shape, generator=generator))


def _is_tied(model: torch.nn.Module) -> bool:
    return model.get_input_embeddings().weight is model.get_output_embeddings().weight


def make_inputs(config: transformers.PreTrainedConfig, seed: int) -> dict[str, np.ndarray]:
    """What inputs.npz holds."""
    rng = np.random.default_rng(seed)
    has_encoder = hasattr(config, "vision_config")
    # Qwen3-VL has text between the frames of a video: their timestamps
    frames_apart = config.model_type in ("qwen3_vl", "qwen3_vl_moe")
    documents = MEDIA_DOCUMENTS if has_encoder else TEXT_DOCUMENTS
    merge_area = config.vision_config.spatial_merge_size**2 if has_encoder else 1

    def text(number):
        return [(token, 0) for token in rng.integers(3, TEXT_TOKENS if has_encoder else VOCABULARY, number)]

    def visual(media):
        kind, token = (2, VIDEO) if media.is_video else (1, IMAGE)
        frame = [(token, kind)] * (media.down * media.across // merge_area)
        if not frames_apart:
            return [(VISION_START, 0), *frame * media.frames, (VISION_END, 0)]
        return [pair for _ in range(media.frames) for pair in (*text(2), (VISION_START, 0), *frame, (VISION_END, 0))]

    pairs = [
        [pair for part in spec for pair in (visual(part) if isinstance(part, Media) else text(part))]
        for spec in documents
    ]
    tokens, token_types = np.array([pair for document in pairs for pair in document]).T
    inputs = dict(
        lengths=np.array([len(document) for document in pairs]),
        input_ids=tokens,
        loss_mask=(token_types == 0) & (rng.random(len(tokens)) < 0.7),
        token_types=token_types,
    )
    if has_encoder:
        vision = config.vision_config
        media = [(number, part) for number, spec in enumerate(documents) for part in spec if isinstance(part, Media)]
        num_patches = sum(part.frames * part.down * part.across for _, part in media)
        channels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        inputs |= dict(
            media_document=np.array([number for number, _ in media]),
            media_grids=np.array([(part.frames, part.down, part.across) for _, part in media]),
            media_is_video=np.array([part.is_video for _, part in media]),
            media_seconds=np.array([part.seconds for _, part in media]),
            pixel_values=rng.normal(size=(num_patches, channels)).astype(np.float32),
        )
    return inputs


def model_arguments(inputs: dict[str, np.ndarray], model_type: str) -> Iterator[tuple[dict, slice]]:
    """For each document the arguments of the model's forward, labels among them, and its tokens' place in `inputs`."""
    ends = np.cumsum(inputs["lengths"])
    pixels = _pixels_by_media(inputs)
    for number, (start, end) in enumerate(zip(ends - inputs["lengths"], ends, strict=True)):
        span = slice(start, end)
        tokens = torch.from_numpy(inputs["input_ids"][span])[None]
        mask = torch.from_numpy(inputs["loss_mask"][span])[None]
        arguments = dict(input_ids=tokens, labels=torch.where(mask, tokens, IGNORE), use_cache=False)
        if pixels:
            arguments["mm_token_type_ids"] = torch.from_numpy(inputs["token_types"][span])[None]
            for is_video, prefix, suffix in ((False, "image", ""), (True, "video", "_videos")):
                chosen = np.flatnonzero((inputs["media_document"] == number) & (inputs["media_is_video"] == is_video))
                if len(chosen):
                    arguments[f"{prefix}_grid_thw"] = torch.from_numpy(inputs["media_grids"][chosen])
                    arguments[f"pixel_values{suffix}"] = torch.cat([pixels[index] for index in chosen])
                    if is_video and model_type == "qwen2_5_vl":
                        arguments["second_per_grid_ts"] = torch.from_numpy(inputs["media_seconds"][chosen])
        yield arguments, span


def _pixels_by_media(inputs: dict[str, np.ndarray]) -> list[torch.Tensor]:
    if "pixel_values" not in inputs:
        return []
    ends = np.cumsum(inputs["media_grids"].prod(axis=1))
    return [torch.from_numpy(part) for part in np.split(inputs["pixel_values"], ends[:-1])]


def logits_of(model: torch.nn.Module, inputs: dict[str, np.ndarray]) -> np.ndarray:
    """Logits [tokens, vocabulary] fp32, one document at a time."""
    with torch.no_grad():
        parts = [model(**arguments).logits[0] for arguments, _ in model_arguments(inputs, model.config.model_type)]
    return torch.cat(parts).numpy()


def expected_values(model: torch.nn.Module, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What expected.npz holds."""
    pairs = list(model_arguments(inputs, model.config.model_type))
    num_targets = [int((arguments["labels"][:, 1:] != IGNORE).sum()) for arguments, _ in pairs]
    loss = 0.0
    for (arguments, _), number in zip(pairs, num_targets, strict=True):
        # the model's own loss is the mean over one document's targets
        part = model(**arguments).loss * (number / sum(num_targets))
        part.backward()
        loss += part.item()
    return dict(
        logits=logits_of(model, inputs),
        positions=np.concatenate([rotary_positions(model, arguments) for arguments, _ in pairs], axis=1),
        loss=np.float64(loss),
        **gradients(model),
    )


def rotary_positions(model: torch.nn.Module, arguments: dict) -> np.ndarray:
    """Time, height and width of each token [3, S], by the model's own rule."""
    length = arguments["input_ids"].shape[1]
    if "image_grid_thw" not in arguments and "video_grid_thw" not in arguments:
        return np.broadcast_to(np.arange(length), (3, length))
    names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw", "second_per_grid_ts")
    positions, _ = model.model.get_rope_index(**{name: arguments[name] for name in names if name in arguments})
    return positions[:, 0].numpy()


@torch.no_grad()
def gradients(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """Gradients by the names of the weights' tensors: the model is saved with them in the weights' place."""
    weights = {name: weight.clone() for name, weight in model.named_parameters()}
    for weight in model.parameters():
        weight.copy_(weight.grad)
    with tempfile.TemporaryDirectory() as folder:
        save(model, Path(folder))
        tensors = load_file(Path(folder) / "model.safetensors")
    for name, weight in model.named_parameters():
        weight.copy_(weights[name])
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(SELECTION_BIAS)}
    unused = [name for name, tensor in tensors.items() if not tensor.any()]
    assert not unused, f"experts that no token goes to: {unused}"
    return {f"gradient/{name}": tensor.numpy() for name, tensor in tensors.items()}


def save(model: torch.nn.Module, folder: Path, **options) -> None:
    """As the model is published: this release saves Qwen3-VL's experts [experts, out, in], with in and out swapped."""
    model.save_pretrained(folder, **options)
    if model.config.model_type == "qwen3_vl_moe":
        file = folder / "model.safetensors"
        tensors = load_file(file)
        of_experts = [name for name in tensors if ".mlp.experts." in name]
        tensors |= {name: tensors[name].transpose(1, 2).contiguous() for name in of_experts}
        save_file(tensors, file, metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the parity fixtures (see the top of this file).")
    parser.add_argument("--out", type=Path, default=FIXTURES, help="by default tests/parity/fixtures")
    out = parser.parse_args().out
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    for seed, (name, config) in enumerate(make_configs().items()):
        model = make_model(config)
        draw_weights(model, seed)
        inputs = make_inputs(config, seed)
        expected = expected_values(model, inputs)
        folder = out / name
        shutil.rmtree(folder, ignore_errors=True)
        save(model, folder, max_shard_size="40KB" if name.endswith("_sharded") else "50GB")
        np.savez_compressed(folder / "inputs.npz", **inputs)
        np.savez_compressed(folder / "expected.npz", **expected)
        size = sum(path.stat().st_size for path in folder.iterdir())
        print(f"{name}: loss {expected['loss']:.4f}, logits of {np.std(expected['logits']):.2f}, {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
