"""Where the sizes and the normalisation of images come from: the config, the checkpoint, the model's family."""

import json
import shutil

import pytest
from data_configs import text_config
from media_samples import FIXTURES, media_config

from jaxforge.config.errors import ConfigError
from jaxforge.data.image_rules import image_rule, video_rule

# preprocessor_config.json of the published Qwen2.5-VL-7B-Instruct
QWEN2_5_FILE = {
    "min_pixels": 3136,
    "max_pixels": 12_845_056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
}
# those of the published Qwen3-VL-8B-Instruct, for images and for videos
QWEN3_FILE = {
    "size": {"longest_edge": 16_777_216, "shortest_edge": 65_536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
QWEN3_VIDEO_FILE = QWEN3_FILE | {"size": {"longest_edge": 25_165_824, "shortest_edge": 4096}}


def folder(path, **files):
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def test_a_checkpoint_says_its_sizes_and_normalisation(tmp_path):
    rule = image_rule(media_config(), folder(tmp_path, preprocessor_config=QWEN2_5_FILE))
    assert (rule.min_pixels, rule.max_pixels, rule.factor) == (3136, 12_845_056, 28)
    assert rule.mean == (0.48145466, 0.4578275, 0.40821073)
    assert rule.std == (0.26862954, 0.26130258, 0.27577711)


def test_newer_files_give_the_sizes_as_edges(tmp_path):
    checkpoint = folder(tmp_path, preprocessor_config=QWEN3_FILE, video_preprocessor_config=QWEN3_VIDEO_FILE)
    rule = image_rule(media_config("qwen3_vit"), checkpoint)
    assert (rule.min_pixels, rule.max_pixels, rule.factor) == (65_536, 16_777_216, 32)
    assert rule.mean == rule.std == (0.5, 0.5, 0.5)
    video = video_rule(media_config("qwen3_vit"), checkpoint)
    assert (video.min_pixels, video.max_pixels, video.max_frame_pixels) == (4096, 25_165_824, 16_777_216)


def test_the_file_that_transformers_5_writes_wins(tmp_path):
    shutil.copy(FIXTURES / "processor_config.json", tmp_path)
    # an older file beside it, which transformers doesn't read then
    checkpoint = folder(tmp_path, preprocessor_config=QWEN2_5_FILE)
    rule = image_rule(media_config("qwen3_vit"), checkpoint)
    assert (rule.min_pixels, rule.max_pixels, rule.mean) == (4096, 2**20, (0.4, 0.5, 0.6))
    video = video_rule(media_config("qwen3_vit"), checkpoint)
    assert (video.min_pixels, video.max_pixels) == (8192, 2**22)


def test_a_processor_config_without_an_image_processor_leaves_it_to_the_older_file(tmp_path):
    checkpoint = folder(tmp_path, processor_config={"processor_class": "X"}, preprocessor_config=QWEN2_5_FILE)
    assert image_rule(media_config(), checkpoint).max_pixels == 12_845_056


def test_the_run_wins_over_the_checkpoint(tmp_path):
    checkpoint = folder(tmp_path, preprocessor_config=QWEN2_5_FILE)
    rule = image_rule(media_config(min_pixels=5000, max_pixels=100_000), checkpoint)
    assert (rule.min_pixels, rule.max_pixels) == (5000, 100_000)


def test_a_largest_area_below_the_checkpoints_smallest_lowers_it(tmp_path):
    rule = image_rule(media_config(max_pixels=2000), folder(tmp_path, preprocessor_config=QWEN2_5_FILE))
    assert (rule.min_pixels, rule.max_pixels) == (2000, 2000)


@pytest.mark.parametrize("checkpoint", [None, "empty"])
def test_without_a_checkpoints_file_the_family_decides(checkpoint, tmp_path):
    path = None if checkpoint is None else tmp_path
    qwen2_5, qwen3 = image_rule(media_config(), path), image_rule(media_config("qwen3_vit"), path)
    assert (qwen2_5.min_pixels, qwen2_5.max_pixels) == (56 * 56, 28 * 28 * 1280)
    assert qwen2_5.mean == (0.48145466, 0.4578275, 0.40821073)
    # image_size 1344 x 1344 is less than the family's 16,777,216
    assert (qwen3.min_pixels, qwen3.max_pixels, qwen3.mean) == (65_536, 1344 * 1344, (0.5, 0.5, 0.5))


def test_a_grey_encoder_takes_the_first_channels_numbers():
    rule = image_rule(media_config(encoder=dict(in_channels=1)), None)
    assert (rule.mean, rule.std) == ((0.48145466,), (0.26862954,))


def test_frames_are_no_larger_than_images():
    assert video_rule(media_config(max_pixels=50_000), None).max_frame_pixels == 50_000


def test_equal_rules_have_equal_settings_and_others_differ():
    rule = image_rule(media_config(), None)
    assert rule.settings == image_rule(media_config(), None).settings
    assert rule.settings != image_rule(media_config(max_pixels=100_000), None).settings
    assert video_rule(media_config(), None).settings != video_rule(media_config(video_fps=1.0), None).settings


@pytest.mark.parametrize(
    "change, message",
    [
        ({"patch_size": 16}, "patch_size=16, but model.encoder.patch_size=14"),
        ({"merge_size": 4}, "merge_size=4, but model.encoder.spatial_merge_size=2"),
        ({"temporal_patch_size": 1}, "temporal_patch_size=1, but model.encoder.temporal_patch_size=2"),
        ({"resample": 2}, "resample=2 is not supported"),
        ({"do_normalize": False}, "do_normalize=False is not supported"),
        ({"rescale_factor": 1.0}, "rescale_factor=1.0 is not supported"),
        ({"max_pixels": "many"}, "max_pixels='many' must be a positive number"),
        ({"image_mean": [0.5]}, "image_mean=.* must be three numbers"),
        ({"image_std": [0.5, 0, 0.5]}, "image_std=.* has a 0"),
        ({"size": 100}, "size=100 must give shortest_edge and longest_edge"),
    ],
)
def test_what_the_model_can_not_read_is_refused_with_file_and_field(change, message, tmp_path):
    with pytest.raises(ConfigError, match=f"preprocessor_config.json: {message}"):
        image_rule(media_config(), folder(tmp_path, preprocessor_config=QWEN2_5_FILE | change))


def test_videos_normalised_otherwise_than_images_are_refused(tmp_path):
    other = QWEN3_VIDEO_FILE | {"image_mean": [0.4, 0.4, 0.4]}
    checkpoint = folder(tmp_path, preprocessor_config=QWEN3_FILE, video_preprocessor_config=other)
    with pytest.raises(ConfigError, match="video_preprocessor_config.json: image_mean=.* is not that of images"):
        video_rule(media_config("qwen3_vit"), checkpoint)


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_broken_file_is_named(text, tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(text)
    with pytest.raises(ConfigError, match="preprocessor_config.json .*copy it again"):
        image_rule(media_config(), tmp_path)


@pytest.mark.parametrize(
    "data, message",
    [
        (dict(max_pixels=500), "data.max_pixels=500 is less than one visual token of 28x28 pixels; use 784"),
        (dict(min_pixels=9000, max_pixels=5000), "data.min_pixels=9000 must be .* no more than .* 5000"),
        (dict(min_pixels=0), "data.min_pixels=0 must be positive"),
    ],
)
def test_bounds_that_leave_no_size_are_refused(data, message):
    with pytest.raises(ConfigError, match=message):
        image_rule(media_config(**data), None)


@pytest.mark.parametrize(
    "data, message",
    [
        (dict(video_fps=0.0), "data.video_fps=0.0 must be positive"),
        (dict(video_max_frames=1), "data.video_max_frames=1 is less than one temporal patch of .*=2 frames"),
    ],
)
def test_counts_that_leave_no_frame_are_refused(data, message):
    with pytest.raises(ConfigError, match=message):
        video_rule(media_config(**data), None)


def test_a_language_model_reads_no_images():
    with pytest.raises(ConfigError, match="model.encoder=None reads no images"):
        image_rule(text_config(), None)


def test_other_numbers_of_channels_are_refused():
    with pytest.raises(ConfigError, match="in_channels=4: images are read in 3 channels"):
        image_rule(media_config(encoder=dict(in_channels=4)), None)
