"""Numbers that follow from the config, by hand."""

import pytest

from jaxforge.config import default_config, encoder_defaults, resolve
from jaxforge.config.derived import (
    data_parallel_size,
    data_source,
    encoder_tensor_parallel_size,
    lr_decay_iters,
    num_microbatches,
    padded_vocab_size,
    patches_per_full_image,
    projector_ffn_hidden_size,
)
from jaxforge.config.schema import Config, DataConfig, DecoderConfig


@pytest.mark.parametrize(
    ("rows", "multiple", "padded"), [(50257, 128, 50304), (65535, 128, 65536), (256, 128, 256), (257, 128, 384)]
)
def test_the_vocabulary_is_padded_to_the_next_multiple(rows, multiple, padded):
    decoder = DecoderConfig(vocab_size=rows, make_vocab_size_divisible_by=multiple)
    assert padded_vocab_size(decoder) == padded


def test_16_rows_of_2_on_8_devices_in_pairs_are_2_microbatches():
    config = default_config()
    config.parallel.tensor_model_parallel_size = 2
    config.train.update(global_batch_size=16, micro_batch_size=2)
    assert data_parallel_size(resolve(config), 8) == 4
    assert num_microbatches(resolve(config), 8) == 2


def test_a_pipeline_takes_devices_from_data_parallelism():
    config = default_config()
    config.parallel.update(tensor_model_parallel_size=2, pipeline_model_parallel_size=4)
    config.train.update(global_batch_size=16, micro_batch_size=2)
    assert data_parallel_size(resolve(config), 16) == 2
    assert num_microbatches(resolve(config), 16) == 4


def test_the_encoder_inherits_the_tensor_parallel_size_unless_it_has_its_own():
    config = default_config()
    config.parallel.tensor_model_parallel_size = 4
    assert encoder_tensor_parallel_size(resolve(config)) == 4
    config.model.encoder = encoder_defaults("qwen2_5_vit")
    assert encoder_tensor_parallel_size(resolve(config)) == 4
    config.model.encoder.tensor_model_parallel_size = 1
    assert encoder_tensor_parallel_size(resolve(config)) == 1


def test_the_projector_is_as_wide_as_its_input_unless_it_has_its_own_width():
    config = default_config()
    config.model.encoder = encoder_defaults("qwen2_5_vit")
    config.model.encoder.update(hidden_size=1280, spatial_merge_size=2)
    assert projector_ffn_hidden_size(resolve(config).model) == 5120
    config.model.projector = {"ffn_hidden_size": 64}
    assert projector_ffn_hidden_size(resolve(config).model) == 64


def test_a_full_image_has_whole_visual_tokens():
    encoder = encoder_defaults("qwen2_5_vit")
    encoder.update(patch_size=14, spatial_merge_size=2, image_size=(56, 100))
    config = default_config()
    config.model.encoder = encoder
    # 56 = 2 x 28 and 100 = 3 x 28 + 16: 6 squares of 4 patches
    assert patches_per_full_image(resolve(config).model.encoder) == 24


def test_the_learning_rate_decays_over_the_run_unless_told():
    config = default_config()
    config.train.steps = 70
    assert lr_decay_iters(resolve(config)) == 70
    config.optimizer.lr_decay_iters = 90
    assert lr_decay_iters(resolve(config)) == 90


@pytest.mark.parametrize(
    ("source", "path", "resolved"),
    [
        ("auto", (), "synthetic"),
        ("auto", ("a.jsonl",), "files"),
        ("digits", (), "digits"),
        ("files", ("a.jsonl",), "files"),
        ("synthetic", (), "synthetic"),
    ],
)
def test_a_run_reads_its_files_where_it_has_some(source, path, resolved):
    assert data_source(Config(data=DataConfig(source=source, path=path))) == resolved
