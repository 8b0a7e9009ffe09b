"""Layouts from numbers: by hand, and against all possible ones."""

import dataclasses
import itertools

import pytest

from jaxforge.config.errors import ConfigError
from jaxforge.config.model_schema import DecoderConfig
from jaxforge.config.schema import Config
from jaxforge.parallel.pipeline.balance import StageCosts, balanced_layout, flop_costs, uneven_layout, uniform_layout
from jaxforge.parallel.pipeline.layout_string import parse_layout
from jaxforge.training.flops import forward_flops_per_row

NO_COSTS = StageCosts(embedding=0, loss=0, mtp_layer=0)


def test_equal_stages_are_those_of_the_string():
    assert uniform_layout(32, 4) == parse_layout("Et*8|(t*8|)*2t*8L", 32, 0, 4)
    assert uniform_layout(32, 4, layers_per_virtual_stage=2) == parse_layout("Ett|(tt|)*14ttL", 32, 0, 4)
    assert uniform_layout(80, 8).num_layers_by_stage == (10,) * 8
    assert uniform_layout(4, 2, mtp_num_layers=1) == parse_layout("Ett|ttmL", 4, 1, 2)
    assert uniform_layout(6, 1) == parse_layout("Et*6L", 6, 0, 1)


def test_uneven_outer_stages_are_those_of_the_string():
    assert uneven_layout(30, 4, 7, 7) == parse_layout("Et*7|t*8|t*8|t*7L", 30, 0, 4)
    assert uneven_layout(61, 8, decoder_first_pipeline_num_layers=5) == parse_layout("Et*5|(t*8|)*6t*8L", 61, 0, 8)
    assert uneven_layout(10, 3, decoder_last_pipeline_num_layers=2) == parse_layout("Et*4|t*4|ttL", 10, 0, 3)
    assert uneven_layout(10, 2, 6, 4, mtp_num_layers=1) == parse_layout("Et*6|t*4mL", 10, 1, 2)
    assert uneven_layout(8, 2) == uniform_layout(8, 2)


@pytest.mark.parametrize(
    ("num_layers", "pipeline_size", "text"),
    [(30, 4, "Et*7|t*8|t*8|t*7L"), (61, 8, "Et*7|t*7|(t*8|)*5t*7L"), (10, 3, "Et*3|t*4|t*3L")],
)
def test_layers_that_do_not_divide_are_refused_with_a_layout_that_places_them(num_layers, pipeline_size, text):
    with pytest.raises(ConfigError) as caught:
        uniform_layout(num_layers, pipeline_size)
    assert str(caught.value) == (
        f"parallel.pipeline_model_parallel_size={pipeline_size} does not divide"
        f' model.decoder.num_layers={num_layers}; set parallel.pipeline_model_parallel_layout="{text}"'
    )
    assert sum(parse_layout(text, num_layers, 0, pipeline_size).num_layers_by_stage) == num_layers


def test_fewer_layers_than_ranks_are_refused():
    with pytest.raises(ConfigError, match="use at most 3 ranks, or a layout string with stages without layers"):
        uniform_layout(3, 8)


@pytest.mark.parametrize("layers_per_virtual_stage", [3, 0, 16])
def test_virtual_stages_divide_the_layers_of_a_rank(layers_per_virtual_stage):
    rule = (
        rf"parallel.num_layers_per_virtual_pipeline_stage={layers_per_virtual_stage} does not divide the 8 layers of"
        r" each rank .*; use 1, 2, 4 or 8"
    )
    with pytest.raises(ConfigError, match=rule):
        uniform_layout(32, 4, layers_per_virtual_stage)


def test_virtual_stages_need_several_ranks():
    with pytest.raises(ConfigError, match="num_layers_per_virtual_pipeline_stage=2 would have no effect"):
        uniform_layout(4, 1, 2)


@pytest.mark.parametrize(
    ("num_layers", "pipeline_size", "first", "last"),
    [(61, 8, 6, None), (10, 3, 5, 5), (10, 2, 3, 6), (10, 1, 5, 5), (9, 3, -1, None), (2, 4, 1, None)],
)
def test_uneven_stages_that_do_not_come_out_are_refused_with_a_way_out(num_layers, pipeline_size, first, last):
    with pytest.raises(ConfigError, match=r"decoder_(first|last)_pipeline_num_layers=.*; (set parallel|use at most)"):
        uneven_layout(num_layers, pipeline_size, first, last)


def test_equal_costs_give_equal_stages():
    assert balanced_layout(32, 4, 2, NO_COSTS) == uniform_layout(32, 4, 4)


