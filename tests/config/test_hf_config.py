"""config.json: the published files, both forms of the rotary settings, and what is refused."""

import dataclasses
import json
from pathlib import Path

import pytest
from published_files import FAMILIES, PUBLISHED, QUANTIZATION, model_of, published, refusal

from jaxforge.config import ConfigError, hf_model, load_config, model_config, resolve, value_origins
from jaxforge.config.defaults import CONFIGS
from jaxforge.config.hf_config import architecture_of, config_json_of, family_of, read_architecture
from jaxforge.config.model_schema import DecoderConfig

MODELS = sorted(path.stem for path in (CONFIGS / "models").glob("*.py"))
RELEASED = [name for name in MODELS if not name.startswith("demo")]
ARCHITECTURES = [name for name in FAMILIES if name in MODELS]


def folder_with(tmp_path: Path, config_json) -> Path:
    text = config_json if isinstance(config_json, str) else json.dumps(config_json)
    (tmp_path / "config.json").write_text(text)
    return tmp_path


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_published_file_gives_the_architecture_of_the_model_file(name):
    assert model_of(published(name)) == resolve({"model": model_config(name)}).model


def test_a_published_file_of_qwen2_5_gives_its_architecture():
    # https://huggingface.co/Qwen/Qwen2.5-0.5B: 14 heads of 64
    small = DecoderConfig(
        num_layers=24, hidden_size=896, ffn_hidden_size=4864, num_attention_heads=14, num_query_groups=2,
        kv_channels=64, vocab_size=151936, add_qkv_bias=True, norm_epsilon=1e-6, rotary_base=1e6,
        untie_embeddings_and_output_weights=False,
    )  # fmt: skip
    assert model_of(published("qwen2_5_0_5b")).decoder == small
    large = dataclasses.replace(
        small, num_layers=28, hidden_size=3584, ffn_hidden_size=18944, num_attention_heads=28, num_query_groups=4,
        kv_channels=128, vocab_size=152064, untie_embeddings_and_output_weights=True,
    )  # fmt: skip
    assert model_of(published("qwen2_5_7b")).decoder == large


@pytest.mark.parametrize("name", FAMILIES)
def test_the_family_is_the_model_type(name):
    architecture = architecture_of(published(name), "config.json")
    assert architecture.family == family_of(architecture.model) == FAMILIES[name]


# Rotary settings


def in_the_new_form(config_json: dict) -> dict:
    """As transformers 5 writes it: everything in rope_parameters, and the language model's fields in text_config."""
    if "vision_config" in config_json and "text_config" not in config_json:
        of_the_whole = ("architectures", "model_type", "tie_word_embeddings", "vision_config")
        text = {key: value for key, value in config_json.items() if key not in of_the_whole}
        config_json = {key: config_json[key] for key in of_the_whole} | {"text_config": text}
    text = config_json.get("text_config", config_json)
    scaling = text.pop("rope_scaling", None) or {}
    kind = "yarn" if scaling.pop("type", None) == "yarn" else "default"
    text["rope_parameters"] = {"rope_type": kind, "rope_theta": text.pop("rope_theta")} | scaling
    return config_json


@pytest.mark.parametrize("name", FAMILIES)
def test_rope_parameters_say_what_rope_theta_and_rope_scaling_say(name):
    assert model_of(in_the_new_form(published(name))) == model_of(published(name))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("form", ["old", "new"])
def test_rotary_settings_survive_export_in_both_forms(name, form):  # F17
    base = published(name) if form == "old" else in_the_new_form(published(name))
    model = model_of(published(name))
    written = config_json_of(model, FAMILIES[name], base)
    assert model_of(written) == model
    old = published(name)
    old = old.get("text_config", old)
    text = written.get("text_config", written)
    assert text["rope_theta"] == text["rope_parameters"]["rope_theta"] == old["rope_theta"]
    special = {key: value for key, value in (old.get("rope_scaling") or {}).items() if "type" not in key}
    kind = {"llama": "llama3", "deepseek_v3": "yarn"}.get(FAMILIES[name], "default")
    assert text["rope_scaling"] == ({"rope_type": kind} | special if special else None)
    assert text["rope_parameters"] == {"rope_type": kind, "rope_theta": old["rope_theta"]} | special


