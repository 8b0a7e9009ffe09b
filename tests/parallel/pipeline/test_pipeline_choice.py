"""From config fields to a layout, the places of its layers, and what is recomputed together."""

import dataclasses

import pytest
from flax import nnx
from tiny_models import tiny_config

from jaxforge.config.errors import ConfigError
from jaxforge.config.schema import MemoryConfig
from jaxforge.parallel.pipeline.choice import first_places, layer_order, num_parameters, pipeline_layout, stage_units
from jaxforge.training.program import make_model


def config_with(num_layers=8, encoder=None, memory=None, **parallel):
    names = {"size": "pipeline_model_parallel_size", "layout": "pipeline_model_parallel_layout"}
    parallel = {names.get(name, name): value for name, value in parallel.items()}
    config = tiny_config(encoder, decoder_changes=dict(num_layers=num_layers), parallel=parallel)
    return dataclasses.replace(config, memory=memory or MemoryConfig())


@pytest.mark.parametrize(
    "fields, counts",
    [
        (dict(size=4), (2, 2, 2, 2)),
        (dict(size=2, num_layers_per_virtual_pipeline_stage=2), (2, 2, 2, 2)),
        (dict(size=4, decoder_first_pipeline_num_layers=0, decoder_last_pipeline_num_layers=2), (0, 3, 3, 2)),
        (dict(size=4, decoder_last_pipeline_num_layers=2), (2, 2, 2, 2)),
        (dict(size=2, layout="Et|tt|t*4|tL"), (1, 2, 4, 1)),
    ],
)
def test_each_way_to_place_the_layers_gives_its_layout(fields, counts):
    layout = pipeline_layout(config_with(**fields))
    assert (layout.pipeline_size, layout.num_layers_by_stage) == (fields["size"], counts)


@pytest.mark.parametrize("over_stages, counts", [(False, (2, 3, 3, 0)), (True, (2, 2, 2, 2))])
def test_balance_counts_the_loss_unless_all_stages_share_it(over_stages, counts):
    # Forward FLOPs of a token: 4 x 16 x (64 + 32) for the projections, 2 x 64 x 16 for attention in rows of 16, 6 x 16
    # x 12 for the feed-forward make 9344 in a layer; a head of 1152 rows has 2 x 16 x 1152, nearly 4 layers.
    config = config_with(
        size=2, layout="balanced", virtual_pipeline_model_parallel_size=2, vocabulary_parallel_over_pipeline=over_stages
    )
    decoder = dataclasses.replace(config.model.decoder, vocab_size=1152)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, decoder=decoder))
    assert pipeline_layout(config).num_layers_by_stage == counts


def test_one_layer_fits_two_ranks():
    assert pipeline_layout(config_with(num_layers=1, size=2, layout="E|tL")).num_layers_by_stage == (0, 1)


def test_one_rank_has_no_layout():
    assert pipeline_layout(config_with()) is None
    assert layer_order(config_with()) is None


def test_layers_that_cannot_be_placed_are_refused_with_a_layout_that_places_them():
    # F19
    message = r'=3 does not divide model.decoder.num_layers=10; set parallel.*_layout="Et\*3\|t\*4\|t\*3L"'
    with pytest.raises(ConfigError, match=message):
        pipeline_layout(config_with(num_layers=10, size=3))


def test_places_are_those_of_rank_0_then_of_rank_1():
    # stages of 1, 2, 4 and 1 layers: rank 0 holds the first and third, rank 1 the others
    order = (0, 3, 4, 5, 6, 1, 2, 7, -1, -1)
    assert layer_order(config_with(size=2, layout="Et|tt|t*4|tL")) == (order, order, ())


