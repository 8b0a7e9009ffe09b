"""Writes tests/data/processor_fixtures: what transformers makes of images, videos and their positions.

Run in a Python 3.11 environment with torch 2.13.0 (CPU) and transformers 5.24, without torchvision:

    python scripts/make_processor_fixtures.py

Without torchvision transformers resizes images by Pillow.  Its video processors resize by torchvision alone, so of them
only frame sampling, sizes and the order of patches are kept.
"""

import json
import sys
import types
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.models.qwen2_5_vl import Qwen2_5_VLConfig, Qwen2_5_VLModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize
from transformers.models.qwen3_vl import Qwen3VLConfig, Qwen3VLModel, Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as smart_resize_video
from transformers.video_utils import VideoMetadata

TESTS = Path(__file__).parents[1] / "tests" / "data"
FIXTURES = TESTS / "processor_fixtures"
sys.path.insert(0, str(TESTS))

from synthetic_image import synthetic_image  # noqa: E402

IMAGE_SIZES = [
    (100, 150), (31, 639), (14, 14), (1, 150), (28, 28), (42, 42), (70, 70), (63, 49), (336, 504), (448, 448),
    (777, 1333), (10, 2000), (2000, 10), (10, 2270), (3000, 4000), (5000, 7001),
]  # fmt: skip
PIXEL_IMAGES = [(50, 75), (64, 64), (131, 40)]
VIDEO_SIZES = [(2, 100, 150), (3, 480, 640), (5, 20, 300), (16, 1080, 1920), (64, 720, 1280), (2, 2160, 3840)]
# frames of the video, its frames per second, frames per second that are taken, most frames
SAMPLINGS = [
    (300, 30, 2, 64), (299, 29.97, 2, 64), (1000, 25, 2, 16), (7, 25, 2, 64), (3, 30, 2, 64), (48, 24, 1, 64),
    (49, 23.976, 2, 7), (2, 30, 2, 64), (90, 12.5, 4, 64),
]  # fmt: skip
TEXT, IMAGE, VIDEO = 0, 1, 2  # transformers' numbers for what a token is


def qwen2_video_processor() -> type:
    """The Qwen2-VL video processor, whose module imports torchvision, though what is used here never calls it."""
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
        sys.modules[name] = types.ModuleType(name)
    functional = sys.modules["torchvision.transforms.v2.functional"] = types.ModuleType("functional")
    sys.modules["torchvision.transforms.v2"].functional = functional
    processor = import_module("transformers.models.qwen2_vl.video_processing_qwen2_vl").Qwen2VLVideoProcessor
    for name in [name for name in sys.modules if name.startswith("torchvision")]:
        del sys.modules[name]
    return processor


def image_sizes() -> list[dict[str, Any]]:
    """The size that each image is resized to under each rule; None where it is refused."""
    rules = [
        (
            "qwen2_5_vit",
            28,
            Qwen2VLImageProcessorPil.size["shortest_edge"],
            Qwen2VLImageProcessorPil.size["longest_edge"],
        ),
        ("qwen2_5_vit", 28, 3136, 12_845_056),  # the published Qwen2.5-VL checkpoints
        ("qwen3_vit", 32, 65_536, 16_777_216),  # the published Qwen3-VL checkpoints
    ]
    cases = []
    for family, factor, low, high in rules:
        for height, width in IMAGE_SIZES:
            try:
                resized = smart_resize(height, width, factor, low, high)
            except ValueError:
                resized = None
            cases.append(dict(family=family, min_pixels=low, max_pixels=high, size=(height, width), resized=resized))
    return cases


def pixel_values() -> dict[str, np.ndarray]:
    """Patches of small images as each family's processor makes them; the family's mean and std are the class's."""
    qwen3 = dict(patch_size=16, size={"shortest_edge": 4096, "longest_edge": 16_777_216},
                 image_mean=[0.5] * 3, image_std=[0.5] * 3)  # fmt: skip
    arrays = {}
    for family, settings in (("qwen2_5_vit", {}), ("qwen3_vit", qwen3)):
        processor = Qwen2VLImageProcessorPil(**settings)
        for seed, (height, width) in enumerate(PIXEL_IMAGES):
            out = processor(synthetic_image(height, width, seed), return_tensors="np")
            arrays[f"{family} {height}x{width} pixels"] = out["pixel_values"]
            arrays[f"{family} {height}x{width} grid"] = out["image_grid_thw"][0]
    return arrays


