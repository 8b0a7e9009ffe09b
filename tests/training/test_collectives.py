import pytest

from jaxforge.training.collectives import Collective, find_collectives

MESH = {"stage": 1, "replica": 2, "expert": 1, "context": 1, "tensor_outer": 2, "tensor_inner": 2}


def program(*entry: str, other: str = "") -> str:
    """A module whose entry has these instructions."""
    body = "\n".join(f"  {line}" for line in entry)
    return f"HloModule jit_step, is_scheduled=true\n{other}\n\nENTRY %main.1 (x: f32[4]) -> f32[4] {{\n{body}\n}}\n"


def only(hlo: str) -> Collective:
    (found,) = find_collectives(hlo, MESH)
    return found


def all_reduce(groups: str) -> str:
    return program(f"%y = f32[6]{{0}} all-reduce(%x), channel_id=1, replica_groups={groups}, to_apply=%add")


@pytest.mark.parametrize(
    "groups, axes",
    [
        # device number = 4 replica + 2 tensor_outer + tensor_inner
        ("{{0,1},{2,3},{4,5},{6,7}}", ("tensor_inner",)),
        ("{{0,2},{1,3},{4,6},{5,7}}", ("tensor_outer",)),
        ("{{3,2,1,0},{4,5,6,7}}", ("tensor_outer", "tensor_inner")),
        ("{{0,4},{1,5},{2,6},{3,7}}", ("replica",)),
        ("{{0,1,4,5},{2,3,6,7}}", ("replica", "tensor_inner")),
        ("{{0,1,2,3,4,5,6,7}}", ("replica", "tensor_outer", "tensor_inner")),
        ("{}", ("replica", "tensor_outer", "tensor_inner")),
        ("[4,2]<=[8]", ("tensor_inner",)),
        ("[2,4]<=[8]", ("tensor_outer", "tensor_inner")),
        ("[4,2]<=[2,4]T(1,0)", ("replica",)),
        ("[4,2]<=[2,2,2]T(0,2,1)", ("tensor_outer",)),
        ("mesh['replica'=2,'tensor_outer'=2,'tensor_inner'=2] {'replica','tensor_inner'}", ("replica", "tensor_inner")),
        ("mesh['stage'=1,'replica'=2,'t'=4] {'stage','t'}", ("tensor_outer", "tensor_inner")),
        ("{{0,7},{1,6},{2,5},{3,4}}", ("irregular",)),
        ("mesh['replica'=2,'t'=4] {'t':(1)2}", ("irregular",)),
    ],
)
def test_groups_of_devices_are_named_by_the_mesh_axes_that_make_them(groups, axes):
    assert only(all_reduce(groups)) == Collective("all-reduce", axes, bytes=24, count=1, in_loop=False)


@pytest.mark.parametrize(
    "groups, name", [("[4,4]<=[16]", "expert in blocks of 4"), ("[8,2]<=[2,2,4]T(0,2,1)", "expert across blocks of 4")]
)
def test_blocks_of_the_devices_along_an_axis_have_names_too(groups, name):
    # two replicas of 8 experts' devices, on nodes of 4
    hlo = all_reduce(groups)
    assert [one.axes for one in find_collectives(hlo, {"replica": 2, "expert": 8})] == [(name,)]


def test_a_group_of_one_device_exchanges_nothing():
    assert find_collectives(all_reduce("{{0},{1},{2},{3},{4},{5},{6},{7}}"), MESH) == []


@pytest.mark.parametrize(
    "instruction, kind, size",
    [
        # what comes out whole, or goes in whole: 4 devices, 8 numbers each
        ("bf16[32]{0} all-gather(%x), replica_groups=[2,4]<=[8], dimensions={0}", "all-gather", 64),
        ("bf16[8]{0} reduce-scatter(%x), replica_groups=[2,4]<=[8], to_apply=%add", "reduce-scatter", 64),
        ("bf16[4,8]{1,0} all-to-all(%x), replica_groups=[2,4]<=[8]", "all-to-all", 64),
        ("(f32[3]{0}, s8[5]{0}) all-reduce(%x, %z), replica_groups=[2,4]<=[8], to_apply=%add", "all-reduce", 17),
        # asynchronous starts have the type of operands and results
        ("(bf16[8]{0}, bf16[32]{0}) all-gather-start(%x), replica_groups=[2,4]<=[8]", "all-gather", 64),
        ("((bf16[8]{0}), bf16[32]{0}) all-gather-start(%x), replica_groups=[2,4]<=[8]", "all-gather", 64),
        ("((bf16[32]{0}), bf16[8]{0}) reduce-scatter-start(%x), replica_groups=[2,4]<=[8]", "reduce-scatter", 64),
        ("((f32[3]{0}), f32[3]{0}) all-reduce-start(%x), replica_groups=[2,4]<=[8]", "all-reduce", 12),
        ("f32[3]{0} all-reduce-start(%x), replica_groups=[2,4]<=[8]", "all-reduce", 12),
        ("(f32[3]{0}, f32[4]{0}) all-reduce-start(%x, %z), replica_groups=[2,4]<=[8]", "all-reduce", 28),
        (
            "((f32[3]{0}, /*index=1*/pred[4]{0}), (f32[3]{0}, pred[4]{0})) all-reduce-start(%x, %z),"
            " replica_groups=[2,4]<=[8]",
            "all-reduce",
            16,
        ),
    ],
)
def test_bytes_are_those_of_the_whole_buffer_on_one_device(instruction, kind, size):
    found = only(program(f"%y = {instruction}, use_global_device_ids=true"))
    assert (found.kind, found.bytes) == (kind, size)
    assert found.axes == ("tensor_outer", "tensor_inner")