def test_changed_rotary_settings_are_written_where_the_file_has_them():
    # transformers reads those in text_config, and would go on with the old ones
    model = model_of(published("qwen3_vl_8b"))
    model = dataclasses.replace(model, decoder=dataclasses.replace(model.decoder, rotary_base=7e6))
    written = config_json_of(model, "qwen3_vl", published("qwen3_vl_8b"))
    assert written["text_config"]["rope_theta"] == 7e6 and "rope_theta" not in written


def test_two_values_of_theta_must_agree():
    config = in_the_new_form(published("qwen3_8b"))
    assert model_of(config | {"rope_theta": 1e6}) == model_of(config)
    assert "rope_theta=10000.0, but rope_parameters.rope_theta=1000000.0" in refusal(config | {"rope_theta": 10000})


def test_a_scaling_of_another_type_is_refused_by_name():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert "rope_type=yarn isn't built" in refusal(published("qwen3_8b") | {"rope_scaling": yarn})
    linear = {"type": "linear", "factor": 2.0}
    assert "rope_type=linear isn't built" in refusal(published("llama3_1_8b") | {"rope_scaling": linear})
    without = {"factor": 4.0}
    assert "factor=4.0, but no rope_type that uses it" in refusal(published("qwen3_8b") | {"rope_scaling": without})


def test_a_part_of_llama3s_scaling_that_is_missing_is_asked_for():
    config = published("llama3_1_8b")
    del config["rope_scaling"]["high_freq_factor"]
    assert "has no high_freq_factor" in refusal(config)


def test_a_vision_language_model_needs_its_mrope_section():
    assert "has no mrope_section" in refusal(published("qwen2_5_vl_7b") | {"rope_scaling": None})
    config = published("qwen3_vl_8b")
    config["text_config"]["rope_scaling"]["mrope_interleaved"] = False
    assert "mrope_interleaved=False isn't built; only True is" in refusal(config)


def test_no_theta_at_all_is_refused():
    config = published("qwen3_8b")
    del config["rope_theta"]
    assert "has neither rope_theta nor rope_parameters.rope_theta" in refusal(config)


# Which value counts


def test_an_outer_value_wins_over_a_nested_one():
    config = published("qwen3_vl_8b")
    config["text_config"]["tie_word_embeddings"] = True
    assert model_of(config).decoder.untie_embeddings_and_output_weights
    config["tie_word_embeddings"] = True
    config["text_config"]["tie_word_embeddings"] = False
    assert not model_of(config).decoder.untie_embeddings_and_output_weights
    # a null is no value
    config["tie_word_embeddings"] = None
    assert model_of(config).decoder.untie_embeddings_and_output_weights


def test_the_width_of_a_head_is_that_of_the_file_where_it_has_one():
    config = published("llama3_1_8b")
    assert model_of(config).decoder.kv_channels == 4096 // 32
    assert model_of(config | {"head_dim": 64}).decoder.kv_channels == 64


def test_a_missing_width_of_a_head_is_not_guessed_where_it_is_not_width_over_heads():
    # Qwen3-4B has 32 heads of 128 in a width of 2560
    config = published("qwen3_8b")
    del config["head_dim"]
    assert "config.json has no head_dim" in refusal(config)


# What is refused