def videos(qwen2_video: type) -> dict[str, Any]:
    """Frames taken, their size, and their timestamps."""
    sampled, sizes = [], []
    for total, fps, taken, most in SAMPLINGS:
        for family, processor in (("qwen2_5_vit", qwen2_video), ("qwen3_vit", Qwen3VLVideoProcessor)):
            video = processor(size={"shortest_edge": 4096, "longest_edge": 25_165_824}, max_frames=most)
            metadata = VideoMetadata(total_num_frames=total, fps=fps)
            kept = {"max_frames": most, "temporal_patch_size": 2} if family == "qwen2_5_vit" else {}
            indexes = [int(i) for i in video.sample_frames(metadata=metadata, fps=taken, **kept)]
            timestamps = Qwen3VLProcessor._calculate_timestamps(None, list(indexes), fps, 2)
            metadata.frames_indices = indexes
            sampled.append(
                dict(family=family, num_frames=total, fps=fps, video_fps=taken, max_frames=most, indexes=indexes,
                     timestamps=timestamps, seconds_per_patch=2 / metadata.sampled_fps)
            )  # fmt: skip
    for frames, height, width in VIDEO_SIZES:
        low, high = 4096, 25_165_824
        resized = smart_resize_video(frames, height, width, 2, 32, low, high)
        sizes.append(
            dict(family="qwen3_vit", min_pixels=low, max_pixels=high, size=(frames, height, width), resized=resized)
        )
        low, high = qwen2_video.size["shortest_edge"], qwen2_video.size["longest_edge"]
        resized = smart_resize(height, width, 28, low, high)
        sizes.append(
            dict(family="qwen2_5_vit", min_pixels=low, max_pixels=high, size=(frames, height, width), resized=resized)
        )
    return {"sampled": sampled, "sizes": sizes}


def video_patches(qwen2_video: type) -> dict[str, np.ndarray]:
    """Numbered pixels of 4 frames [frame, y, x, channel] in patches of 2 x 2 pixels, merged 2 x 2, 2 frames each."""
    numbers = np.arange(4 * 8 * 12 * 3).reshape(4, 8, 12, 3)
    frames = torch.from_numpy(numbers).permute(0, 3, 1, 2).contiguous()[None]
    arrays = {}
    for family, processor in (("qwen2_5_vit", qwen2_video), ("qwen3_vit", Qwen3VLVideoProcessor)):
        patches, *grid = processor().patchify(frames, patch_size=2, merge_size=2, temporal_patch_size=2)
        arrays[f"{family} video patches"] = patches[0].numpy()
        arrays[f"{family} video grid"] = np.array(grid)
    return arrays


def positions() -> list[dict[str, Any]]:
    """mRoPE positions of sequences, each a list of runs: ["text", n], ["image", h, w], ["video", t, h, w, seconds].

    `seconds` lie between two temporal patches of a Qwen2.5-VL video.  For Qwen3-VL, whose videos have a text before
    each temporal patch, these are runs of their own: ["video", 1, h, w].
    """
    text_and_images = [
        [["text", 3], ["image", 4, 4], ["text", 2]],
        [["text", 1], ["image", 2, 6], ["text", 1], ["image", 8, 4], ["text", 4], ["image", 2, 2]],
        [["text", 7]],
    ]
    qwen2_5 = [
        *text_and_images,
        [
            ["text", 4],
            ["image", 6, 4],
            ["text", 3],
            ["video", 3, 8, 12, 1.0],
            ["text", 5],
            ["image", 2, 2],
            ["text", 1],
        ],
        [["text", 2], ["video", 5, 4, 20, 0.7], ["text", 2]],
        [["text", 2], ["video", 6, 2, 8, 1 / 3], ["text", 1], ["video", 2, 4, 4, 0.5], ["text", 2]],
        # longer in time than in space: text after it stands elsewhere than in the paper and in earlier releases
        [["text", 2], ["video", 8, 4, 4, 1.0], ["text", 3]],
    ]
    frame = ["video", 1, 4, 6]
    qwen3 = [
        *text_and_images,
        [["text", 4], ["image", 6, 4], ["text", 3], frame, ["text", 2], frame, ["text", 2], frame, ["text", 5]],
    ]
    cases = []
    for family, sequences in (("qwen2_5_vit", qwen2_5), ("qwen3_vit", qwen3)):
        model = tiny_model(family)
        for runs in sequences:
            ids, deltas = model.get_rope_index(**rope_inputs(family, runs))
            cases.append(dict(family=family, runs=runs, positions=ids[:, 0].tolist(), delta=int(deltas[0, 0])))
    return cases


