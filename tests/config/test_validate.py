"""Every rule fires, and its message names the fields, their values and a way out."""

import dataclasses

import pytest

from jaxforge.config import ConfigError, default_config, encoder_defaults, resolve, validate
from jaxforge.config.schema import Config, EncoderConfig


def _language_config():
    """Valid on 8 CPU devices: TP 2, data parallel size 4, 2 microbatches of 1 row."""
    config = default_config()
    config.parallel.tensor_model_parallel_size = 2
    return config


def _vision_config(model_type="qwen2_5_vit"):
    """The same with an encoder whose full image of 56 x 56 pixels is 4 x 4 patches, 4 visual tokens."""
    config = _language_config()
    config.model.encoder = encoder_defaults(model_type)
    config.model.encoder.image_size = (56, 56)
    if model_type == "qwen3_vit":
        config.model.encoder.num_position_embeddings = 16
    config.data.max_patches_per_row = 32
    return config


def _set(config, settings):
    for path, value in settings.items():
        *groups, name = path.split(".")
        node = config
        for group in groups:
            node = node[group]
        node[name] = value
    return config


def _refusal(config, num_devices=8, platform="cpu"):
    with pytest.raises(ConfigError) as error:
        validate(resolve(config), num_devices, platform)
    return str(error.value)


@pytest.mark.parametrize("config", [_language_config(), _vision_config(), _vision_config("qwen3_vit")])
def test_the_configs_that_the_tests_start_from_are_valid(config):
    validate(resolve(config), 8)
    validate(resolve(config), 2)


def _planned_fields(cls, prefix=""):
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(field.default):
            yield from _planned_fields(type(field.default), f"{prefix}{field.name}.")
        elif field.metadata.get("planned"):
            yield f"{prefix}{field.name}"


OTHER_VALUES = {bool: True, int: 2, float: 0.5, str: "x", tuple: ("x",), type(None): None}
OPTIONAL_VALUES = {
    "moe_deepep_num_sms": 2,
}
PLANNED = list(_planned_fields(Config)) + [f"model.encoder.{name}" for name in _planned_fields(EncoderConfig)]


def test_what_later_work_brings_is_marked_in_the_schema():
    # one of each feature that isn't there yet
    assert {
        "parallel.context_parallel_size",
        "moe.moe_enable_deepep",
        "model.encoder.hidden_dropout",
    } <= set(PLANNED)


