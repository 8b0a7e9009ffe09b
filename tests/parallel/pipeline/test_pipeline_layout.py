"""Where a layout puts the layers, by hand."""

import pytest

from jaxforge.parallel.pipeline.layout import PipelineLayout


def layout(pipeline_size, counts, mtp_counts=None):
    return PipelineLayout(pipeline_size, counts, mtp_counts or (0,) * len(counts))


# four stages of 3, 2, 2 and 1 layers on 2 ranks: rank 0 has stages 0 and 2, rank 1 stages 1 and 3
UNEVEN = layout(2, (3, 2, 2, 1))


def test_stages_go_round_the_ranks():
    assert UNEVEN.chunks_of_rank(0) == (UNEVEN.stages[0], UNEVEN.stages[2])
    assert UNEVEN.chunks_of_rank(1) == (UNEVEN.stages[1], UNEVEN.stages[3])
    assert UNEVEN.virtual_stages == 2
    assert UNEVEN.layers_of_rank(0) == (0, 1, 2, 5, 6)
    assert UNEVEN.layers_of_rank(1) == (3, 4, 7)


def test_a_stage_knows_its_layers_and_its_ends():
    assert [(stage.first_layer, stage.num_layers) for stage in UNEVEN.stages] == [(0, 3), (3, 2), (5, 2), (7, 1)]
    assert [stage.has_embedding for stage in UNEVEN.stages] == [True, False, False, False]
    assert [stage.has_loss for stage in UNEVEN.stages] == [False, False, False, True]


def test_slots_follow_chunk_by_chunk_and_the_shorter_rank_has_unused_ones():
    assert UNEVEN.slots_per_rank == 5
    assert UNEVEN.layer_order.tolist() == [[0, 1, 2, 5, 6], [3, 4, 7, -1, -1]]
    # (first slot, layers) of chunks 0 and 1
    assert UNEVEN.chunk_table.tolist() == [[[0, 3], [3, 2]], [[0, 2], [2, 1]]]


def test_an_empty_chunk_has_no_slot():
    empty_first = layout(2, (0, 2, 1, 0))
    assert empty_first.layer_order.tolist() == [[2, -1], [0, 1]]
    assert empty_first.chunk_table.tolist() == [[[0, 0], [0, 1]], [[0, 2], [2, 0]]]


def test_the_description_says_what_each_rank_holds():
    described = layout(2, (3, 1, 0, 4, 2, 0), (0, 0, 0, 0, 0, 1)).describe()
    assert described.splitlines() == [
        "10 decoder layers and 1 MTP layer over 2 pipeline ranks, 3 chunks in each",
        "rank 0: embedding, layers 0-2 | nothing | layers 8-9",
        "rank 1: layer 3 | layers 4-7 | 1 MTP layer, loss",
    ]


def test_a_description_without_virtual_stages_is_plain():
    assert layout(1, (4,)).describe().splitlines() == [
        "4 decoder layers over 1 pipeline rank",
        "rank 0: embedding, layers 0-3, loss",
    ]


@pytest.mark.parametrize(
    ("counts", "mtp_counts", "text"),
    [
        ((4,), (0,), "Et*4L"),
        ((1, 2, 2, 1), (0, 0, 0, 0), "Et|tt|tt|tL"),
        ((3, 2, 2, 2, 0, 0), (0, 0, 0, 0, 2, 0), "Et*3|(tt|)*3mm|L"),
        ((0, 1, 1, 1, 0, 0, 1), (0,) * 7, "E|t|t|t||" + "|tL"),
        ((0, 1, 1, 1, 1, 0, 1), (0,) * 7, "E|(t|)*3t||tL"),
    ],
)
def test_the_string_of_a_layout_is_short_and_shows_empty_stages(counts, mtp_counts, text):
    assert layout(1, counts, mtp_counts).to_string() == text


def test_tables_cannot_be_changed():
    for table in (UNEVEN.layer_order, UNEVEN.chunk_table):
        with pytest.raises(ValueError, match="read-only"):
            table[0] = 0
