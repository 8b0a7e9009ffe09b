"""The hetero DP modes: what they need, and where they would change nothing."""

import dataclasses

import pytest

from jaxforge.config.derived import encoder_devices, encoder_tensor_parallel_size
from jaxforge.config.encoder_rules import hetero_dp_is_possible
from jaxforge.config.schema import Config, EncoderConfig, ModelConfig, ParallelConfig, ProjectorConfig

MODES = ("enable_encoder_hetero_dp", "enable_full_hetero_dp")


def config(*modes, tensor=2, stages=2, encoder_tensor=None, has_encoder=True):
    model = ModelConfig()
    if has_encoder:
        encoder = EncoderConfig(tensor_model_parallel_size=encoder_tensor)
        model = dataclasses.replace(model, encoder=encoder, projector=ProjectorConfig())
    parallel = ParallelConfig(
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=stages, **dict.fromkeys(modes, True)
    )
    return Config(model=model, parallel=parallel)


def refusals(*modes, **sizes):
    return list(hetero_dp_is_possible(config(*modes, **sizes)))


@pytest.mark.parametrize("encoder_tensor", [None, 1])
@pytest.mark.parametrize("mode", MODES)
def test_each_mode_is_possible_with_a_whole_encoder_on_each_device(mode, encoder_tensor):
    assert refusals(mode, encoder_tensor=encoder_tensor) == []
    assert encoder_tensor_parallel_size(config(mode, encoder_tensor=encoder_tensor)) == 1


def test_without_a_mode_nothing_is_asked():
    assert refusals(encoder_tensor=2) == refusals(tensor=1, stages=1, has_encoder=False) == []


def test_the_encoder_follows_the_decoder_outside_of_the_modes():
    assert encoder_tensor_parallel_size(config(tensor=4)) == 4


@pytest.mark.parametrize("modes, devices", [((), 1), (MODES[:1], 4), (MODES[1:], 12)])
def test_the_devices_that_divide_the_images(modes, devices):
    # none; the tensor group; the tensor groups of all stages
    assert encoder_devices(config(*modes, tensor=4, stages=3)) == devices


def test_one_stage_or_one_tensor_rank_is_enough_for_full_hetero_dp():
    assert refusals("enable_full_hetero_dp", tensor=1) == refusals("enable_full_hetero_dp", stages=1) == []


@pytest.mark.parametrize("mode", MODES)
def test_a_language_model_has_no_images_to_divide(mode):
    assert refusals(mode, has_encoder=False) == [
        f"parallel.{mode}=True divides images among devices, but model.encoder is None; set it to false"
    ]


def test_both_modes_at_once_are_refused():
    assert refusals(*MODES) == [
        "parallel.enable_encoder_hetero_dp and parallel.enable_full_hetero_dp are both True; leave one: the tensor"
        " group divides the images in the first, all stages' tensor groups together in the second"
    ]


@pytest.mark.parametrize("mode", MODES)
def test_an_encoder_that_devices_share_is_refused(mode):
    assert refusals(mode, encoder_tensor=2) == [
        f"parallel.{mode}=True lets each device encode images of its own, with a whole encoder, but"
        f" model.encoder.tensor_model_parallel_size=2; set that to 1, or parallel.{mode} to false"
    ]


@pytest.mark.parametrize(
    "mode, stages, message",
    [
        (
            "enable_encoder_hetero_dp",
            1,
            "parallel.enable_encoder_hetero_dp=True would have no effect with parallel.tensor_model_parallel_size=1;"
            " set it to false",
        ),
        (
            "enable_encoder_hetero_dp",
            4,
            "parallel.enable_encoder_hetero_dp=True would have no effect with parallel.tensor_model_parallel_size=1;"
            " set it to false, or use parallel.enable_full_hetero_dp, which divides images among the stages too",
        ),
        (
            "enable_full_hetero_dp",
            1,
            "parallel.enable_full_hetero_dp=True would have no effect with parallel.tensor_model_parallel_size=1 and"
            " parallel.pipeline_model_parallel_size=1; set it to false",
        ),
    ],
)
def test_one_device_has_nobody_to_share_with(mode, stages, message):
    assert refusals(mode, tensor=1, stages=stages) == [message]