@pytest.mark.parametrize("path", PLANNED)
def test_what_is_not_built_is_refused_by_name(path):
    config = _vision_config()
    *groups, name = path.split(".")
    node = config
    for group in groups:
        node = node[group]
    default = node[name]
    value = OPTIONAL_VALUES.get(name, "x") if default is None else OTHER_VALUES[type(default)]
    node[name] = value
    message = _refusal(config)
    assert message.startswith(f"{path}={value}: ")
    assert message.endswith(f" isn't built yet; leave it at {default}")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model.decoder.num_layers": 0}, "model.decoder.num_layers=0 must be at least 1"),
        ({"train.global_batch_size": -8}, "train.global_batch_size=-8 must be at least 1"),
        ({"train.steps": 0}, "train.steps=0 must be at least 1"),
        ({"parallel.tensor_model_parallel_size": 0}, "parallel.tensor_model_parallel_size=0 must be at least 1"),
        ({"memory.recompute_num_layers": 0}, "memory.recompute_num_layers=0 must be at least 1"),
        ({"checkpoint.keep": 0}, "checkpoint.keep=0 must be at least 1"),
        ({"model.decoder.mrope_section": (8, 0, 0)}, "model.decoder.mrope_section[1]=0 must be at least 1"),
        ({"optimizer.weight_decay": -0.1}, "optimizer.weight_decay=-0.1 must be at least 0"),
        ({"loss.lce_fwd_vocab_split_size": 0}, "loss.lce_fwd_vocab_split_size=0 must be at least 1"),
        ({"loss.z_loss_coefficient": -1.0}, "loss.z_loss_coefficient=-1.0 must be at least 0"),
        ({"optimizer.learning_rate": 0.0}, "optimizer.learning_rate=0.0 must be above 0"),
        ({"model.decoder.norm_epsilon": 0.0}, "model.decoder.norm_epsilon=0.0 must be above 0"),
        ({"train.seed": 2**31}, "train.seed=2147483648 must be below 2^31"),
        ({"model.decoder.hidden_dropout": 1.0}, "model.decoder.hidden_dropout=1.0 must be at least 0 and below 1"),
    ],
)
def test_numbers_are_in_range(settings, message):
    assert _refusal(_set(_language_config(), settings)) == message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"parallel.tensor_model_parallel_size": 3},
            "parallel.tensor_model_parallel_size=3 does not divide model.decoder.num_query_groups=4; use 1, 2 or 4",
        ),
        (
            {"parallel.tensor_model_parallel_size": 4, "model.decoder.ffn_hidden_size": 130},
            "parallel.tensor_model_parallel_size=4 does not divide model.decoder.ffn_hidden_size=130; use 1 or 2",
        ),
        (
            {"parallel.tensor_model_parallel_size": 4, "model.decoder.hidden_size": 66},
            "parallel.tensor_model_parallel_size=4 does not divide model.decoder.hidden_size=66; use 1 or 2",
        ),
        (
            {"model.decoder.make_vocab_size_divisible_by": 1},
            "parallel.tensor_model_parallel_size=2 does not divide model.decoder.make_vocab_size_divisible_by=1; use 2"
            " there, or a tensor parallel size of 1",
        ),
        (
            {"model.decoder.num_attention_heads": 6},
            "model.decoder.num_query_groups=4 does not divide model.decoder.num_attention_heads=6; use 1, 2, 3 or 6",
        ),
        ({"model.decoder.kv_channels": 15}, "model.decoder.kv_channels=15 must be even"),
        (
            {"model.decoder.rope_scaling_factor": 4.0},
            "model.decoder.rope_scaling_factor=4.0 would have no effect, because model.decoder.use_rope_scaling=False",
        ),
        (
            {"model.decoder.use_rope_scaling": True, "model.decoder.rope_scaling_low_freq_factor": 4.0},
            "model.decoder.rope_scaling_low_freq_factor=4.0 must be below"
            " model.decoder.rope_scaling_high_freq_factor=4.0",
        ),
        (
            {"model.decoder.mrope_interleaved": True},
            "model.decoder.mrope_interleaved=True would have no effect without model.decoder.mrope_section",
        ),
        ({"model.decoder.mrope_section": (4, 4)}, "model.decoder.mrope_section=(4, 4) needs 3 entries"),
        (
            {"model.decoder.mrope_section": (4, 2, 3)},
            "model.decoder.mrope_section=(4, 2, 3) sums to 9, but model.decoder.kv_channels=16 has 8 frequencies",
        ),
        # of the frequencies 0 to 7, height may have 1, 4, 7 and width 2, 5
        (
            {"model.decoder.mrope_section": (2, 3, 3), "model.decoder.mrope_interleaved": True},
            "3 interleaved frequencies for width don't fit among 8, which have 2 places for them; use at most 2",
        ),
        (
            {"model.decoder.mrope_section": (2, 4, 2), "model.decoder.mrope_interleaved": True},
            "4 interleaved frequencies for height don't fit among 8, which have 3 places for them; use at most 3",
        ),
        (
            {"model.projector": {}},
            "model.projector would have no effect, because model.encoder is None; set model.projector to None",
        ),
    ],
)
def test_decoder_rules(settings, message):
    assert message in _refusal(_set(_language_config(), settings))


