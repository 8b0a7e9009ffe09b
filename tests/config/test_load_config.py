"""Recipes, overrides, types, origins, and config.yml."""

from pathlib import Path

import pytest
import yaml

from jaxforge.config import (
    Config,
    ConfigError,
    default_config,
    from_yaml,
    load_config,
    model_config,
    resolve,
    to_yaml,
    value_origins,
)

VIT_YAML = str(Path(__file__).parent / "data" / "qwen3_vit_tp2.yaml")

RECIPE = """
from jaxforge.config import default_config, model_config


def get_config(size="small"):
    config = default_config()
    config.model = model_config("qwen2_5_vl_3b")
    config.train.steps = 30 if size == "small" else 300
    config.optimizer.lr_scale = (("encoder/**", 0.1),)
    return config
"""


@pytest.fixture
def recipe(tmp_path):
    file = tmp_path / "recipe.py"
    file.write_text(RECIPE)
    return str(file)


def _refusal(function, *args):
    with pytest.raises(ConfigError) as error:
        function(*args)
    return str(error.value)


def test_the_defaults_are_the_schema():
    assert resolve(default_config()) == Config()


def test_overrides_win_over_the_recipe(recipe):
    overrides = [
        "train.steps=20",
        "--config.optimizer.learning_rate=1e-5",
        "--config.parallel.sequence_parallel=true",
        "--config.memory.recompute_num_layers=none",
        "--config.optimizer.freeze=encoder/**,projector/**",
        "--config.model.encoder.fullatt_block_indexes=(1,3)",
        "--config.model.projector.ffn_hidden_size=512",
    ]
    config = resolve(load_config(recipe, overrides))
    assert config.train.steps == 20
    assert config.optimizer.learning_rate == 0.00001
    assert config.parallel.sequence_parallel is True
    assert config.memory.recompute_num_layers is None
    assert config.optimizer.freeze == ("encoder/**", "projector/**")
    assert config.model.encoder.fullatt_block_indexes == (1, 3)
    assert config.model.projector.ffn_hidden_size == 512
    assert config.model.projector.normalization == "RMSNorm"


def test_the_last_of_two_overrides_wins(recipe):
    assert load_config(recipe, ["train.steps=5", "train.steps=6"]).train.steps == 6


def test_an_argument_reaches_get_config(recipe):
    assert load_config(recipe).train.steps == 30
    assert load_config(f"{recipe}:large").train.steps == 300


def test_an_encoder_can_be_taken_away(recipe):
    config = resolve(load_config(recipe, ["model.encoder=none"]))
    assert config.model.encoder is None
    assert config.model.projector is None


def test_any_encoder_goes_with_any_decoder():
    config = default_config()
    config.model = model_config("qwen3_8b")
    config.model.encoder = model_config("qwen2_5_vl_7b").encoder
    model = resolve(config).model
    assert (model.decoder.hidden_size, model.encoder.hidden_size) == (4096, 1280)
    assert model.projector.normalization == "RMSNorm"
    config.model.encoder = model_config("qwen3_vl_8b").encoder
    model = resolve(config).model
    assert (model.encoder.hidden_size, model.projector.normalization) == (1152, "LayerNorm")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--config.train.stpes=3", "train has no field 'stpes'; did you mean steps?"),
        ("--config.steps=3", "config has no field 'steps'; did you mean train.steps?"),
        ("--config.trian.steps=3", "config has no field 'trian'; did you mean train?"),
        ("--config.train.steps.x=3", "train.steps is a field, it has no field 'x'"),
        ("--config.logging.colour=3", "logging has no field 'colour'; its fields are tensorboard, pictures"),
        ("--config.train.steps=abc", "train.steps=abc has the wrong type; give a whole number"),
        ("--config.train.steps=1.5", "train.steps=1.5 has the wrong type; give a whole number"),
        ("--config.model.decoder.mrope_section=1,x,2", "model.decoder.mrope_section[1]=x has the wrong type"),
        ("--config.train.steps", "override '--config.train.steps' has no value"),
        ("--config.train=3", "train=3: train is a group of fields"),
        ("--config.model.encoder=nowhere.yaml", "model.encoder=nowhere.yaml doesn't exist"),
    ],
)
def test_a_wrong_override_is_refused(recipe, override, message):
    assert message in _refusal(load_config, recipe, [override])


def test_a_field_of_no_encoder_is_refused(recipe):
    message = _refusal(load_config, recipe, ["model.encoder=none", "model.encoder.num_layers=2"])
    assert "model.encoder.num_layers=2: model.encoder is None, so it has no fields" in message


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("config.train.stpes = 3", "line 8: config.train.stpes = 3\n  no such field 'stpes'; did you mean steps"),
        ("config.train.update(stpes=3)", "no such field 'stpes'; did you mean steps"),
        ("config.train.steps = config.trian.steps", "no such field 'trian'; did you mean train"),
        ("return 3", "get_config() returned int; return a ConfigDict"),
        ("config.model = model_config('qwen2_5_vl_7')", "no model 'qwen2_5_vl_7'; did you mean qwen2_5_vl_7"),
    ],
)
def test_a_wrong_recipe_is_refused(tmp_path, line, message):
    file = tmp_path / "wrong.py"
    file.write_text(RECIPE.replace('config.train.steps = 30 if size == "small" else 300', line))
    assert message in _refusal(load_config, str(file))


