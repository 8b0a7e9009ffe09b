"""What is refused of the pipeline's fields, with a message that names them."""

import pytest

from jaxforge.config import ConfigError, default_config, resolve, validate
from jaxforge.config.derived import vocabulary_is_over_stages


def config_with(**settings):
    """Eight decoder layers and 8 rows; `settings` are fields of `parallel`."""
    config = default_config()
    config.model.decoder.num_layers = 8
    config.parallel.update(settings)
    return config


def refusal(config, num_devices=8):
    with pytest.raises(ConfigError) as error:
        validate(resolve(config), num_devices)
    return str(error.value)


@pytest.mark.parametrize(
    "settings",
    [
        dict(pipeline_model_parallel_size=4),
        dict(pipeline_model_parallel_size=4, num_layers_per_virtual_pipeline_stage=1),
        dict(pipeline_model_parallel_size=4, decoder_first_pipeline_num_layers=1, decoder_last_pipeline_num_layers=1),
        dict(pipeline_model_parallel_size=4, decoder_first_pipeline_num_layers=0),  # the embedding alone
        dict(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et*3|t*5L"),
        dict(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="balanced"),
        dict(
            pipeline_model_parallel_size=2,
            pipeline_model_parallel_layout="balanced",
            virtual_pipeline_model_parallel_size=2,
        ),
        dict(pipeline_model_parallel_size=4, tensor_model_parallel_size=2, vocabulary_parallel_over_pipeline=True),
    ],
)
def test_every_way_to_place_the_layers_is_accepted(settings):
    validate(resolve(config_with(**settings)), 8)


@pytest.mark.parametrize(
    "field, value",
    [
        ("num_layers_per_virtual_pipeline_stage", 1),
        ("virtual_pipeline_model_parallel_size", 2),
        ("decoder_first_pipeline_num_layers", 0),
        ("decoder_last_pipeline_num_layers", 3),
        ("pipeline_model_parallel_layout", "Et*8L"),
        ("pipeline_model_parallel_layout", "balanced"),
    ],
)
def test_without_a_pipeline_its_fields_would_have_no_effect(field, value):
    assert refusal(config_with(**{field: value})) == (
        f"parallel.{field}={value} would have no effect with parallel.pipeline_model_parallel_size=1; leave it at None,"
        " or use more ranks"
    )


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            dict(virtual_pipeline_model_parallel_size=2),
            "parallel.virtual_pipeline_model_parallel_size=2 would have no effect with"
            " parallel.pipeline_model_parallel_layout=None; set the layout to balanced, or"
            " num_layers_per_virtual_pipeline_stage=2 instead",
        ),
        (  # 8 layers don't divide into 2 x 3 stages
            dict(virtual_pipeline_model_parallel_size=3),
            "parallel.virtual_pipeline_model_parallel_size=3 would have no effect with"
            " parallel.pipeline_model_parallel_layout=None; set the layout to balanced",
        ),
        (
            dict(virtual_pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et*4|t*4L"),
            "parallel.virtual_pipeline_model_parallel_size=2 would have no effect with"
            " parallel.pipeline_model_parallel_layout=Et*4|t*4L, whose stages are those that it says; leave it at"
            " None, or set the layout to balanced",
        ),
        (
            dict(num_layers_per_virtual_pipeline_stage=2, pipeline_model_parallel_layout="Et*4|t*4L"),
            "parallel.num_layers_per_virtual_pipeline_stage=2 would have no effect, because"
            " parallel.pipeline_model_parallel_layout=Et*4|t*4L places the layers; set one of the two to None",
        ),
        (
            dict(decoder_last_pipeline_num_layers=3, pipeline_model_parallel_layout="balanced"),
            "parallel.decoder_last_pipeline_num_layers=3 would have no effect, because"
            " parallel.pipeline_model_parallel_layout=balanced places the layers; set one of the two to None",
        ),
        (
            dict(num_layers_per_virtual_pipeline_stage=2, decoder_first_pipeline_num_layers=3),
            "parallel.num_layers_per_virtual_pipeline_stage=2 would have no effect, because"
            " parallel.decoder_first_pipeline_num_layers=3 gives each rank one stage; set one of the two to None, or"
            " write a parallel.pipeline_model_parallel_layout",
        ),
    ],
)
def test_of_two_fields_that_place_layers_one_would_have_no_effect(settings, message):
    assert refusal(config_with(pipeline_model_parallel_size=2, **settings)) == message