def test_embedding_and_loss_take_the_place_of_layers():
    # 4 stages, 30 layers and 2 + 4 more: 9 each
    assert balanced_layout(30, 4, 1, StageCosts(embedding=2, loss=4)).num_layers_by_stage == (7, 9, 9, 5)
    # a loss worth more than a stage leaves its stage without layers
    assert balanced_layout(6, 3, 1, StageCosts(loss=7)).num_layers_by_stage == (3, 3, 0)


def test_an_mtp_layer_lies_with_the_loss_or_before_it_whichever_is_cheaper():
    # 8 layers + MTP 1 + loss 3 over 4 stages: 3 each, where the loss alone fills its stage
    assert balanced_layout(8, 4, 1, StageCosts(loss=3, mtp_layer=1), 1).to_string() == "Et*3|t*3|ttm|L"
    # MTP 1 + loss 1 with 2 layers in the last stage
    assert balanced_layout(14, 4, 1, StageCosts(loss=1, mtp_layer=1), 1).to_string() == "Et*4|t*4|t*4|ttmL"


def test_the_layers_left_over_go_to_different_ranks():
    # 6 layers over 4 stages of 2 ranks: two stages have 2, one of each rank
    layout = balanced_layout(6, 2, 2, NO_COSTS)
    assert layout.num_layers_by_stage == (1, 2, 2, 1)
    assert [len(layout.layers_of_rank(rank)) for rank in (0, 1)] == [3, 3]


@pytest.mark.parametrize("costs", [(0, 0), (0.7, 0), (0, 1.5), (2.25, 3.5), (0.5, 6)])
@pytest.mark.parametrize(("num_layers", "num_stages"), [(5, 1), (5, 3), (7, 4), (9, 4), (9, 5)])
def test_no_other_layout_has_a_cheaper_most_expensive_stage(num_layers, num_stages, costs):
    embedding, loss = costs

    def most_expensive(counts):
        stages = list(counts)
        stages[0] += embedding
        stages[-1] += loss
        return max(stages)

    every = [
        [end - begin for begin, end in itertools.pairwise((0, *ends, num_layers))]
        for ends in itertools.combinations_with_replacement(range(num_layers + 1), num_stages - 1)
    ]
    found = balanced_layout(num_layers, num_stages, 1, StageCosts(embedding, loss)).num_layers_by_stage
    assert sum(found) == num_layers
    assert most_expensive(found) == min(map(most_expensive, every))


def test_stages_without_anything_are_refused():
    assert balanced_layout(2, 4, 1, NO_COSTS).num_layers_by_stage == (0, 1, 1, 0)
    with pytest.raises(ConfigError, match=r"num_layers=5 is too few for 8 stages .*; use fewer, or a layout string"):
        balanced_layout(5, 4, 2, NO_COSTS)


# a token in a layer: query and output 2 x 2 8 8, key and value 2 x 2 8 4, feed-forward 3 x 2 8 16: 1152
DECODER = DecoderConfig(
    num_layers=2, hidden_size=8, ffn_hidden_size=16, num_attention_heads=2, num_query_groups=1, kv_channels=4,
    vocab_size=10,
)  # fmt: skip


def test_costs_by_flops_are_ratios_to_a_layer():
    # attention to half of 3 tokens: 2 x 2 8 3 / 2 = 48, so a layer is 1200; head 2 8 10; MTP's projection 2 16 8
    costs = flop_costs(DECODER, seq_length=3, first_stage_flops=7200)
    assert costs.loss == 160 / 1200
    assert costs.mtp_layer == 1 + 256 / 1200
    assert costs.embedding == 7200 / (3 * 1200)
    # what each MTP layer predicts is scored where the loss is
    with_mtp = flop_costs(dataclasses.replace(DECODER, mtp_num_layers=2), seq_length=3)
    assert (with_mtp.loss, with_mtp.mtp_layer) == (3 * 160 / 1200, costs.mtp_layer)


def test_mtp_layers_take_the_place_of_others():
    # 31 layers of 4 ranks, where all share the loss: no rank has more than 8
    layout = balanced_layout(28, 4, 1, StageCosts(), mtp_num_layers=3)
    assert max(stage.num_layers + stage.num_mtp_layers for stage in layout.stages) == 8


def test_costs_agree_with_the_model_flops_of_a_row():
    def flops(num_layers):
        decoder = dataclasses.replace(DECODER, num_layers=num_layers)
        config = Config()
        model = dataclasses.replace(config.model, decoder=decoder, encoder=None)
        return forward_flops_per_row(dataclasses.replace(config, model=model)).decoder

    layer = flops(3) - flops(2)
    head = flops(2) - 2 * layer
    assert flop_costs(DECODER, Config().train.seq_length).loss == head / layer