def rope_inputs(family: str, runs: list[list]) -> dict[str, Any]:
    """What get_rope_index takes, for one sequence with nothing padded."""
    kinds, images, grids, seconds = [], [], [], []
    for kind, *numbers in runs:
        if kind == "text":
            kinds += [TEXT] * numbers[0]
        elif kind == "image":
            images.append([1, *numbers])
            kinds += [IMAGE] * (numbers[0] * numbers[1] // 4)
        else:
            grids.append(numbers[:3])
            seconds += numbers[3:]
            kinds += [VIDEO] * (numbers[0] * numbers[1] * numbers[2] // 4)
    inputs = dict(input_ids=torch.ones(1, len(kinds), dtype=torch.long), mm_token_type_ids=torch.tensor([kinds]))
    if images:
        inputs["image_grid_thw"] = torch.tensor(images)
    if grids and family == "qwen3_vit":  # one video of them all, which get_rope_index takes apart
        inputs["video_grid_thw"] = torch.tensor([[len(grids), *grids[0][1:]]])
    elif grids:
        inputs["video_grid_thw"] = torch.tensor(grids)
        inputs["second_per_grid_ts"] = torch.tensor(seconds)
    return inputs


def tiny_model(family: str) -> Any:
    """A model of the family; only its spatial_merge_size 2 and tokens_per_second 2 matter."""
    text = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, intermediate_size=16,
                vocab_size=32)  # fmt: skip
    rope = dict(rope_type="default", rope_theta=1e4, mrope_section=[1, 1, 2])
    vision = dict(depth=1, hidden_size=16, num_heads=2, intermediate_size=16, out_hidden_size=16, spatial_merge_size=2)
    if family == "qwen3_vit":
        vision |= dict(deepstack_visual_indexes=[0], num_position_embeddings=4)
        return Qwen3VLModel(
            Qwen3VLConfig(text_config=text | dict(head_dim=8, rope_parameters=rope), vision_config=vision)
        )
    vision |= dict(fullatt_block_indexes=[0], tokens_per_second=2)
    return Qwen2_5_VLModel(Qwen2_5_VLConfig(text_config=text | dict(rope_parameters=rope), vision_config=vision))


def processor_config() -> Mapping[str, Any]:
    """A processor_config.json as transformers writes it, with settings that are nobody's defaults."""
    image = Qwen2VLImageProcessorPil(patch_size=16, min_pixels=4096, max_pixels=2**20, image_mean=[0.4, 0.5, 0.6])
    video = Qwen3VLVideoProcessor(
        size={"shortest_edge": 8192, "longest_edge": 2**22}, image_mean=[0.4, 0.5, 0.6], image_std=image.image_std
    )
    return {
        "image_processor": image.to_dict(),
        "video_processor": video.to_dict(),
        "processor_class": "Qwen3VLProcessor",
    }


def write_json(name: str, content: Any) -> None:
    text = json.dumps(content, indent=1)
    (FIXTURES / name).write_text(text + "\n")


def main() -> None:
    FIXTURES.mkdir(exist_ok=True)
    config = processor_config()  # before torchvision's stand-ins
    qwen2_video = qwen2_video_processor()
    write_json("processor_config.json", config)
    write_json("image_sizes.json", image_sizes())
    write_json("videos.json", videos(qwen2_video))
    write_json("positions.json", positions())
    np.savez_compressed(FIXTURES / "patches.npz", **pixel_values(), **video_patches(qwen2_video))
    made_by = f"transformers {transformers.__version__}, torch {torch.__version__}"
    print(f"wrote {FIXTURES} with {made_by}: {sum(path.stat().st_size for path in FIXTURES.iterdir())} bytes")


if __name__ == "__main__":
    main()
