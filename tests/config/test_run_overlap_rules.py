"""Overlap fields that would have no effect are refused."""

import pytest

from jaxforge.config import ConfigError, default_config, resolve, validate


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            dict(overlap_grad_reduce=True),
            "parallel.overlap_grad_reduce=True would have no effect with"
            " parallel.data_parallel_sharding_strategy=no_shard, which reduces all gradients once, after the last"
            " microbatch; use optim or optim_grads there, or set it to false",
        ),
        (
            dict(
                overlap_grad_reduce=True, data_parallel_sharding_strategy="optim", pipeline_model_parallel_size=2
            ),
            "with parallel.data_parallel_sharding_strategy=optim and a pipeline or a hetero DP mode",
        ),
        (
            dict(overlap_param_gather=True, data_parallel_sharding_strategy="optim"),
            "parallel.overlap_param_gather=True would have no effect with"
            " parallel.data_parallel_sharding_strategy=optim, which gathers no weights of single layers",
        ),
        (
            dict(tp_comm_overlap=True, tensor_model_parallel_size=2),
            "parallel.tp_comm_overlap=True would have no effect with parallel.sequence_parallel=False",
        ),
    ],
)
def test_an_overlap_of_nothing_is_refused(settings, message):
    config = default_config()
    config.parallel.update(settings)
    with pytest.raises(ConfigError) as error:
        validate(resolve(config), 8)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "settings",
    [
        dict(overlap_grad_reduce=True, data_parallel_sharding_strategy="optim"),
        dict(
            overlap_grad_reduce=True, overlap_param_gather=True, data_parallel_sharding_strategy="optim_grads_params",
            pipeline_model_parallel_size=2,
        ),
        dict(tp_comm_overlap=True, tensor_model_parallel_size=2, sequence_parallel=True),
    ],
)  # fmt: skip
def test_an_overlap_of_something_is_valid(settings):
    config = default_config()
    config.parallel.update(settings)
    validate(resolve(config), 8)
