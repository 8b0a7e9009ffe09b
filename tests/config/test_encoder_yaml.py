"""LoongForge's vit.yaml files."""

from pathlib import Path

import pytest

from jaxforge.config import ConfigError, default_config, load_config, resolve
from jaxforge.config.encoder_yaml import read_encoder_yaml

DATA = Path(__file__).parent / "data"
RECIPE = "from jaxforge.config import default_config\n\n\ndef get_config():\n    return default_config()\n"


def _encoder(path):
    config = default_config()
    config.model.encoder = str(path)
    return resolve(config).model.encoder


def _refusal(tmp_path, text):
    file = tmp_path / "vit.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_encoder_yaml(file)
    return str(error.value).replace(str(file), "vit.yaml")


def test_the_qwen3_file_loads_as_it_is():
    encoder = _encoder(DATA / "qwen3_vit_tp2.yaml")
    assert (encoder.model_type, encoder.num_layers, encoder.hidden_size) == ("qwen3_vit", 27, 1152)
    assert (encoder.kv_channels, encoder.ffn_hidden_size, encoder.patch_size) == (72, 4304, 16)
    assert encoder.deepstack_visual_indexes == (8, 16, 24)
    assert encoder.num_position_embeddings == 2304
    assert encoder.image_size == (1344, 1344)
    assert encoder.tensor_model_parallel_size == 2
    assert (encoder.normalization, encoder.swiglu, encoder.gated_linear_unit) == ("LayerNorm", False, False)
    # full attention everywhere: qwen3_vit has no windows
    assert encoder.fullatt_block_indexes == ()


def test_the_qwen2_5_file_loads_as_it_is():
    encoder = _encoder(DATA / "qwen2_5_vit_tp1.yaml")
    assert (encoder.model_type, encoder.num_layers, encoder.hidden_size) == ("qwen2_5_vit", 32, 1280)
    assert (encoder.activation_func, encoder.swiglu, encoder.normalization) == ("silu", True, "RMSNorm")
    assert encoder.tensor_model_parallel_size == 1
    assert encoder.apply_rope_fusion is True
    # not in the file: what Qwen2.5-VL has
    assert encoder.window_size == 112
    assert encoder.fullatt_block_indexes == (7, 15, 23, 31)
    assert encoder.recompute_granularity is None


def test_the_qwen2_5_file_with_recompute_loads_as_it_is():
    encoder = _encoder(DATA / "qwen2_5_vit_recompute.yaml")
    assert encoder.recompute_granularity == "full"
    assert (encoder.recompute_method, encoder.recompute_num_layers) == ("uniform", 1)


@pytest.mark.parametrize(
    ("model_type", "written", "meant"),
    [
        ("qwen3_vit", "${act:gelu}", "gelu_tanh"),
        ("qwen2_5_vit", "${act:gelu}", "gelu"),
        ("qwen3_vit", "gelu", "gelu"),
        ("qwen2_5_vit", "${act:silu}", "silu"),
    ],
)
def test_an_activation_of_loongforge_means_what_the_released_weights_need(tmp_path, model_type, written, meant):
    file = tmp_path / "vit.yaml"
    file.write_text(f"model_type: {model_type}\nactivation_func: {written}\n")
    assert read_encoder_yaml(file)["activation_func"] == meant


def test_the_target_alone_gives_the_type(tmp_path):
    file = tmp_path / "vit.yaml"
    file.write_text("_target_: loongforge.models.encoder.Qwen3VisionModelConfig\nnorm_epsilon: 1e-5\n")
    # YAML 1.1 has 1e-5 as a string
    assert read_encoder_yaml(file) == {"model_type": "qwen3_vit", "norm_epsilon": 0.00001}


def test_the_projector_normalises_as_the_encoder_does():
    config = default_config()
    config.model.encoder = str(DATA / "qwen3_vit_tp2.yaml")
    assert resolve(config).model.projector.normalization == "LayerNorm"
    config.model.encoder = str(DATA / "qwen2_5_vit_tp1.yaml")
    assert resolve(config).model.projector.normalization == "RMSNorm"


def test_the_command_line_wins_over_the_file(tmp_path):
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE)
    overrides = [f"--config.model.encoder={DATA / 'qwen2_5_vit_tp1.yaml'}", "--config.model.encoder.num_layers=8"]
    for order in (overrides, overrides[::-1]):
        encoder = resolve(load_config(str(recipe), order)).model.encoder
        assert (encoder.num_layers, encoder.hidden_size) == (8, 1280)
        # of the layers 7, 15, 23 and 31 that follow from the type, this encoder has one
        assert encoder.fullatt_block_indexes == (7,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "model_type: qwen3_vit\nnum_layer: 2\n",
            "vit.yaml, line 2: unknown key 'num_layer' in a vision encoder; did you",
        ),
        ("model_type: qwen3_vit\nnum_layers: two\n", "vit.yaml, line 2: num_layers='two' has the wrong type"),
        ("model_type: qwen3_vit\nimage_size: [1, x]\n", "vit.yaml, line 2: image_size[1]='x' has the wrong type"),
        ("model_type: qwen3_vit\nnum_layers: 2\nnum_layers: 3\n", "line 3: 'num_layers' is already given in line 2"),
        ("model_type: vit\n", "vit.yaml, line 1: model_type=vit is unknown; use qwen2_5_vit or qwen3_vit"),
        ("_target_: a.B\n", "vit.yaml, line 1: _target_=a.B is unknown; the encoders are loongforge."),
        (
            "model_type: qwen2_5_vit\n_target_: loongforge.models.encoder.Qwen3VisionModelConfig\n",
            "Qwen3VisionModelConfig is qwen3_vit, but model_type=qwen2_5_vit (line 1); make them agree",
        ),
        ("num_layers: 2\n", "says neither model_type nor _target_"),
        (
            "model_type: qwen3_vit\nactivation_func: ${act:relu}\n",
            "line 2: activation_func=${act:relu} is unknown; use ${act:silu} or ${act:gelu}",
        ),
        ("model_type: qwen3_vit\nnormalization: ${norm:x}\n", "normalization=${norm:x} can't be resolved"),
        ("- 1\n", "must hold `field: value` lines"),
        ("a: [1\n", "vit.yaml is not valid YAML"),
        ("model_type: qwen3_vit\n1: 2\n", "has keys that aren't plain names"),
    ],
)
def test_a_wrong_file_is_refused_by_line(tmp_path, text, message):
    assert message in _refusal(tmp_path, text)


def test_a_missing_file_is_refused():
    with pytest.raises(ConfigError, match="model.encoder=no/vit.yaml doesn't exist"):
        _encoder("no/vit.yaml")
