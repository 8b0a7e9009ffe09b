"""Layout strings: what they mean, and where an error points."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxforge.config.errors import ConfigError
from jaxforge.parallel.pipeline.layout import PipelineLayout
from jaxforge.parallel.pipeline.layout_string import parse_layout


def counts(text, num_layers, mtp_num_layers=0, pipeline_size=1):
    return parse_layout(text, num_layers, mtp_num_layers, pipeline_size).num_layers_by_stage


def test_the_documents_example_of_61_layers_and_an_mtp_layer_over_16_ranks():
    layout = parse_layout("Et*3|(tt|)*29,m|L", 61, 1, 16)
    assert layout.virtual_stages == 2
    held = {
        rank: [(stage.has_embedding, stage.num_layers, stage.num_mtp_layers, stage.has_loss) for stage in chunks]
        for rank in range(16)
        for chunks in [layout.chunks_of_rank(rank)]
    }
    two = (False, 2, 0, False)
    assert held[0] == [(True, 3, 0, False), two]
    assert all(held[rank] == [two, two] for rank in range(1, 14))
    assert held[14] == [two, (False, 0, 1, False)]
    assert held[15] == [two, (False, 0, 0, True)]
    # ranks 0 to 15 hold 3 + 15 x 2 = 33 layers in chunk 0
    assert layout.layers_of_rank(0) == (0, 1, 2, 33, 34)
    assert layout.layers_of_rank(13) == (27, 28, 59, 60)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Et*3L", (3,)),
        ("E(t)*2*3L", (6,)),
        ("Et*2*3L", (6,)),
        ("E((t*2|)*2t|)*2tL", (2, 2, 1, 2, 2, 1, 1)),
        ("E(t)t(t|t)L", (3, 1)),
        (" E t * 2 ,,| \n t,*3\tL ", (2, 3)),
        ("Et||tL", (1, 0, 1)),
        ("Et| , |tL", (1, 0, 1)),
        ("E(t||)*2L", (1, 0, 1, 0, 0)),
        ("Et*003L", (3,)),
        ("EL", (0,)),
    ],
)
def test_repeats_multiply_groups_nest_and_commas_mean_nothing(text, expected):
    assert counts(text, sum(expected)) == expected


def refusal(text, num_layers=2, mtp_num_layers=0, pipeline_size=1):
    """What the error says, which character its caret points at, and what it says there."""
    with pytest.raises(ConfigError) as caught:
        parse_layout(text, num_layers, mtp_num_layers, pipeline_size)
    rule, shown, pointer = str(caught.value).split("\n")
    assert rule.startswith("parallel.pipeline_model_parallel_layout ")
    assert shown == "  " + text
    caret, _, note = pointer.partition("^ ")
    assert caret == " " * len(caret)
    return rule.removeprefix("parallel.pipeline_model_parallel_layout "), len(caret) - 2, note


@pytest.mark.parametrize(
    ("text", "at", "rule"),
    [
        ("EttxL", 3, "has an unknown symbol 'x'"),
        ("EtT|L", 2, "has an unknown symbol 'T'"),
        ("Ett-1L", 3, "has an unknown symbol '-'"),
        ("Et*1 0L", 5, "has an unknown symbol '0'"),
        ("Ett)L", 3, "has a ) without its ("),
        ("E(t(tL", 3, "has a ( without its )"),
        ("E(t)*2(L", 6, "has a ( without its )"),
        ("Ett()L", 4, "has nothing between ( and )"),
        ("Et*L", 2, "has a * without a count"),
        ("Ett*", 3, "has a * without a count"),
        ("Et**2L", 2, "has a * without a count"),
        ("Ett*0L", 4, "repeats 0 times"),
        ("Et(*2tL)", 3, "has nothing before *"),
        ("Et*99999999999999999999L", 3, "repeats too often"),
        ("E(t*1000|)*1000L", 11, "repeats too often"),
        ("", 0, "is empty"),
        (" ,", 0, "is empty"),
        ("ttL", 0, "has no embedding (E)"),
        ("tEtL", 0, "does not begin with the embedding (E)"),
        ("|EttL", 0, "does not begin with the embedding (E)"),
        ("Et|EtL", 3, "has the embedding (E) 2 times"),
        ("(Et|)*2L", 1, "has the embedding (E) 2 times"),
        ("Ett", 2, "has no loss (L)"),
        ("EtL|tL", 2, "has the loss (L) 2 times"),
        ("EtLt", 3, "does not end with the loss (L)"),
        ("EttL|", 4, "does not end with the loss (L)"),
        ("Ett|L||", 5, "does not end with the loss (L)"),
        ("Et|(t|)*1|L", 9, "has an empty stage that isn't written ||"),
        ("Et|*2tL", 2, "has an empty stage that isn't written ||"),
        ("E(|t|)*2L", 2, "has an empty stage that isn't written ||"),
    ],
)
def test_a_broken_string_is_refused_at_the_character(text, at, rule):
    said, character, note = refusal(text)
    assert (said, character) == (rule, at)
    assert note


@pytest.mark.parametrize(
    ("text", "at", "rule"),
    [
        ("EtmtL", 3, "has a decoder layer (t) after an MTP layer (m)"),
        ("Ett|m|mL", 6, "splits the MTP layers (m) over stages"),
        ("Ett(m|)*2L", 4, "splits the MTP layers (m) over stages"),
        ("Ett|mL", 4, "places 1 MTP layer (m), model.decoder.mtp_num_layers is 2"),
        ("EttL", 3, "places 0 MTP layers (m), model.decoder.mtp_num_layers is 2"),
        ("Ettm*3L", 3, "places 3 MTP layers (m), model.decoder.mtp_num_layers is 2"),
    ],
)
def test_mtp_layers_are_together_after_the_decoder(text, at, rule):
    assert refusal(text, mtp_num_layers=2)[:2] == (rule, at)


def test_a_missing_layer_is_counted_at_the_repeat_that_places_most():
    # 3 + 28 x 2 + 1 layers; the count 28 is character 11
    said, character, note = refusal("Et*3|(tt|)*28,t|L", num_layers=61)
    assert said == "places 60 decoder layers (t), model.decoder.num_layers is 61"
    assert (character, note) == (11, "56 layers from this repeat; one more t is missing")


def test_a_count_that_would_do_is_named():
    assert refusal("Et*8|t*8|t*9|t*8L", 32)[1:] == (11, "9 layers from this repeat; one t too many; *8 would do")
    assert refusal("Et*7|t*8|t*8|t*7L", 32)[2] == "8 layers from this repeat; 2 more t are missing; *10 would do"
    # another round of t*5| is another stage: 8 stages divide over 4 ranks, over 3 they don't
    assert refusal("E(t*5|)*6L", 35, pipeline_size=4)[2].endswith("5 more t are missing; *7 would do")
    assert refusal("E(t*5|)*6L", 35, pipeline_size=3)[2].endswith("5 more t are missing")
    # the outermost repeat counts: 2 layers in each of 3
    assert refusal("E(t)*2*3L", 8)[1:] == (7, "6 layers from this repeat; 2 more t are missing; *4 would do")


def test_without_repeats_the_last_layer_is_pointed_at():
    assert refusal("Et|tL", 4) == (
        "places 2 decoder layers (t), model.decoder.num_layers is 4",
        3,
        "2 more t are missing",
    )
    assert refusal("EL", 4)[1:] == (1, "4 more t are missing")


def test_stages_must_divide_over_the_ranks():
    said, character, note = refusal("Et*3|(tt|)*29,m|L", 61, 1, pipeline_size=7)
    assert said == (
        "has 32 stages, which parallel.pipeline_model_parallel_size=7 does not divide; write 28 or 35 stages"
    )
    assert (character, note) == (11, "29 stages from this repeat")
    assert refusal("Et|tL", 2, pipeline_size=4) == (
        "has 2 stages, which parallel.pipeline_model_parallel_size=4 does not divide; write 4 stages",
        2,
        "the last stage, number 2, begins here",
    )
    assert refusal("EttL", 2, pipeline_size=2)[1:] == (3, "one stage")


def test_the_caret_stands_under_its_character_in_a_text_of_several_lines():
    with pytest.raises(ConfigError) as caught:
        parse_layout("Ett|\n\ttxL", 3, 0, 2)
    _, shown, pointer = str(caught.value).split("\n")
    assert shown[pointer.index("^")] == "x"


@st.composite
def layouts(draw):
    pipeline_size, virtual_stages = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    num_stages = pipeline_size * virtual_stages
    # few different counts, so that runs of equal and of empty stages are common
    layers = draw(st.lists(st.integers(0, 4), min_size=num_stages, max_size=num_stages))
    mtp = [0] * num_stages
    last_with_layers = max((stage for stage, count in enumerate(layers) if count), default=0)
    mtp[draw(st.integers(last_with_layers, num_stages - 1))] = draw(st.integers(0, 2))
    return PipelineLayout(pipeline_size, tuple(layers), tuple(mtp))


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(layouts())
def test_every_layout_is_read_back_from_its_string(layout):
    num_mtp = sum(layout.num_mtp_layers_by_stage)
    assert parse_layout(layout.to_string(), layout.num_layers, num_mtp, layout.pipeline_size) == layout


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(st.text("EtmL|*()023, x", max_size=12), st.integers(1, 3))
def test_any_text_is_read_or_refused_at_one_of_its_characters(text, pipeline_size):
    try:
        layout = parse_layout(f"E{text}L", 4, 1, pipeline_size)
    except ConfigError as error:
        _, shown, pointer = str(error).split("\n")
        assert 2 <= pointer.index("^") < len(shown)
    else:
        assert (layout.num_layers, sum(layout.num_mtp_layers_by_stage)) == (4, 1)
        assert layout.num_stages % pipeline_size == 0
