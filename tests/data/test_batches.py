"""Batches on a mesh of eight devices: which rows and which images lie where, in every mode."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from tiny_models import document, image, microbatches, row, rows_of_many_kinds, tiny_config

from jaxforge.cluster.mesh import MeshLayout, build_mesh
from jaxforge.data.batches import BatchLayout
from jaxforge.data.loader import Loader
from jaxforge.data.rows import PATCH_KEYS

ENCODER_HETERO_DP = {"enable_encoder_hetero_dp": True}
FULL_HETERO_DP = {"enable_full_hetero_dp": True}
MODES = [{}, ENCODER_HETERO_DP, FULL_HETERO_DP]
# stages x data parallel ranks x tensor ranks
STAGES, RANKS, TENSOR = 2, 2, 2


def run_config(mode, *, rows=8):
    sizes = dict(pipeline_model_parallel_size=STAGES, tensor_model_parallel_size=TENSOR)
    encoder = {} if mode else {"tensor_model_parallel_size": 1}
    return tiny_config(
        "qwen2_5_vit", encoder_changes=encoder, parallel=sizes | mode, train={"global_batch_size": rows, "steps": 2}
    )


def batch_layout(mode, num_microbatches=2, rows=8):
    config = run_config(mode, rows=rows)
    return BatchLayout.from_config(config, build_mesh(MeshLayout.from_config(config, 8)), num_microbatches)


def some_rows():
    """Eight rows in two microbatches; no two have the same pixels."""
    rows = rows_of_many_kinds(run_config({}))
    twice = {key: np.concatenate([array, array]) for key, array in rows.items()}
    twice["patches"] += np.where(twice["patch_segments"] > 0, np.arange(8)[:, None], 0)[..., None]
    return microbatches(twice, 2)


def by_place(batch, key, mesh):
    """What the device at each (stage, rank, tensor rank) holds of an array."""
    shards = {shard.device: np.asarray(shard.data) for shard in batch[key].addressable_shards}
    devices = mesh.devices.reshape(STAGES, RANKS, TENSOR)
    return {place: shards[devices[place]] for place in np.ndindex(devices.shape)}


def visual_tokens(batch, mesh, mode, stage, rank):
    """The four patches of each visual token, for the tokens of a rank in one stage's view, as the devices hold them.

    The table is [tensor][stage][round][N], of the stages that divide the images, or of this one.
    """
    patches, index = by_place(batch, "patches", mesh), by_place(batch, "visual_index", mesh)[stage, rank, 0]
    stages = range(STAGES) if mode == FULL_HETERO_DP else [stage]
    made = [patches[s, rank, t] for t in range(TENSOR) for s in stages]
    table = np.concatenate([encoder_rows.reshape(-1, 4, encoder_rows.shape[-1]) for encoder_rows in made])
    return table[index[index >= 0]]


def test_without_a_hetero_dp_mode_rows_lie_whole_on_the_devices_of_their_rank():
    layout, rows = batch_layout({}), microbatches(rows_of_many_kinds(run_config({})), 2)
    layout = dataclasses.replace(layout, rows=2)
    batch = layout.batch(rows)
    for key, array in rows.items():
        np.testing.assert_array_equal(batch[key], array)
        for (_, rank, _), held in by_place(batch, key, layout.mesh).items():
            np.testing.assert_array_equal(held, array[:, rank : rank + 1])


@pytest.mark.parametrize("mode", [ENCODER_HETERO_DP, FULL_HETERO_DP])
def test_every_visual_token_finds_its_patches_on_the_devices_that_encode_them(mode):
    layout, rows = batch_layout(mode), some_rows()
    batch = layout.batch(rows)
    assert layout.rows == 4 and layout.ranks == 2
    for stage, rank in np.ndindex(STAGES, RANKS):
        mine = {key: array[:, 2 * rank : 2 * rank + 2] for key, array in rows.items()}
        by_token = mine["patches"].reshape(2, 2, 8, 4, -1)
        microbatch, row_number, _ = np.nonzero(mine["visual_index"] >= 0)
        expected = by_token[microbatch, row_number, mine["visual_index"][mine["visual_index"] >= 0]]
        np.testing.assert_array_equal(visual_tokens(batch, layout.mesh, mode, stage, rank), expected)
    for key in ("tokens", "targets", "segment_ids", "positions"):
        np.testing.assert_array_equal(batch[key], rows[key])


def test_pixels_lie_only_where_they_are_encoded():
    # a rank's 4 rows: each device of a stage has 2 encoder rows, or each of both stages 1, of 32 patches
    for mode, rounds in ((ENCODER_HETERO_DP, 2), (FULL_HETERO_DP, 1)):
        layout = batch_layout(mode)
        held = by_place(layout.batch(some_rows()), "patches", layout.mesh)
        assert {shard.shape for shard in held.values()} == {(rounds, 1, 32, 4)}
        for rank in range(RANKS):
            stages = [
                np.concatenate([held[stage, rank, tensor] for tensor in range(TENSOR)]) for stage in range(STAGES)
            ]
            same = np.array_equal(*stages)
            assert same == (mode == ENCODER_HETERO_DP)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_the_step_is_compiled_for_what_the_batches_are(mode, num_microbatches):
    layout = batch_layout(mode, num_microbatches)
    rows = {key: array.reshape(num_microbatches, -1, *array.shape[2:]) for key, array in some_rows().items()}
    batch = layout.batch(rows)
    shapes = layout.shapes()
    assert {key: (array.shape, array.dtype, array.sharding) for key, array in batch.items()} == {
        key: (shape.shape, shape.dtype, shape.sharding) for key, shape in shapes.items()
    }


def test_shapes_and_shardings_by_hand():
    # 8 rows in 2 microbatches: 4 rows on each of 2 ranks
    rows, by_rank = (2, 4), PartitionSpec(None, ("replica", "expert"))
    tensor = ("tensor_outer", "tensor_inner")
    for mode, patches, axes in (
        ({}, rows, by_rank),
        (ENCODER_HETERO_DP, (2, 4), PartitionSpec(None, ("replica", "expert", *tensor))),
        (FULL_HETERO_DP, (1, 8), PartitionSpec(None, ("replica", "expert", "stage", *tensor))),
    ):
        shapes = batch_layout(mode).shapes()
        for key, tail in (("tokens", (16,)), ("positions", (3, 16)), ("visual_index", (16,))):
            assert (shapes[key].shape, shapes[key].sharding.spec) == ((*rows, *tail), by_rank)
        for key, tail in (("patches", (32, 4)), ("patch_segments", (32,)), ("patch_grids", (32, 2))):
            assert (shapes[key].shape, shapes[key].sharding.spec) == ((*patches, *tail), axes)


def test_microbatches_that_do_not_divide_by_the_devices_leave_room_in_the_last_round():
    # 3 rows of a rank on 4 devices, and 6 on 4
    assert batch_layout(FULL_HETERO_DP, num_microbatches=3, rows=6).rounds == 1
    assert batch_layout(FULL_HETERO_DP, num_microbatches=3, rows=12).rounds == 2


@dataclasses.dataclass(frozen=True)
class OneProcess(BatchLayout):
    """A process that has some of the devices, and so some columns of the arrays."""

    rows_here: tuple[int, ...] = ()
    slots_here: tuple[int, ...] = ()

    def columns(self, key):
        return list(self.slots_here if key in PATCH_KEYS else self.rows_here)


@pytest.mark.parametrize(
    "parts",
    [
        # a process for each data parallel rank, of 2 rows in a microbatch and 4 devices
        [((0, 1), (0, 1, 2, 3)), ((2, 3), (4, 5, 6, 7))],
        # a process for each stage: all rows, and half of the devices of each rank
        [((0, 1, 2, 3), (0, 1, 4, 5)), ((0, 1, 2, 3), (2, 3, 6, 7))],
        # a process for each device of the first rank, another for the second
        [((0, 1), (0,)), ((0, 1), (1,)), ((0, 1), (2,)), ((0, 1), (3,)), ((2, 3), (4, 5, 6, 7))],
    ],
)
def test_the_batches_of_several_processes_are_those_of_one(parts):
    layout, rows = batch_layout(FULL_HETERO_DP), some_rows()
    whole = layout.assemble(rows).arrays
    for rows_here, slots_here in parts:
        process = OneProcess(**vars_of(layout), rows_here=rows_here, slots_here=slots_here)
        local = process.assemble({key: array[:, list(rows_here)] for key, array in rows.items()}).arrays
        assert local.keys() == whole.keys()
        for key in whole:
            np.testing.assert_array_equal(local[key], whole[key][:, process.columns(key)])


def vars_of(layout):
    return {field.name: getattr(layout, field.name) for field in dataclasses.fields(layout)}


def test_the_encoder_load_is_that_of_the_least_balanced_group():
    config = run_config(ENCODER_HETERO_DP)
    # a rank's rows in turn: 24 and 8 patches make 3 / 4 and 1 / 4; 16 and 16 are balanced; the third rank has none
    texts = [row(config, document(config, 2)) for _ in range(2)]
    first = [row(config, document(config, 1, [image(8, 12, seed=0), image(4, 8, seed=1)])), texts[0]]
    second = [row(config, document(config, 1, [image(8, 8, seed=seed)])) for seed in range(2)]

    def load(*ranks):
        layout = BatchLayout(
            batch_layout(ENCODER_HETERO_DP).row_format,
            microbatches=1,
            rows=2 * len(ranks),
            mesh=build_mesh(MeshLayout(replica=len(ranks), tensor_outer=2), jax.devices()[: 2 * len(ranks)]),
            encoder_tensor=2,
        )
        rows = [one for rank in ranks for one in rank]
        return layout.assemble({key: np.stack([one[key] for one in rows])[None] for key in rows[0]}).encoder_load

    assert load(first) == 1.5
    assert load(second) == 1.0
    assert load(texts) == 1.0
    assert load(second, first, texts) == 1.5


def test_where_nothing_is_divided_there_is_no_encoder_load():
    rows = some_rows()
    local = batch_layout({}).assemble(rows)
    assert local.encoder_load is None and local.arrays.keys() == rows.keys()


def test_text_alone_can_be_placed():
    # as in generation, where only the tokens change
    layout, tokens = batch_layout(FULL_HETERO_DP), some_rows()["tokens"]
    batch = layout.batch({"tokens": tokens})
    assert batch.keys() == {"tokens"}
    np.testing.assert_array_equal(batch["tokens"], tokens)


def test_a_process_with_all_devices_holds_all_columns():
    layout = batch_layout(FULL_HETERO_DP)
    assert layout.columns("tokens") == [0, 1, 2, 3]
    assert layout.columns("patches") == list(range(8))


class Rows:
    """`some_rows` by number."""

    def row(self, index):
        return {key: array.reshape(-1, *array.shape[2:])[index % 8] for key, array in some_rows().items()}


@pytest.mark.parametrize("mode", MODES)
def test_the_loader_gives_such_batches_and_says_how_well_they_are_divided(mode):
    layout = batch_layout(mode)
    with Loader(Rows(), run_config(mode), layout.mesh, num_microbatches=2) as loader:
        batch, info = next(loader)
    expected = layout.batch(some_rows())
    assert batch.keys() == expected.keys()
    for key, array in expected.items():
        assert batch[key].sharding == array.sharding
        np.testing.assert_array_equal(batch[key], array)
    assert set(info) == {"wait_seconds"} | ({"encoder_load"} if mode else set())
    if mode:
        patches = np.asarray(batch["patch_segments"])
        load_RG = (patches > 0).sum(axis=(0, 2)).reshape(RANKS, -1)
        assert info["encoder_load"] == (load_RG.max(axis=1) / load_RG.mean(axis=1)).max()