def test_an_asynchronous_collective_counts_once():
    hlo = program(
        "%s = ((f32[3]{0}), f32[3]{0}) all-reduce-start(%x), replica_groups=[2,4]<=[8], to_apply=%add",
        "ROOT %d = f32[3]{0} all-reduce-done(%s)",
    )
    assert only(hlo).count == 1


def test_a_collective_in_an_asynchronous_computation_counts_once():
    wrapped = (
        "%async (p: f32[8]) -> f32[4] {\n"
        "  ROOT %r = f32[4]{0} reduce-scatter(%p), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add\n}\n"
    )
    hlo = program(
        "%s = ((f32[8]{0}), f32[4]{0}) async-start(%x), calls=%async",
        "ROOT %d = f32[4]{0} async-done(%s), calls=%async",
        other=wrapped,
    )
    assert only(hlo) == Collective("reduce-scatter", ("tensor_inner",), bytes=32, count=1, in_loop=False)


@pytest.mark.parametrize(
    "pairs, axes",
    [
        ("{{0,4},{1,5},{2,6},{3,7},{4,0},{5,1},{6,2},{7,3}}", ("replica",)),
        ("{{0,1},{2,3}}", ("tensor_inner",)),
        ("{{0,3}}", ("tensor_outer", "tensor_inner")),
    ],
)
def test_a_permutation_is_over_the_axes_along_which_devices_send(pairs, axes):
    hlo = program(
        f"%y = (bf16[8]{{0}}, bf16[8]{{0}}, u32[], u32[]) collective-permute-start(%x), source_target_pairs={pairs}"
    )
    assert only(hlo) == Collective("collective-permute", axes, bytes=16, count=1, in_loop=False)


LOOPS = """
%layer_body (t: (s32[], f32[4])) -> (s32[], f32[4]) {
  %g = f32[8]{0} all-gather(%p), replica_groups=[4,2]<=[8], dimensions={0}
}

%condition (t: (s32[], f32[4])) -> pred[] {
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

%microbatch_body (t: (s32[], f32[4])) -> (s32[], f32[4]) {
  %a = f32[4]{0} all-reduce(%p), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add
  %w = (s32[], f32[4]{0}) while(%t), condition=%condition, body=%layer_body, \
backend_config={"known_trip_count":{"n":"28"},"known_init_step":{"init":"0","step":"1"}}
}

%apart (p: f32[4]) -> f32[4] {
  ROOT %b = f32[4]{0} all-reduce(%p), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add
}
"""


def test_a_collective_in_loops_counts_as_often_as_they_turn():
    hlo = program(
        "%w = (s32[], f32[4]{0}) while(%t), condition=%condition, body=%microbatch_body,"
        ' backend_config={"known_trip_count":{"n":"8"}}',
        "%c = f32[4]{0} call(%y), to_apply=%apart",
        other=LOOPS,
    )
    assert find_collectives(hlo, MESH) == [
        Collective("all-gather", ("tensor_inner",), bytes=32, count=8 * 28, in_loop=True),
        Collective("all-reduce", ("replica",), bytes=16, count=8, in_loop=True),
        Collective("all-reduce", ("replica",), bytes=16, count=1, in_loop=False),
    ]


def test_a_loop_of_unknown_length_counts_once():
    hlo = program(
        "%w = (s32[], f32[4]{0}) while(%t), condition=%condition, body=%layer_body",
        other=LOOPS[: LOOPS.index("%microbatch_body")],
    )
    assert only(hlo) == Collective("all-gather", ("tensor_inner",), bytes=32, count=1, in_loop=True)


def test_a_computation_that_nothing_calls_counts_nothing():
    assert find_collectives(program("ROOT %y = f32[4] negate(%x)", other=LOOPS), MESH) == []