@pytest.mark.parametrize(
    "field, value, least",
    [
        ("pipeline_model_parallel_size", 0, 1),
        ("num_layers_per_virtual_pipeline_stage", 0, 1),
        ("virtual_pipeline_model_parallel_size", -1, 1),
        ("decoder_first_pipeline_num_layers", -1, 0),
        ("decoder_last_pipeline_num_layers", -1, 0),
    ],
)
def test_sizes_are_in_range(field, value, least):
    assert refusal(config_with(**{field: value})) == f"parallel.{field}={value} must be at least {least}"


@pytest.mark.parametrize(
    "tensor, stages, num_devices, message",
    [
        (
            2,
            3,
            8,
            "8 devices don't divide into groups of parallel.tensor_model_parallel_size=2 x"
            " parallel.pipeline_model_parallel_size=3; use a pipeline of 1, 2 or 4, or 12 devices",
        ),
        (
            4,
            2,
            6,
            "6 devices don't divide into groups of parallel.tensor_model_parallel_size=4 x"
            " parallel.pipeline_model_parallel_size=2; use sizes whose product is 1, 2, 3 or 6, or 8 devices",
        ),
    ],
)
def test_devices_form_whole_groups_of_tensor_times_pipeline(tensor, stages, num_devices, message):
    config = config_with(tensor_model_parallel_size=tensor, pipeline_model_parallel_size=stages)
    assert refusal(config, num_devices) == message


def test_the_global_batch_divides_over_the_ranks_that_the_pipeline_leaves():
    # 8 devices in pairs are data parallel 4, where 8 devices alone would be 8
    config = config_with(pipeline_model_parallel_size=2)
    config.train.global_batch_size = 4
    validate(resolve(config), 8)
    config.train.global_batch_size = 6
    assert refusal(config) == (
        "train.global_batch_size=6 is not a multiple of train.micro_batch_size=1 x data parallel size 4 (8 devices) ="
        " 4; use 4 or 8"
    )


def recompute(config, method, num_layers):
    config.memory.update(recompute_granularity="full", recompute_method=method, recompute_num_layers=num_layers)
    return config


def test_groups_of_recompute_need_not_divide_the_layers_of_a_pipeline():
    # stages of 3 and 5 layers have groups of 3, and of 3 and 2
    settings = dict(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et*3|t*5L")
    validate(resolve(recompute(config_with(**settings), "uniform", 3)), 8)
    assert "does not divide" in refusal(recompute(config_with(), "uniform", 3))


@pytest.mark.parametrize("method", ["uniform", "block"])
def test_no_more_layers_are_recomputed_together_than_there_are(method):
    config = recompute(config_with(pipeline_model_parallel_size=2), method, 9)
    assert refusal(config) == "memory.recompute_num_layers=9 is more than model.decoder.num_layers=8; use at most 8"


def test_a_vocabulary_over_stages_needs_stages():
    assert refusal(config_with(vocabulary_parallel_over_pipeline=True)) == (
        "parallel.vocabulary_parallel_over_pipeline=True would have no effect with"
        " parallel.pipeline_model_parallel_size=1; set it to false, or use more ranks"
    )


def test_a_vocabulary_over_stages_has_equal_parts():
    config = config_with(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=4, vocabulary_parallel_over_pipeline=True
    )
    config.model.decoder.make_vocab_size_divisible_by = 12  # least multiple that 8 divides: 24
    assert refusal(config) == (
        "parallel.vocabulary_parallel_over_pipeline=True shards the vocabulary over"
        " parallel.tensor_model_parallel_size=2 x parallel.pipeline_model_parallel_size=4 devices, which doesn't divide"
        " model.decoder.make_vocab_size_divisible_by=12; use 24 there, or set the former to false"
    )


@pytest.mark.parametrize(
    "fields, expected",
    [
        (dict(pipeline_model_parallel_size=1), False),
        (dict(pipeline_model_parallel_size=4, tensor_model_parallel_size=2), True),
        (dict(pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=2), True),
        (dict(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="balanced"), True),
        (dict(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et*5|t*3L"), False),
        (dict(pipeline_model_parallel_size=2, decoder_last_pipeline_num_layers=3), False),
        (dict(pipeline_model_parallel_size=8, tensor_model_parallel_size=2), False),  # 24 rows, 16 parts
        (dict(pipeline_model_parallel_size=4, vocabulary_parallel_over_pipeline=False), False),
    ],
)
def test_the_vocabulary_lies_over_the_stages_unless_the_config_says_what_the_outer_ones_hold(fields, expected):
    config = config_with(**fields)
    config.model.decoder.make_vocab_size_divisible_by = 24
    assert vocabulary_is_over_stages(resolve(config)) is expected
