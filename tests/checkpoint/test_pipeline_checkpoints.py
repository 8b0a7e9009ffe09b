"""Weights and checkpoints of pipelined runs: every layer finds its place at any other layout."""

import dataclasses
import functools
import logging
import re

import jax
import numpy as np
import pytest
from hf_folders import InMemory
from tiny_models import random_parameters, tiny_config

from jaxforge.checkpoint import CheckpointManager
from jaxforge.checkpoint.arrays import DeviceArrays, _piece, flatten, is_same_order, layers_of, load
from jaxforge.checkpoint.hf import export
from jaxforge.checkpoint.stored import LAYER_ORDER, RunCheckpoint, described_order
from jaxforge.checkpoint.weights import fingerprint, trained_weights
from jaxforge.cluster.mesh import MeshLayout, build_mesh
from jaxforge.config.errors import ConfigError
from jaxforge.config.schema import AdapterConfig, CheckpointConfig, Config, LoraConfig
from jaxforge.models.layer_order import LayerOrder, is_in_stacks
from jaxforge.training.program import build_program
from jaxforge.training.state import restored_state, state_arrays

# Fields of config.parallel, and the layer in each place of a stack, by hand.  Ranks hold their chunks one after the
# other, and fill up with unused places (-1) to the number of the fullest.
LAYOUTS = {
    "none": (dict(), (0, 1, 2, 3)),
    "pp 2": (dict(pipeline_model_parallel_size=2, tensor_model_parallel_size=2), (0, 1, 2, 3)),
    "pp 4": (dict(pipeline_model_parallel_size=4), (0, 1, 2, 3)),
    "pp 2, vpp 2": (dict(pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=1), (0, 2, 1, 3)),
    "uneven": (
        dict(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Ettt|tL"),
        (0, 1, 2, 3, -1, -1),
    ),
    # stages of 1, 1, 0 and 2 layers: the first rank has one, the second three
    "with a hole": (
        dict(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et|t||ttL"),
        (0, -1, -1, 1, 2, 3),
    ),
}


def all_alike(order: tuple[int, ...]) -> LayerOrder:
    """Of a decoder whose layers are all dense."""
    return LayerOrder(order, order, ())


SHUFFLED = ("pp 2, vpp 2", "with a hole")


def config_of(layout: str, num_layers: int = 4, **changes) -> Config:
    """A decoder whose MLPs are frozen, in bfloat16."""
    groups = dict(optimizer=dict(freeze=("decoder/layers/mlp/*",)), train=dict(compute_dtype="bfloat16")) | changes
    return tiny_config(None, decoder_changes=dict(num_layers=num_layers), parallel=LAYOUTS[layout][0], **groups)


@functools.cache
def program_of(config: Config):
    parallel = config.parallel
    num_devices = parallel.pipeline_model_parallel_size * parallel.tensor_model_parallel_size
    mesh = build_mesh(MeshLayout.from_config(config, num_devices), jax.devices()[:num_devices])
    return build_program(config, mesh, "cpu")


def by_path(tree) -> dict:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def is_cut(path: str) -> bool:
    return "decoder/layers/" in path


def in_place(path: str, array: np.ndarray, order: tuple[int, ...]) -> np.ndarray:
    """An array [4, ...] as the state has it; unused places hold what nobody may read."""
    if not is_cut(path):
        return array
    return np.stack([array[layer] if layer >= 0 else np.full_like(array[0], np.nan) for layer in order])


def in_turn(path: str, array: jax.Array, order: tuple[int, ...]) -> np.ndarray:
    array = np.asarray(array)
    return array[[order.index(layer) for layer in range(4)]] if is_cut(path) else array


def random_values(abstract) -> dict[str, np.ndarray]:
    """Random arrays of a whole state by path; -0 among them."""
    rng = np.random.default_rng(0)
    made = {}
    for path, leaf in by_path(abstract).items():
        array = rng.normal(size=leaf.shape) if leaf.shape else np.array(rng.integers(1, 99))
        made[path] = array.astype(leaf.dtype)
        made[path].reshape(-1)[:1] *= -0.0 if leaf.shape else 1
    return made


@pytest.fixture(scope="module")
def values() -> dict[str, np.ndarray]:
    """Of a state without a pipeline."""
    made = random_values(program_of(config_of("none")).abstract_state)
    assert any(is_cut(path) and path.startswith("frozen") for path in made)
    assert sum(is_cut(path) and path.startswith("optimizer") for path in made) == 2 * 6
    return made


def placed(abstract, values: dict[str, np.ndarray], order: tuple[int, ...]):
    """The state of which `values` are the arrays without a pipeline."""

    def place(path, leaf):
        path = jax.tree_util.keystr(path, simple=True, separator="/")
        return jax.device_put(in_place(path, values[path], order), leaf.sharding)

    return jax.tree_util.tree_map_with_path(place, abstract)


def state_of(layout: str, values: dict[str, np.ndarray]):
    return placed(program_of(config_of(layout)).abstract_state, values, LAYOUTS[layout][1])


def save(folder, config: Config, order: tuple[int, ...], state, *steps: int, **metadata) -> None:
    metadata["config"] = dataclasses.asdict(config)
    # runs from before there were pipelines say nothing
    if config.parallel.pipeline_model_parallel_size > 1:
        metadata[LAYER_ORDER] = described_order(all_alike(order))
    manager = CheckpointManager(folder / "checkpoints", keep=3, save_every_steps=1)
    for step in steps:
        manager.save(step, state, metadata)
    manager.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory, values):
    """A run directory of each layout, with a checkpoint of step 3."""
    folders = {layout: tmp_path_factory.mktemp("run") for layout in LAYOUTS}
    for layout, folder in folders.items():
        save(folder, config_of(layout), LAYOUTS[layout][1], state_of(layout, values), 3)
    return folders


def restore(folder, layout: str):
    order = None if layout == "none" else all_alike(LAYOUTS[layout][1])
    manager = CheckpointManager(folder / "checkpoints", keep=3, save_every_steps=1)
    try:
        return manager.restore(program_of(config_of(layout)).abstract_state, order)
    finally:
        manager.close()


@pytest.mark.parametrize("loaded", LAYOUTS)
@pytest.mark.parametrize("saved", LAYOUTS)
def test_every_layer_has_its_weights_and_moments_at_any_other_layout(runs, values, saved, loaded):
    step, state, _ = restore(runs[saved], loaded)
    assert step == 3
    order = LAYOUTS[loaded][1]
    abstract = by_path(program_of(config_of(loaded)).abstract_state)
    for path, array in by_path(state).items():
        expected = values[path]
        assert (array.shape, array.dtype, array.sharding) == (
            abstract[path].shape, abstract[path].dtype, abstract[path].sharding
        ), path  # fmt: skip
        assert in_turn(path, array, order).tobytes() == expected.tobytes(), path
        if is_cut(path) and LAYOUTS[saved][1] != order:
            unused = np.asarray(array)[[place for place, layer in enumerate(order) if layer < 0]]
            assert not unused.any(), path


def test_layers_are_read_one_by_one_only_where_their_places_differ(runs, caplog):
    with caplog.at_level(logging.INFO, logger="jaxforge"):
        restore(runs["pp 4"], "none")
        restore(runs["pp 2"], "pp 4")
        restore(runs["with a hole"], "with a hole")
        assert not caplog.records
        restore(runs["none"], "uneven")
    assert "the decoder's layers lie in other places" in caplog.text


def test_the_decoders_layers_alone_are_cut_over_stages():
    cut = ["decoder/layers/mlp/up_DF", "trainable/decoder/layers/mlp/up_DF", "optimizer/1/nu/decoder/layers/mlp/up_DF"]
    whole = ["encoder/layers/mlp/up_DF", "projector/deepstack/norm/scale", "decoder/embedding_VD", "optimizer/1/count"]
    assert [path for path in cut + whole if is_in_stacks(path)] == cut


def test_orders_are_the_same_where_stacks_are():
    turned, in_turn, short = (all_alike(order) for order in ((1, 0), (0, 1, 2), (0, 1, -1)))
    assert is_same_order(None, None) and is_same_order(None, in_turn) and is_same_order(turned, turned)
    # with as many layers, but unused places
    assert not is_same_order(None, short) and not is_same_order(short, all_alike((0, -1, 1)))
    # experts that lie otherwise
    assert not is_same_order(in_turn, in_turn._replace(moe=(1, 0)))


def test_f65_a_damaged_checkpoint_is_passed_over_at_another_layout_too(tmp_path, values, caplog):
    save(tmp_path, config_of("uneven"), LAYOUTS["uneven"][1], state_of("uneven", values), 3, 6)
    largest = max((tmp_path / "checkpoints" / "6").rglob("*"), key=lambda file: file.is_file() and file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    step, state, _ = restore(tmp_path, "none")
    assert step == 3 and "step 6 is damaged" in caplog.text
    path = "optimizer/1/mu/decoder/layers/attention/query_DHK"
    assert np.array_equal(by_path(state)[path], values[path])


@pytest.mark.parametrize(
    "saved, loaded, order", [("none", "pp 2, vpp 2", (0, 2, 4, 1, 3, 5)), ("uneven", "none", None)]
)
def test_another_number_of_layers_is_another_model_whatever_the_layout(runs, saved, loaded, order):
    # six layers, as many as "uneven" has places
    abstract = program_of(config_of(loaded, num_layers=6)).abstract_state
    manager = CheckpointManager(runs[saved] / "checkpoints", keep=3, save_every_steps=1)
    message = r"layers/mlp/up_DF: saved bfloat16\[4, 16, 12\], the config makes bfloat16\[6, 16, 12\]"
    with pytest.raises(ConfigError, match=message):
        manager.restore(abstract, order and all_alike(order))
    manager.close()


# Readers


def assert_reads(arrays, expected: dict[str, np.ndarray]) -> None:
    assert arrays.shapes == {path: array.shape for path, array in expected.items()}
    for path, array in expected.items():
        for layer in layers_of(path, array.shape):
            wanted = array if layer is None else array[layer]
            assert arrays.has(path, layer) and arrays.read(path, layer).tobytes() == wanted.tobytes(), (path, layer)


def parameters_of(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {path.partition("/")[2]: array for path, array in values.items() if path.startswith(("trainable", "frozen"))}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_shows_layers_by_their_number_in_the_model(runs, values, layout):
    assert_reads(RunCheckpoint.open(runs[layout]).arrays, parameters_of(values))


@pytest.mark.parametrize("layout", ["pp 2", *SHUFFLED])
def test_a_state_on_the_devices_shows_layers_by_their_number_in_the_model(values, layout):
    state, order = state_of(layout, values), LAYOUTS[layout][1]
    for kind, dtype in (("trainable", "float32"), ("frozen", "bfloat16")):
        own = {path: array for path, array in values.items() if path.startswith(kind)}
        assert_reads(DeviceArrays(state[kind], dtype, all_alike(order)), parameters_of(own))


def test_reading_a_layer_gathers_no_more_than_the_layer(values):
    # two stages of three places, tensor parallel 2
    stack = state_of("with a hole", values)["trainable"]["decoder"]["layers"]["attention"]["query_DHK"]
    program = _piece(stack.sharding, np.dtype("float32"), True).lower(stack, 0).compile().as_text()
    moved = re.findall(r"= \w+\[([\d,]*)\]\S* (?:all-\w+|collective-\w+)\(", program)
    assert moved and all(np.prod([int(size) for size in shape.split(",")]) <= 16 * 8 * 8 for shape in moved)


# Loading


@pytest.mark.parametrize("layout", ["pp 2", "uneven", *SHUFFLED])
def test_given_weights_go_to_the_places_of_their_layers(layout):
    order, given = LAYOUTS[layout][1], random_parameters(config_of("none"))
    abstract = program_of(config_of(layout)).abstract_base
    loaded, expected = load(InMemory(given), abstract, order=all_alike(order)), flatten(given)
    for path, array in flatten(loaded).items():
        assert array.sharding == flatten(abstract)[path].sharding
        assert np.array_equal(in_turn(path, array, order), expected[path].astype(array.dtype)), path
        if is_cut(path):
            assert not np.asarray(array)[[layer < 0 for layer in order]].any(), path


class WithoutLayer2(InMemory):
    def has(self, path, layer):
        return super().has(path, layer) and not (is_cut(path) and layer == 2)


def test_a_layer_that_the_weights_lack_keeps_its_initial_values():
    order = LAYOUTS["with a hole"][1]
    abstract = program_of(config_of("with a hole")).abstract_base
    initial = jax.tree.map(lambda leaf: jax.device_put(np.full(leaf.shape, 7, leaf.dtype), leaf.sharding), abstract)
    reader = WithoutLayer2(random_parameters(config_of("none")))
    with pytest.raises(ValueError, match="has no values"):
        load(reader, abstract, order=all_alike(order))
    query = load(reader, abstract, initial, all_alike(order))["decoder"]["layers"]["attention"]["query_DHK"]
    expected = random_parameters(config_of("none"))["decoder"]["layers"]["attention"]["query_DHK"]
    for place, layer in enumerate(order):
        assert np.array_equal(query[place], np.full_like(query[0], 7) if layer in (2, -1) else expected[layer]), place


# Adapters, whose checkpoints hold no base


def adapted(layout: str, base) -> Config:
    """Adapters on the queries, in fp32, and a final norm that trains as a whole."""
    lora = LoraConfig(
        decoder=AdapterConfig(rank=2, alpha=6.0, targets=("**/query_*",)), train_also=("decoder/final_norm/*",)
    )
    checkpoint = CheckpointConfig(init_from_hf=str(base), export_hf_every_steps=1, export_hf_dtype="float32")
    return dataclasses.replace(config_of(layout, optimizer={}, train={}), lora=lora, checkpoint=checkpoint)


@pytest.mark.parametrize("saved, loaded", [("pp 2, vpp 2", "none"), ("none", "with a hole"), ("uneven", "pp 2, vpp 2")])
def test_adapters_find_their_layers_and_their_base_at_another_layout(tmp_path, saved, loaded):
    plain = config_of("none", optimizer={}, train={})
    parameters = random_parameters(plain, seed=1)
    for table in ("embedding_VD", "head_VD"):
        parameters["decoder"][table][21:] = 0  # padding of the vocabulary, which isn't exported
    export(tmp_path / "hf", InMemory(parameters), plain.model, dtype="float32")
    base = flatten(parameters)
    config, program = adapted(saved, tmp_path / "hf"), program_of(adapted(saved, tmp_path / "hf"))
    values = random_values(program_of(adapted("none", tmp_path / "hf")).abstract_state)
    state = program.saved(placed(program.abstract_state, values, LAYOUTS[saved][1]))
    assert not state["frozen"]
    save(tmp_path, config, LAYOUTS[saved][1], state, 3, base=fingerprint(config))

    config, program = adapted(loaded, tmp_path / "hf"), program_of(adapted(loaded, tmp_path / "hf"))
    manager = CheckpointManager(tmp_path / "checkpoints", keep=3, save_every_steps=1)
    step, state, _ = restored_state(config, program, manager)
    manager.close()
    assert step == 3 and state.keys() == program.abstract_state.keys()
    for path, array in by_path(state).items():
        expected = base[path.removeprefix("frozen/")] if path.startswith("frozen/") else values[path]
        assert np.array_equal(in_turn(path, array, LAYOUTS[loaded][1]), expected), path

    trained = {path: array for path, array in parameters_of(values).items() if path not in base or "norm/" in path}
    query = "decoder/layers/attention/query_DHK"
    a, b = (trained[f"{query}_lora_{part}"].astype(np.float64) for part in "ab")
    for arrays in (state_arrays(config, state), trained_weights(RunCheckpoint.open(tmp_path))):
        assert np.array_equal(arrays.read("decoder/final_norm/scale", None), trained["decoder/final_norm/scale"])
        for layer in range(4):
            up_DF = arrays.read("decoder/layers/mlp/up_DF", layer)
            assert np.array_equal(up_DF, base["decoder/layers/mlp/up_DF"][layer])
            # alpha / rank is 3; fp32 against fp64
            expected = base[query][layer] + 3 * np.tensordot(a[layer], b[layer], 1)
            np.testing.assert_allclose(arrays.read(query, layer), expected, rtol=1e-6, atol=1e-6)


# Random weights, which adapters may lie on: what a seed gives doesn't depend on the layout


def test_a_seed_gives_every_layer_the_same_weights_and_adapters_at_any_layout():
    lora = LoraConfig(decoder=AdapterConfig(rank=2))
    initial = {}
    for layout in ("none", "with a hole"):
        config = dataclasses.replace(config_of(layout, optimizer={}), lora=lora)
        state = program_of(config).initialise(3)
        order = LAYOUTS[layout][1]
        initial[layout] = {path: in_turn(path, array, order) for path, array in by_path(state).items()}
    assert initial["none"].keys() == initial["with a hole"].keys()
    for path, array in initial["none"].items():
        assert array.tobytes() == initial["with a hole"][path].tobytes(), path