def test_stacks_of_some_layers_have_places_of_their_own():
    # stages of 1, 2, 4 and 1 layers, of which numbers 0, 3 and 7 are dense: the first, second and third dense ones
    config = config_with(size=2, layout="Et|tt|t*4|tL")
    decoder = dataclasses.replace(config.model.decoder, num_experts=4, moe_layer_freq=(0, 1, 1, 0, 1, 1, 1, 0))
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, decoder=decoder))
    order = layer_order(config)
    assert order.layers == (0, 3, 4, 5, 6, 1, 2, 7, -1, -1)
    assert order.mlp == (0, 1, 2, -1)
    assert order.moe == (2, 3, 4, 0, 1, -1)
    assert [order.of(f"decoder/layers/{part}/x") for part in ("attention", "mlp", "moe")] == list(order)
    layout = pipeline_layout(config)
    first = first_places(layout, (False, True, True, False, True, True, True, False))
    assert {name: table.tolist() for name, table in first.items()} == {
        "layers": [[0, 1], [0, 2]], "mlp": [[0, 1], [0, 0]], "moe": [[0, 0], [0, 2]],
    }  # fmt: skip
    # a rank's layers, its dense ones, and those with experts, by the units of its chunks
    units = [[(unit.num_layers, unit.feed_forward) for unit in stage] for stage in stage_units(config, layout)]
    dense, experts = (1, "mlp"), (1, "moe")
    assert units == [[dense], [experts] * 2, [dense, experts, experts, experts], [dense]]


def test_places_that_no_layer_uses_are_no_parameters():
    counts = set()
    for fields in (dict(), dict(size=4), dict(size=2, layout="Et|tt|t*4|tL")):
        config = config_with(**fields)
        model = nnx.eval_shape(lambda config=config: make_model(config, "xla", nnx.Rngs(params=0)))
        counts.add(num_parameters(nnx.to_pure_dict(nnx.state(model)), layer_order(config)))
    # two tables of 32 (21 padded), the last norm, and of a layer: two norms, projections of 8 heads, 4, 4 and 8 again,
    # three of the feed-forward
    assert counts == {2 * 32 * 16 + 16 + 8 * (2 * 16 + 16 * 8 * (8 + 4 + 4 + 8) + 3 * 16 * 12)}


def units(config):
    """(layers, whether recomputed) of the units of each stage."""
    return [[(unit.num_layers, unit.is_recomputed) for unit in stage] for stage in stage_units_of(config)]


def stage_units_of(config):
    return stage_units(config, pipeline_layout(config))


def test_groups_of_recompute_end_with_their_stage():
    fields = dict(size=2, layout="Et*5|tttL")
    once, kept = (1, True), (1, False)
    assert units(config_with(**fields)) == [[kept] * 5, [kept] * 3]
    assert units(config_with(memory=MemoryConfig("full", "uniform", 1), **fields)) == [[once] * 5, [once] * 3]
    pairs = [[(2, True), (2, True), (1, True)], [(2, True), (1, True)]]
    assert units(config_with(memory=MemoryConfig("full", "uniform", 2), **fields)) == pairs
    assert units(config_with(memory=MemoryConfig("full", "block", 4), **fields)) == [[once] * 4 + [kept], [once] * 3]


@pytest.mark.parametrize("method", ["uniform", "block"])
def test_more_layers_than_a_stage_has_cannot_be_recomputed(method):
    with pytest.raises(ConfigError, match="recompute_num_layers=6 is of each stage, of which the largest has 5 layers"):
        stage_units_of(config_with(size=2, layout="Et*5|tttL", memory=MemoryConfig("full", method, 6)))


def test_a_layer_with_a_visual_feature_is_recomputed_alone():
    # F35: one feature, added after layer 0 of the decoder
    memory = MemoryConfig("full", "uniform", 2)
    first, second = stage_units_of(config_with(encoder="qwen3_vit", memory=memory, size=2))
    assert [unit.num_layers for unit in first] == [1, 2, 1]
    assert [unit.feature for unit in first] == [0, None, None]
    assert [unit.num_layers for unit in second] == [2, 2]
    assert {unit.feature for unit in second} == {None}
