"""A pipeline in words."""

from jaxforge.parallel.pipeline.balance import uniform_layout
from jaxforge.parallel.pipeline.layout import PipelineLayout
from jaxforge.parallel.pipeline.summary import describe_pipeline, describe_sizes


def test_the_layout_and_the_schedule_are_told():
    # the last of 8 microbatches goes forward in ticks 7 and 8, and back in 8 and 9; of 9 ticks with forwards each rank
    # has none in one
    assert describe_pipeline(PipelineLayout(2, (3, 1), (0, 0)), 8).splitlines() == [
        "4 decoder layers over 2 pipeline ranks",
        "rank 0: embedding, layers 0-2",
        "rank 1: layer 3, loss",
        "schedule: 10 ticks, bubble 11.1%, at most 3 chunks in flight on a rank",
    ]


def test_too_few_microbatches_come_with_a_hint():
    # 1 microbatch on 4 ranks: 3 of 4 ticks are idle; 4 microbatches on them: 3 of 7
    lines = describe_pipeline(uniform_layout(4, 4), 1).splitlines()
    assert lines[-2] == "schedule: 7 ticks, bubble 75.0%, at most 1 chunk in flight on a rank"
    assert lines[-1] == (
        "hint: 1 microbatch can't keep 4 pipeline ranks busy; 4 would have a bubble of 42.9%: raise"
        " train.global_batch_size or lower train.micro_batch_size"
    )
    assert "hint" not in describe_pipeline(uniform_layout(4, 4), 4)


def test_sizes_are_ranks_and_virtual_stages():
    assert describe_sizes(uniform_layout(8, 4), False) == "PP 4"
    assert describe_sizes(uniform_layout(8, 4, 1), True) == "PP 4 x 2 virtual stages, vocabulary over all ranks"
