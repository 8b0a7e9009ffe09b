"""What a run says of itself before anything is compiled."""

import jax
import pytest
from tiny_models import tiny_config

from jaxforge.cluster.mesh import MeshLayout, build_mesh
from jaxforge.config import ConfigError
from jaxforge.training.describe import describe_run
from jaxforge.training.loop import start


def described(microbatches: int, **parallel) -> list[str]:
    config = tiny_config(None, decoder_changes=dict(num_layers=4), parallel=parallel, train=dict(simulated_devices=8))
    layout = MeshLayout.from_config(config, 8)
    return describe_run(config, build_mesh(layout, jax.devices()[:8]), layout, microbatches).splitlines()


def test_a_pipeline_is_told_with_what_each_rank_holds():
    lines = described(4, pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et|t||ttL")
    assert lines[0] == "8 x simulated CPU device in 1 process: decoder TP 1, PP 2 x 2 virtual stages, DP 4"
    assert lines[-4:-1] == [
        "4 decoder layers over 2 pipeline ranks, 2 chunks in each",
        "rank 0: embedding, layer 0 | nothing",
        "rank 1: layer 1 | layers 2-3, loss",
    ]
    # 4 microbatches x 2 chunks keep each rank busy in 8 of 9 ticks with forwards
    assert "bubble 11.1%" in lines[-1]


def test_without_a_pipeline_none_is_told():
    assert not [line for line in described(4) if "PP" in line or "rank 0" in line]


def test_a_layout_that_misses_a_layer_is_refused_before_anything_is_written():
    parallel = dict(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et|tL")
    config = tiny_config(None, decoder_changes=dict(num_layers=3), parallel=parallel)
    with pytest.raises(ConfigError, match=r"places 2 decoder layers \(t\), model.decoder.num_layers is 3"):
        start(config)