def test_a_wrong_line_is_found_in_a_recipe_with_a_relative_path(tmp_path, monkeypatch):
    (tmp_path / "wrong.py").write_text(RECIPE.replace("config.train.steps", "config.train.stpes"))
    monkeypatch.chdir(tmp_path)
    assert _refusal(load_config, "wrong.py").startswith("wrong.py, line 8: config.train.stpes = 30")


def test_a_programming_error_in_a_recipe_keeps_its_traceback(tmp_path):
    file = tmp_path / "wrong.py"
    file.write_text("def get_config():\n    return {}['steps']\n")
    with pytest.raises(KeyError, match="steps"):
        load_config(str(file))


def test_a_recipe_that_is_not_there_is_refused(tmp_path):
    assert "no recipe at configs/nothing.py" in _refusal(load_config, "configs/nothing.py")
    file = tmp_path / "empty.py"
    file.write_text("")
    assert "has no get_config()" in _refusal(load_config, str(file))
    file.write_text("def get_config():\n    pass\n")
    assert "can't be called as get_config('x')" in _refusal(load_config, f"{file}:x")
    message = _refusal(load_config, "configs/models/qwen3_8b.py")
    assert "get_config() returned no model, parallel" in message
    assert message.endswith("start it from default_config()")


@pytest.mark.parametrize(
    ("group", "values", "message"),
    [
        ("train", {"steps": "20"}, "train.steps='20' has the wrong type"),
        ("train", {"steps": True}, "train.steps=True has the wrong type"),
        ("optimizer", {"lr_scale": (("a", "b"),)}, "optimizer.lr_scale[0][1]='b' has the wrong type"),
        ("optimizer", {"lr_decay_style": "cosin"}, "is not one of constant, cosine, linear, WSD; did you mean cosine?"),
        ("train", {"stpes": 2}, "train has no field 'stpes'; did you mean steps?"),
        ("model", {"encoder": {"num_layer": 2}}, "model.encoder has no field 'num_layer'; did you mean num_layers"),
        ("model", {"encoder": {"model_type": "qwen3"}}, "model.encoder.model_type=qwen3 is not one of"),
        ("model", {"encoder": 3}, "model.encoder=3 must be a group of fields"),
        ("model", {"projector": {"norm": "RMSNorm"}}, "model.projector has no field 'norm'"),
    ],
)
def test_a_wrong_value_is_refused_by_resolve(group, values, message):
    assert message in _refusal(resolve, {group: values})


def test_origins_say_who_gave_each_value(recipe):
    overrides = ["train.seq_length=64", f"model.encoder={VIT_YAML}", "model.encoder.hidden_size=64"]
    config = load_config(recipe, overrides)
    config.train.micro_batch_size = 2
    origins = value_origins(config)
    assert origins["train.steps"] == recipe
    assert origins["optimizer.lr_scale"] == recipe
    assert origins["train.seq_length"] == "command line"
    assert origins["train.micro_batch_size"] == "set in Python"
    assert origins["model.decoder.num_layers"] == "configs/models/qwen2_5_vl_3b.py"
    assert origins["model.encoder.num_layers"] == VIT_YAML
    assert origins["model.encoder.hidden_size"] == "command line"
    # defaults have no origin: of the schema, of qwen3_vit, and of the projector that follows it
    assert not {"train.seed", "model.encoder.swiglu", "model.projector.normalization"} & set(origins)


def test_a_value_changed_after_loading_is_set_in_python(recipe):
    config = load_config(recipe, ["train.seq_length=64"])
    config.train.seq_length, config.train.steps = 32, 5
    origins = value_origins(config)
    assert origins["train.seq_length"] == origins["train.steps"] == "set in Python"


def test_resolving_leaves_the_config_as_it_is():
    config = default_config()
    config.model.encoder = VIT_YAML
    resolve(config)
    assert config.model.encoder == VIT_YAML
    assert config.model.projector is None


def test_the_yaml_loads_back_and_names_origins(recipe):
    config = load_config(
        recipe, ["optimizer.adam_eps=1e-12", f"model.encoder={VIT_YAML}", "data.max_patches_per_row=8"]
    )
    resolved = resolve(config)
    text = to_yaml(resolved, value_origins(config))
    assert from_yaml(text) == resolved
    lines = [line.strip() for line in text.splitlines()]
    assert f"steps: 30  # from {recipe}" in lines
    assert "max_patches_per_row: 8  # from command line" in lines
    assert f"deepstack_visual_indexes: [8, 16, 24]  # from {VIT_YAML}" in lines
    assert "seed: 0" in lines
    # any YAML reader sees the number, not a string
    assert yaml.safe_load(text)["optimizer"]["adam_eps"] == 1e-12


def test_the_yaml_of_a_language_model_loads_back():
    resolved = resolve(default_config())
    assert from_yaml(to_yaml(resolved, {})) == resolved


def test_a_broken_yaml_is_refused():
    assert "not valid YAML" in _refusal(from_yaml, "a: [")
    assert "must be a group of fields" in _refusal(from_yaml, "3")