OF_EXPERTS = {
    "qwen3_moe": [
        "num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step", "mlp_only_layers",
        "norm_topk_prob",
    ],
    "qwen3_vl_moe": [
        "num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step", "mlp_only_layers",
    ],
    "deepseek_v3": [
        "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts", "n_group", "topk_group",
        "norm_topk_prob", "routed_scaling_factor", "first_k_dense_replace", "kv_lora_rank", "qk_nope_head_dim",
        "qk_rope_head_dim", "v_head_dim",
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_every_field_that_is_needed_is_asked_for_by_name(name):
    config = published(name)
    text = "text_config" if "text_config" in config else None
    needed = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"]
    needed += ["vocab_size", "rms_norm_eps", "hidden_act", "tie_word_embeddings"]
    for field in needed + OF_EXPERTS.get(FAMILIES[name], []):
        config = published(name)
        holder = config[text] if text and field in config[text] else config
        del holder[field]
        assert f"config.json has no {field}; add it" in refusal(config)
    vision = published(name).get("vision_config", {})
    for field in vision.keys() - {"initializer_range", "model_type", "spatial_patch_size", "in_chans"}:
        config = published(name)
        del config["vision_config"][field]
        assert f"vision_config has no {field}; add it" in refusal(config)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qwen2_5_7b", {"use_sliding_window": True}, "use_sliding_window=True isn't built; only False is"),
        ("qwen2_5_7b", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has sliding_attention"),
        ("llama3_1_8b", {"attention_bias": True}, "attention_bias=True isn't built; only False is"),
        ("llama3_1_8b", {"mlp_bias": True}, "mlp_bias=True isn't built"),
        ("llama3_1_8b", {"hidden_act": "gelu"}, "hidden_act=gelu isn't built; only silu is"),
        ("llama3_1_8b", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 isn't built"),
        ("llama3_1_8b", {"model_type": "mistral"}, "model_type='mistral' isn't supported; llama, qwen2"),
        ("llama3_1_8b", {"model_type": None}, "model_type=None isn't supported"),
        ("llama3_1_8b", {"model_type": ["llama"]}, "model_type=['llama'] isn't supported"),
        ("qwen3_8b", {"quantization_config": {"quant_method": "fp8"}}, "the weights are quantized; use the folder of"),
        ("qwen3_8b", {"num_hidden_layers": "36"}, "num_hidden_layers='36' has the wrong type; give a whole number"),
        ("qwen3_8b", {"num_hidden_layers": 36.5}, "num_hidden_layers=36.5 has the wrong type"),
        ("qwen3_8b", {"num_attention_heads": 0}, "num_attention_heads=0 must be above 0"),
        ("qwen3_8b", {"rms_norm_eps": "1e-6"}, "rms_norm_eps='1e-6' has the wrong type; give a finite number"),
        ("qwen3_8b", {"tie_word_embeddings": "false"}, "tie_word_embeddings='false' has the wrong type"),
        ("qwen3_8b", {"rope_theta": [1e6]}, "rope_theta=[1000000.0] has the wrong type"),
        ("qwen3_8b", {"rope_scaling": "default"}, "rope_scaling='default' must be a group of fields"),
        ("qwen3_30b_a3b", {"shared_expert_intermediate_size": 512}, "shared_expert_intermediate_size=512 isn't built"),
        ("qwen3_30b_a3b", {"qkv_bias": True}, "qkv_bias=True isn't built; only False is"),
        ("qwen3_30b_a3b", {"num_experts": 0}, "num_experts=0 must be above 0"),
        ("qwen3_30b_a3b", {"mlp_only_layers": "none"}, "mlp_only_layers='none' has the wrong type"),
        ("deepseek_v3", {"quantization_config": QUANTIZATION}, "the weights are quantized; use the folder of"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func=softmax isn't built; only sigmoid is"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method=greedy isn't built; only noaux_tc is"),
        ("deepseek_v3", {"num_key_value_heads": 64}, "num_key_value_heads=64 isn't built; only 128 is"),
        ("deepseek_v3", {"rms_norm_eps": 1e-5}, "rms_norm_eps=1e-05 isn't built; only 1e-06 is"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave=False isn't built; only True is"),
        ("deepseek_v3", {"first_k_dense_replace": -1}, "first_k_dense_replace=-1 must be at least 0"),
        ("deepseek_v3", {"n_shared_experts": 0}, "n_shared_experts=0 must be above 0"),
        ("deepseek_v3", {"rope_scaling": {"type": "linear", "factor": 2.0}},
         "rope_type=linear isn't built; default, llama3 and yarn are"),
        ("deepseek_v3", {"rope_scaling": {"type": "yarn", "factor": 40}}, "has no original_max_position_embeddings"),
        ("deepseek_v3", {"rope_parameters": {"attention_factor": 0.7}}, "attention_factor=0.7 isn't built"),
        ("deepseek_v3", {"rope_parameters": {"truncate": False}}, "truncate=False isn't built; only True is"),
        ("qwen3_vl_8b", {"text_config": [1]}, "text_config=[1] must be a group of fields"),
        ("qwen3_vl_8b", {"vision_config": None}, "vision_config has no hidden_size"),
        ("qwen3_vl_8b", {"hidden_size": 4000}, "vision_config.out_hidden_size=4096, but hidden_size=4000"),
        ("qwen2_5_vl_7b", {"rope_scaling": {"type": "mrope", "mrope_section": 16}}, "mrope_section=16 has the wrong"),
    ],
)  # fmt: skip
def test_what_the_model_can_not_compute_is_refused_by_name(name, change, message):
    assert message in refusal(published(name) | change)


def test_an_activation_of_the_encoder_is_refused_by_name():
    config = published("qwen3_vl_8b")
    config["vision_config"]["hidden_act"] = "quick_gelu"
    assert "vision_config: hidden_act=quick_gelu isn't built; silu, gelu, gelu_pytorch_tanh are" in refusal(config)


@pytest.mark.parametrize("text", ["", "{", "[1]", "3", "\ufeff{}"])
def test_a_file_that_can_not_be_read_is_refused(tmp_path, text):
    with pytest.raises(ConfigError, match="config.json (can't be read|holds a)"):
        read_architecture(folder_with(tmp_path, text))


def test_a_file_of_other_bytes_than_text_is_refused(tmp_path):
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="config.json can't be read"):
        read_architecture(tmp_path)


def test_a_folder_without_the_file_is_no_hugging_face_folder(tmp_path):
    file = folder_with(tmp_path, published("qwen3_8b")) / "config.json"
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "nowhere", file):
        with pytest.raises(ConfigError) as error:
            read_architecture(path)
        assert str(error.value).startswith(f"{path} is no Hugging Face folder: it has no config.json; name the folder")


# Back to config.json


@pytest.mark.parametrize("name", RELEASED)
def test_the_config_json_of_a_model_file_gives_its_architecture_again(name):
    model = resolve({"model": model_config(name)}).model
    family = family_of(model)
    architecture = architecture_of(json.loads(json.dumps(config_json_of(model, family))), "config.json")
    assert architecture.family == family and architecture.model == model


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_config_json_of_a_model_file_has_the_published_fields(name):
    model = resolve({"model": model_config(name)}).model

    def architecture(config):
        """Every number and name of the file that transformers builds the model from, flat."""
        fields = {key: value for key, value in config.items() if not isinstance(value, dict)}
        vision = {f"vision.{key}": value for key, value in (config.get("vision_config") or {}).items()}
        return fields | (config.get("text_config") or {}) | vision

    written, expected = architecture(config_json_of(model, FAMILIES[name])), architecture(PUBLISHED[name])
    # the model's files have no multi-token prediction
    other = {"model_type", "vision.model_type", "rope_scaling", "num_nextn_predict_layers"}
    shared = written.keys() & expected.keys() - other
    assert {key: written[key] for key in shared} == {key: expected[key] for key in shared}
    assert {"hidden_size", "num_key_value_heads", "rms_norm_eps", "rope_theta", "architectures"} <= shared


def test_a_model_of_no_family_is_refused_with_what_would_be_lost():
    model = resolve({"model": model_config("qwen3_8b")}).model
    both = dataclasses.replace(model, decoder=dataclasses.replace(model.decoder, add_qkv_bias=True))
    with pytest.raises(ConfigError, match="qwen3 family can't express this model: model.decoder.add_qkv_bias is True"):
        config_json_of(both, family_of(both))


def test_a_config_json_of_another_model_is_no_base():
    model = resolve({"model": model_config("qwen3_4b")}).model
    with pytest.raises(ConfigError, match="of another model: model.decoder.hidden_size is 2560, there 4096"):
        config_json_of(model, "qwen3", published("qwen3_8b"))


def test_the_base_keeps_its_other_fields_and_is_not_changed():
    base = published("qwen3_vl_8b")
    written = config_json_of(model_of(base), "qwen3_vl", base)
    assert base == PUBLISHED["qwen3_vl_8b"]
    assert written["image_token_id"] == 151655 and written["text_config"]["max_position_embeddings"] == 262144


# In a recipe, and on the command line

RECIPE = """
from jaxforge.config import default_config, encoder_defaults

def get_config():
    config = default_config()
    config.model.encoder = encoder_defaults("qwen2_5_vit")
    config.model.encoder.update(
        image_size=(448, 672), tensor_model_parallel_size=1,
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=4,
    )
    config.model.decoder.update(hidden_dropout=0.1, make_vocab_size_divisible_by=256, num_layers=3)
    return config
"""


@pytest.fixture
def recipe(tmp_path):
    file = tmp_path / "recipe.py"
    file.write_text(RECIPE)
    return file


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "hf").mkdir()
    return folder_with(tmp_path / "hf", published("qwen2_5_vl_7b"))


def test_choices_of_a_run_are_kept_and_the_architecture_is_the_folders(folder, recipe):
    chosen = load_config(recipe).model
    model = hf_model(folder, chosen)
    assert (model.decoder.hidden_dropout, model.decoder.make_vocab_size_divisible_by) == (0.1, 256)
    assert (model.encoder.image_size, model.encoder.tensor_model_parallel_size) == ((448, 672), 1)
    assert model.encoder.recompute_num_layers == 4
    expected = model_config("qwen2_5_vl_7b")
    assert model.decoder.num_layers == 28 and model.encoder.num_layers == expected.encoder.num_layers
    assert hf_model(folder).encoder.image_size == expected.encoder.image_size


def test_the_command_line_takes_the_model_of_a_folder_and_its_own_overrides_win(folder, recipe):
    overrides = ["--config.model.encoder.image_size=(224,224)", f"--config.model={folder}"]
    for order in (overrides, overrides[::-1]):
        config = load_config(recipe, [*order, "--config.model.encoder.recompute_num_layers=8"])
        model = resolve(config).model
        assert model.decoder.hidden_size == 3584 and model.decoder.hidden_dropout == 0.1
        assert model.encoder.image_size == (224, 224) and model.encoder.tensor_model_parallel_size == 1
        assert model.encoder.recompute_num_layers == 8
        origins = value_origins(config)
        assert origins["model.decoder.hidden_size"] == f"{folder}/config.json"
        assert origins["model.encoder.image_size"] == "command line"
        assert origins["model.encoder.tensor_model_parallel_size"].endswith("recipe.py")


def test_an_encoder_file_of_the_recipe_keeps_its_choices(folder, tmp_path):
    (tmp_path / "vit.yaml").write_text("model_type: qwen2_5_vit\nnum_layers: 2\ntensor_model_parallel_size: 1\n")
    lines = f"    config.model.encoder = {str(tmp_path / 'vit.yaml')!r}\n    return config\n"
    (tmp_path / "yaml_recipe.py").write_text(
        "from jaxforge.config import default_config\n\ndef get_config():\n    config = default_config()\n" + lines
    )
    model = resolve(load_config(tmp_path / "yaml_recipe.py", [f"model={folder}"])).model
    assert model.encoder.num_layers == 32 and model.encoder.tensor_model_parallel_size == 1


def test_a_language_model_takes_the_recipes_encoder_away(tmp_path, recipe):
    (tmp_path / "llama").mkdir()
    model = resolve(load_config(recipe, [f"model={folder_with(tmp_path / 'llama', published('llama3_1_8b'))}"])).model
    assert model.encoder is None and model.projector is None and model.decoder.use_rope_scaling


def test_a_model_that_is_no_folder_is_refused(recipe):
    with pytest.raises(ConfigError, match="qwen3_8b is no Hugging Face folder: it has no config.json"):
        load_config(recipe, ["--config.model=qwen3_8b"])