def test_released_interleaved_sections_are_valid():
    config = _set(
        _language_config(),
        {
            "model.decoder.kv_channels": 128,
            "model.decoder.mrope_section": (24, 20, 20),
            "model.decoder.mrope_interleaved": True,
        },
    )
    validate(resolve(config), 8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"model.encoder.tensor_model_parallel_size": 4},
            "model.encoder.tensor_model_parallel_size=4 does not divide"
            " parallel.tensor_model_parallel_size=2; use 1 or 2",
        ),
        (
            {"model.encoder.num_attention_heads": 3},
            "model.encoder.tensor_model_parallel_size=2 (inherited from the decoder) does not divide"
            " model.encoder.num_attention_heads=3; use 1",
        ),
        ({"model.encoder.ffn_hidden_size": 63}, "does not divide model.encoder.ffn_hidden_size=63; use 1"),
        ({"model.encoder.hidden_size": 33}, "does not divide model.encoder.hidden_size=33; use 1"),
        ({"model.projector": {"ffn_hidden_size": 129}}, "does not divide model.projector.ffn_hidden_size=129; use 1"),
        ({"model.encoder.kv_channels": 10}, "model.encoder.kv_channels=10 must be a multiple of 4"),
        (
            {"model.encoder.num_query_groups": 2},
            "model.encoder.num_query_groups=2 must equal model.encoder.num_attention_heads=4",
        ),
        (
            {"model.encoder.gated_linear_unit": False},
            "model.encoder.gated_linear_unit=False contradicts model.encoder.swiglu=True",
        ),
        (
            {"model.encoder.window_size": 100},
            "model.encoder.window_size=100 must be a multiple of patch_size x spatial_merge_size=28; use 112",
        ),
        (
            {"model.encoder.fullatt_block_indexes": (1, 2)},
            "model.encoder.fullatt_block_indexes=(1, 2) names layer 2,"
            " but model.encoder.num_layers=2 has layers 0 to 1",
        ),
        ({"model.encoder.fullatt_block_indexes": (1, 0)}, "(1, 0) must be increasing; use (0, 1)"),
        (
            {"model.encoder.num_position_embeddings": 16},
            "would have no effect with model.encoder.model_type=qwen2_5_vit",
        ),
        (
            {"model.encoder.deepstack_visual_indexes": (0,)},
            "would have no effect with model.encoder.model_type=qwen2_5",
        ),
        (
            {"model.encoder.image_size": (56, 27)},
            "model.encoder.image_size=(56, 27) is smaller than one visual token of patch_size x spatial_merge_size=28",
        ),
    ],
)
def test_encoder_rules(settings, message):
    assert message in _refusal(_set(_vision_config(), settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model.encoder.num_position_embeddings": None}, "model.encoder.num_position_embeddings=None, but qwen3_vit"),
        ({"model.encoder.num_position_embeddings": 15}, "num_position_embeddings=15 must be a square number; use 16"),
        ({"model.encoder.window_size": 56}, "model.encoder.window_size=56 would have no effect"),
        (
            {"model.encoder.fullatt_block_indexes": (1,)},
            "model.encoder.fullatt_block_indexes=(1,) would have no effect",
        ),
        ({"model.encoder.deepstack_visual_indexes": (2,)}, "deepstack_visual_indexes=(2,) names layer 2"),
        (
            {"model.encoder.deepstack_visual_indexes": (0, 1), "model.decoder.num_layers": 1},
            "model.encoder.deepstack_visual_indexes=(0, 1) feeds 2 decoder layers, but model.decoder.num_layers=1",
        ),
    ],
)
def test_learned_position_encoder_rules(settings, message):
    assert message in _refusal(_set(_vision_config("qwen3_vit"), settings))


def test_devices_form_whole_tensor_groups():
    message = "7 devices don't divide into groups of parallel.tensor_model_parallel_size=2; use 1 or 7, or 8 devices"
    assert _refusal(_language_config(), num_devices=7) == message


@pytest.mark.parametrize(("rows", "fitting"), [(10, "8 or 12"), (3, "4")])
def test_the_global_batch_is_whole_microbatches(rows, fitting):
    config = _set(_language_config(), {"train.global_batch_size": rows})
    assert _refusal(config) == (
        f"train.global_batch_size={rows} is not a multiple of train.micro_batch_size=1 x data parallel size 4"
        f" (8 devices) = 4; use {fitting}"
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"parallel.sequence_parallel": True, "parallel.tensor_model_parallel_size": 1},
            "parallel.sequence_parallel=True would have no effect with parallel.tensor_model_parallel_size=1",
        ),
        (
            {"parallel.sequence_parallel": True, "train.seq_length": 127},
            "train.seq_length=127 is not a multiple of parallel.tensor_model_parallel_size=2, which"
            " parallel.sequence_parallel needs; use 128",
        ),
        (
            {"memory.recompute_granularity": "full", "memory.recompute_num_layers": 1},
            "memory.recompute_granularity=full needs memory.recompute_method; use uniform or block",
        ),
        (
            {"memory.recompute_granularity": "full", "memory.recompute_method": "block"},
            "memory.recompute_granularity=full needs memory.recompute_num_layers",
        ),
        (
            {"memory.recompute_method": "block"},
            "memory.recompute_method=block would have no effect, because memory.recompute_granularity is None",
        ),
        ({"memory.recompute_num_layers": 1}, "memory.recompute_num_layers=1 would have no effect"),
        (
            {
                "memory.recompute_granularity": "full",
                "memory.recompute_method": "uniform",
                "memory.recompute_num_layers": 4,
                "model.decoder.num_layers": 6,
            },
            "memory.recompute_num_layers=4 does not divide model.decoder.num_layers=6, which"
            " memory.recompute_method=uniform needs; use 1, 2, 3 or 6",
        ),
        (
            {
                "memory.recompute_granularity": "full",
                "memory.recompute_method": "block",
                "memory.recompute_num_layers": 3,
            },
            "memory.recompute_num_layers=3 is more than model.decoder.num_layers=2; use at most 2",
        ),
        ({"optimizer.min_lr": 0.1}, "optimizer.min_lr=0.1 is above optimizer.learning_rate=0.0001"),
        (
            {"optimizer.lr_warmup_iters": 100},
            "optimizer.lr_warmup_iters=100 must be below train.steps=100; use at most 99",
        ),
        (
            {"optimizer.lr_warmup_iters": 50, "optimizer.lr_decay_iters": 50},
            "optimizer.lr_warmup_iters=50 must be below optimizer.lr_decay_iters=50; use at most 49",
        ),
        (
            {"optimizer.lr_decay_style": "WSD"},
            "optimizer.lr_decay_style=WSD needs optimizer.lr_wsd_decay_iters",
        ),
        (
            {
                "optimizer.lr_decay_style": "WSD",
                "optimizer.lr_wsd_decay_iters": 91,
                "optimizer.lr_warmup_iters": 10,
            },
            "optimizer.lr_wsd_decay_iters=91 doesn't fit between optimizer.lr_warmup_iters=10 and train.steps=100;"
            " use at most 90",
        ),
        (
            {"optimizer.lr_wsd_decay_iters": 10},
            "optimizer.lr_wsd_decay_iters=10 would have no effect with optimizer.lr_decay_style=cosine",
        ),
        (
            {"optimizer.lr_decay_style": "constant", "optimizer.lr_decay_iters": 10},
            "optimizer.lr_decay_iters=10 would have no effect with optimizer.lr_decay_style=constant",
        ),
        ({"optimizer.adam_beta2": 1.0}, "optimizer.adam_beta2=1.0 must be at least 0 and below 1"),
        (
            {"optimizer.lr_scale": (("encoder/**", 0.0),)},
            "optimizer.lr_scale gives 'encoder/**' the factor 0.0, which must be above 0; list the pattern in"
            " optimizer.freeze",
        ),
        (
            {"memory.optimizer_offload_fraction": 0.5},
            "memory.optimizer_offload_fraction=0.5 would have no effect with memory.optimizer_cpu_offload=False",
        ),
        (
            {"memory.optimizer_cpu_offload": True, "memory.optimizer_offload_fraction": 0.0},
            "memory.optimizer_offload_fraction=0.0 must be above 0 and at most 1",
        ),
        (
            {"memory.optimizer_cpu_offload": True, "memory.optimizer_offload_fraction": 1.5},
            "memory.optimizer_offload_fraction=1.5 must be above 0 and at most 1",
        ),
        # neighbours of bfloat16 are up to 1/128 apart, so that less than half of this is rounded away
        (
            {"optimizer.exp_avg_sq_dtype": "bfloat16", "optimizer.adam_beta2": 0.999},
            "optimizer.exp_avg_sq_dtype=bfloat16 can't hold a moment that decays by 1 - optimizer.adam_beta2 = 0.001",
        ),
        (
            {"loss.cross_entropy_fusion_impl": "linear"},
            "loss.cross_entropy_fusion_impl=linear would have no effect with loss.cross_entropy_loss_fusion=False; set"
            " that to true, or cross_entropy_fusion_impl to None",
        ),
        (
            {"loss.lce_bwd_vocab_split_size": 2048},
            "loss.lce_bwd_vocab_split_size=2048 would have no effect with loss.cross_entropy_loss_fusion=False",
        ),
        ({"data.source": "digits"}, "data.source=digits shows images, but model.encoder is None"),
        ({"data.digits_max": 3}, "data.digits_max=3 would have no effect with data.source=synthetic"),
        ({"train.eval_every_steps": 5}, "train.eval_every_steps=5 would have no effect with data.source=synthetic"),
        (
            {"data.max_patches_per_row": 16},
            "data.max_patches_per_row=16 would have no effect, because model.encoder is None",
        ),
    ],
)
def test_run_rules(settings, message):
    assert message in _refusal(_set(_language_config(), settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"model.encoder.recompute_method": "block"},
            "model.encoder.recompute_method=block would have no effect, because model.encoder.recompute_granularity is",
        ),
        (
            {"data.max_patches_per_row": None},
            "data.max_patches_per_row is needed with an encoder; an image of model.encoder.image_size has 16",
        ),
        (
            {"data.max_patches_per_row": 18},
            "data.max_patches_per_row=18 is not a multiple of model.encoder.spatial_merge_size^2=4; use 20",
        ),
        (
            {"data.max_patches_per_row": 12},
            "a synthetic image of model.encoder.image_size=(56, 56) has 16 patches,"
            " more than data.max_patches_per_row=12",
        ),
        (
            {"train.seq_length": 4},
            "a synthetic image of model.encoder.image_size=(56, 56) becomes 4 visual tokens, which with text don't fit"
            " train.seq_length=4",
        ),
    ],
)
def test_run_rules_with_an_encoder(settings, message):
    assert message in _refusal(_set(_vision_config(), settings))


def _files_config(**settings):
    """A vision-language run on files."""
    config = _set(_vision_config(), {"data.path": ("a.jsonl", "b.jsonl"), "data.tokenizer": "tokenizer"})
    return _set(config, settings)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"data.source": "files"},
        {"data.weights": (2.0, 1.0), "data.max_skipped_fraction": 0.0, "data.min_pixels": 784, "data.max_pixels": 784},
        {"data.eval_path": ("c.jsonl",), "train.eval_every_steps": 5},
        # a full image may be larger than a row: the user's images decide
        {"data.max_patches_per_row": 12},
    ],
)
def test_files_that_have_what_they_need_are_valid(settings):
    validate(resolve(_files_config(**settings)), 8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data.path": (), "data.source": "files"}, "data.source=files needs data.path, the files to read"),
        (
            {"data.tokenizer": None},
            "data.path=('a.jsonl', 'b.jsonl') needs a tokenizer; set data.tokenizer to the folder of one, or"
            " checkpoint.init_from_hf",
        ),
        (
            {"train.eval_every_steps": 5},
            "train.eval_every_steps=5 would have no effect with data.source=files, which has no evaluation set; set it"
            " to 0, or data.eval_path to held-out files",
        ),
        ({"data.weights": (1.0,)}, "data.weights=(1.0,) has 1 weights for the 2 entries of data.path="),
        ({"data.weights": (1.0, 0.0)}, "data.weights[1]=0.0 must be above 0"),
        ({"data.max_skipped_fraction": 1.0}, "data.max_skipped_fraction=1.0 must be at least 0 and below 1"),
        ({"data.packing_window": 0}, "data.packing_window=0 must be at least 1"),
        ({"data.video_fps": 0.0}, "data.video_fps=0.0 must be above 0"),
        ({"data.video_max_frames": 0}, "data.video_max_frames=0 must be at least 1"),
        ({"data.min_pixels": 800, "data.max_pixels": 799}, "data.min_pixels=800 is above data.max_pixels=799"),
        ({"data.digits_max": 3}, "data.digits_max=3 would have no effect with data.source=files; leave it at 6"),
        (
            {"data.source": "digits"},
            "data.path=('a.jsonl', 'b.jsonl') would have no effect with data.source=digits; leave it at ()",
        ),
    ],
)
def test_rules_on_files(settings, message):
    assert message in _refusal(_files_config(**settings))


@pytest.mark.parametrize(
    ("name", "value", "default"),
    [
        ("weights", (1.0,), "()"),
        ("eval_path", ("a.jsonl",), "()"),
        ("media_root", "images", "None"),
        ("tokenizer", "folder", "None"),
        ("chat_template", "llama3", "auto"),
        ("system", "Be brief.", "None"),
        ("strict", True, "False"),
        ("max_skipped_fraction", 0.5, "0.05"),
        ("overlong", "truncate", "drop"),
        ("min_pixels", 784, "None"),
        ("max_pixels", 784, "None"),
        ("video_fps", 1.0, "2.0"),
        ("video_max_frames", 8, "64"),
        ("packing_window", 100, "20000"),
        ("cache_dir", "cache", "None"),
    ],
)
def test_a_field_of_files_would_have_no_effect_without_them(name, value, default):
    message = f"data.{name}={value} would have no effect with data.source=synthetic; leave it at {default}"
    assert _refusal(_set(_vision_config(), {f"data.{name}": value})) == message


def test_a_field_of_media_would_have_no_effect_without_an_encoder():
    config = _set(_language_config(), {"data.path": ("a.jsonl",), "data.tokenizer": "t", "data.max_pixels": 784})
    message = "data.max_pixels=784 would have no effect, because model.encoder is None; leave it at None"
    assert _refusal(config) == message


@pytest.mark.parametrize(
    ("settings", "platform", "message"),
    [
        (
            {"train.attention_backend": "cudnn"},
            "cpu",
            "train.attention_backend=cudnn needs a GPU, and this run is on cpu",
        ),
        (
            {"train.attention_backend": "cudnn", "train.compute_dtype": "float32"},
            "gpu",
            "train.attention_backend=cudnn computes in bfloat16, but train.compute_dtype=float32",
        ),
        (
            {"train.simulated_devices": 8},
            "gpu",
            "train.simulated_devices=8 simulates CPU devices, but this run is on gpu; set it to None",
        ),
    ],
)
def test_platform_rules(settings, platform, message):
    assert message in _refusal(_set(_language_config(), settings), platform=platform)
