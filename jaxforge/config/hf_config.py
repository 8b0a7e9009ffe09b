"""A model's architecture from the config.json of a Hugging Face folder, and back.

Nothing is taken from a class's defaults: what the file doesn't say is asked for by name, and what it says and the model
can't compute is refused.  Where a name is both at the top and in `text_config`, the top wins, as in transformers.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxforge.config.defaults import encoder_from_yaml, locked
from jaxforge.config.derived import expert_ffn_hidden_size, layer_has_experts
from jaxforge.config.errors import ConfigError
from jaxforge.config.hf_experts import (
    MTP_LAYERS,
    WITH_EXPERTS,
    WITH_MTP,
    experts,
    latent_attention,
    new_experts,
    new_latent_attention,
)
from jaxforge.config.hf_fields import Fields
from jaxforge.config.model_schema import DecoderConfig, EncoderConfig, ModelConfig, ProjectorConfig
from jaxforge.config.origins import origin_of, record_origins, set_value

# model_type of config.json: the vision encoder's type, and the class that transformers loads
FAMILIES: dict[str, tuple[str | None, str]] = {
    "llama": (None, "LlamaForCausalLM"),
    "qwen2": (None, "Qwen2ForCausalLM"),
    "qwen3": (None, "Qwen3ForCausalLM"),
    "qwen2_5_vl": ("qwen2_5_vit", "Qwen2_5_VLForConditionalGeneration"),
    "qwen3_vl": ("qwen3_vit", "Qwen3VLForConditionalGeneration"),
    "qwen3_moe": (None, "Qwen3MoeForCausalLM"),
    "qwen3_vl_moe": ("qwen3_vit", "Qwen3VLMoeForConditionalGeneration"),
    "deepseek_v3": (None, "DeepseekV3ForCausalLM"),
}
# Fields that are a run's choice and no part of the architecture.
_CHOICES = {
    "decoder": ("make_vocab_size_divisible_by", "hidden_dropout", "init_method_std"),
    "encoder": (
        "num_query_groups", "image_size", "gated_linear_unit", "bias_activation_fusion", "apply_rope_fusion",
        "init_method_std", "tensor_model_parallel_size", "recompute_granularity", "recompute_method",
        "recompute_num_layers",
    ),
}  # fmt: skip
_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
_LLAMA3 = {
    "factor": "rope_scaling_factor",
    "low_freq_factor": "rope_scaling_low_freq_factor",
    "high_freq_factor": "rope_scaling_high_freq_factor",
    "original_max_position_embeddings": "rope_scaling_original_max_position_embeddings",
}
_YARN = {
    "factor": "rotary_scaling_factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
}
# What YaRN multiplies by: both are there, or neither and transformers' own rule is that of these defaults.
_YARN_GROWTH = ("mscale", "mscale_all_dim")
_ROTARY = ("rope_theta", "rope_parameters", "rope_scaling")
# The vision encoders' norms and rotations have these numbers in every release; config.json doesn't give them.
_ENCODER_EPSILON, _ENCODER_ROTARY_BASE = 1e-6, 1e4


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What config.json says.

    Attributes:
      family: its model_type, one of FAMILIES.
      model: sizes and kinds; fields that are a run's choice have their defaults.
    """

    family: str
    model: ModelConfig


def hf_model(folder: str | Path, choices: Mapping[str, Any] | None = None) -> ConfigDict:
    """The architecture of a Hugging Face folder, for `config.model`.

    Args:
      choices: another `config.model`, whose settings that are no part of an architecture are kept: dropout, padding of
        the vocabulary, and the encoder's image_size, tensor parallel size and recompute.

    Raises:
      ConfigError: as `read_architecture`.
    """
    model = locked(dataclasses.asdict(read_architecture(folder).model))
    record_origins(model, f"{folder}/config.json")
    for part, names in _CHOICES.items():
        chosen = (choices or {}).get(part)
        if part == "encoder" and isinstance(chosen, str):
            chosen = encoder_from_yaml(chosen)
        if model[part] is not None and isinstance(chosen, ConfigDict):
            for name in names:
                if name in chosen:
                    set_value(model[part], name, chosen[name], origin_of(chosen, name))
    return model


def read_architecture(folder: str | Path) -> Architecture:
    """The architecture of a Hugging Face folder.

    Raises:
      ConfigError: if there is no config.json, or it lacks a number, or asks for what isn't built.
    """
    return architecture_of(read_config_json(folder), str(Path(folder) / "config.json"))


def read_config_json(folder: str | Path) -> dict[str, Any]:
    """The parsed config.json.  Raises ConfigError where there is none."""
    path = Path(folder) / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(
            f"{folder} is no Hugging Face folder: it has no config.json; name the folder with config.json and the"
            " .safetensors files (of a download cache, the one under snapshots/)"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds a {type(values).__name__}, not an object of fields")
    return values


def architecture_of(config_json: Mapping[str, Any], where: str) -> Architecture:
    """The architecture that a parsed config.json describes; `where` names it in errors."""
    family = config_json.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ConfigError(f"{where}: model_type={family!r} isn't supported; {', '.join(FAMILIES)} are")
    if config_json.get("quantization_config"):
        raise ConfigError(f"{where}: the weights are quantized; use the folder of the model in bfloat16")
    top = Fields(where, (config_json,))
    text = Fields(where, (config_json, top.mapping("text_config")))
    decoder = _decoder(text, family)
    encoder_type, _ = FAMILIES[family]
    if encoder_type is None:
        return Architecture(family, ModelConfig(decoder=decoder))
    vision = Fields(f"{where}: vision_config", (top.mapping("vision_config"),))
    encoder = _encoder(vision, encoder_type)
    if (width := vision.get(int, "out_hidden_size")) != decoder.hidden_size:
        raise ConfigError(f"{where}: vision_config.out_hidden_size={width}, but hidden_size={decoder.hidden_size}")
    projector = ProjectorConfig(
        normalization=encoder.normalization, norm_epsilon=encoder.norm_epsilon, activation_func="gelu"
    )
    return Architecture(family, ModelConfig(decoder=decoder, encoder=encoder, projector=projector))


def config_json_of(model: ModelConfig, family: str, base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The config.json of a model, readable by old and new releases of transformers.

    Args:
      base: the config.json that the weights came from, whose other fields are kept.

    Raises:
      ConfigError: if the family can't express the model, naming what is lost.
    """
    if model.encoder is not None and model.decoder.mrope_interleaved != _interleaves(family):
        raise ConfigError(
            f"the {family} family can't express this model: model.decoder.mrope_interleaved is"
            f" {model.decoder.mrope_interleaved}, there it is always {_interleaves(family)}; train with that, or"
            " without exports"
        )
    if model.decoder.mtp_num_layers and family not in WITH_MTP:
        raise ConfigError(
            f"the {family} family can't express this model: model.decoder.mtp_num_layers is"
            f" {model.decoder.mtp_num_layers}, and only {' and '.join(WITH_MTP)} has layers for multi-token prediction;"
            " train with 0, or without exports"
        )
    written = dict(base) if base else _new_config_json(model, family)
    # where the base has them: transformers reads the nested ones, which "the top wins" would hide from the check below
    nested = any(name in (written.get("text_config") or {}) for name in _ROTARY)
    if nested:
        written["text_config"] = written["text_config"] | _rotary_fields(model.decoder)
    if not nested or any(name in written for name in _ROTARY):
        written |= _rotary_fields(model.decoder)
    if family in WITH_MTP:
        num_mtp = model.decoder.mtp_num_layers
        written |= {name: num_mtp for name in MTP_LAYERS if name in written or name == MTP_LAYERS[0]}
    again = architecture_of(written, "the config.json to write").model
    lost = differences(model, again)
    if lost:
        what = f"the {family} family can't express this model" if base is None else "config.json is of another model"
        raise ConfigError(f"{what}: {'; '.join(lost)}")
    return written


def _interleaves(family: str) -> bool:
    """Whether a vision-language family's mRoPE is interleaved, which its class computes whatever the file says."""
    return family.startswith("qwen3")


def differences(mine: ModelConfig, theirs: ModelConfig) -> list[str]:
    """Architecture fields that differ, as `model.decoder.num_layers is 2, there 3`."""
    lines = []
    for part in ("decoder", "encoder", "projector"):
        left, right = getattr(mine, part), getattr(theirs, part)
        if (left is None) != (right is None):
            lines.append(f"model.{part} is {_presence(left)}, there {_presence(right)}")
            continue
        for field in dataclasses.fields(left) if left is not None else ():
            a, b = getattr(left, field.name), getattr(right, field.name)
            if part == "projector" and field.name == "ffn_hidden_size" and mine.encoder and theirs.encoder:
                a = a or mine.encoder.hidden_size * mine.encoder.spatial_merge_size**2
                b = b or theirs.encoder.hidden_size * theirs.encoder.spatial_merge_size**2
            if part == "decoder":
                a, b = _comparable(left, field.name), _comparable(right, field.name)
            if field.name not in _CHOICES.get(part, ()) and a != b:
                lines.append(f"model.{part}.{field.name} is {a}, there {b}")
    return lines


def read_by(mine: ModelConfig, theirs: ModelConfig) -> ModelConfig:
    """What a model reads of another's weights: those for multi-token prediction may be left out by one without."""
    if mine.decoder.mtp_num_layers:
        return theirs
    return dataclasses.replace(theirs, decoder=dataclasses.replace(theirs.decoder, mtp_num_layers=0))


def _comparable(decoder: DecoderConfig, name: str) -> Any:
    """A field's value, the same for all ways to say the same."""
    if name == "moe_layer_freq":
        has_experts = layer_has_experts(decoder)
        # where all are alike, num_experts says which
        return None if len(set(has_experts)) == 1 else tuple(map(int, has_experts))
    if name == "moe_ffn_hidden_size" and decoder.num_experts is not None:
        return expert_ffn_hidden_size(decoder)
    if name in ("moe_router_num_groups", "moe_router_group_topk") and decoder.moe_router_num_groups == 1:
        return None
    return getattr(decoder, name)


def family_of(model: ModelConfig) -> str:
    """The family that a model without a Hugging Face origin is exported as."""
    has_experts = model.decoder.num_experts is not None
    if model.encoder is not None:
        kinds = {family: kind for family, (kind, _) in FAMILIES.items() if (family in WITH_EXPERTS) == has_experts}
        found = [family for family, kind in kinds.items() if kind == model.encoder.model_type]
        return found[0] if found else "qwen2_5_vl"
    if model.decoder.multi_latent_attention:
        return "deepseek_v3"
    if has_experts:
        return "qwen3_moe"
    if model.decoder.qk_layernorm:
        return "qwen3"
    return "qwen2" if model.decoder.add_qkv_bias else "llama"


def _presence(part: Any) -> str:
    return "None" if part is None else "set"


def _decoder(text: Fields, family: str) -> DecoderConfig:
    text.get(str, "hidden_act")
    text.must_be("hidden_act", "silu")
    text.must_be("use_sliding_window", False)
    text.must_be("attention_bias", False)
    text.must_be("mlp_bias", False)
    layer_types = set(text.get(tuple[str, ...], "layer_types", default=())) - {"full_attention"}
    if layer_types:
        raise ConfigError(f"{text.where}: layer_types has {', '.join(sorted(layer_types))}, which isn't built")
    width, heads = text.get(int, "hidden_size"), text.get(int, "num_attention_heads")
    return DecoderConfig(
        num_layers=text.get(int, "num_hidden_layers"),
        hidden_size=width,
        ffn_hidden_size=text.get(int, "intermediate_size"),
        num_attention_heads=heads,
        vocab_size=text.get(int, "vocab_size"),
        norm_epsilon=text.get(float, "rms_norm_eps"),
        untie_embeddings_and_output_weights=not text.get(bool, "tie_word_embeddings"),
        **(latent_attention(text, heads) if family == "deepseek_v3" else _attention(text, family, width // heads)),
        **_rope(text, family),
        **experts(text, family),
    )


def _attention(text: Fields, family: str, per_head: int) -> dict[str, Any]:
    # Llama and Qwen2 releases leave head_dim out where it is width / heads; Qwen3 states it
    default = {"default": per_head} if family in ("llama", "qwen2", "qwen2_5_vl") else {}
    return dict(
        num_query_groups=text.get(int, "num_key_value_heads"),
        kv_channels=text.get(int, "head_dim", **default),
        add_qkv_bias=family in ("qwen2", "qwen2_5_vl"),
        qk_layernorm=family.startswith("qwen3"),
    )


def _rope(text: Fields, family: str) -> dict[str, Any]:
    """The decoder's rotary fields, from rope_theta with rope_scaling, or from rope_parameters."""
    parameters, scaling = text.mapping("rope_parameters"), text.mapping("rope_scaling")
    new = Fields(f"{text.where}: rope_parameters", (parameters,))
    both = Fields(f"{text.where}: rope_parameters/rope_scaling", (parameters, scaling))
    theta, theta_too = text.get(float, "rope_theta", default=None), new.get(float, "rope_theta", default=None)
    if theta is None and theta_too is None:
        raise ConfigError(f"{text.where} has neither rope_theta nor rope_parameters.rope_theta; add one")
    if theta is not None and theta_too is not None and theta != theta_too:
        raise ConfigError(f"{text.where}: rope_theta={theta}, but rope_parameters.rope_theta={theta_too}; correct one")
    text.must_be("partial_rotary_factor", 1)
    both.must_be("partial_rotary_factor", 1)
    kind = both.get(str, "rope_type", "type", default="default")
    found: dict[str, Any] = {"rotary_base": theta_too if theta is None else theta}
    if kind == "llama3":
        found["use_rope_scaling"] = True
        found |= {field: both.get(type(getattr(DecoderConfig, field)), name) for name, field in _LLAMA3.items()}
    elif kind == "yarn" and family == "deepseek_v3":
        found["rope_type"] = "yarn"
        found |= {field: both.get(type(getattr(DecoderConfig, field)), name) for name, field in _YARN.items()}
        both.must_be("attention_factor", None)
        both.must_be("truncate", True)
        growth = {name: both.get(float, name, default=None) for name in _YARN_GROWTH}
        if None not in growth.values():
            found |= growth
        elif set(growth.values()) != {None}:
            raise ConfigError(f"{both.where} has one of {' and '.join(_YARN_GROWTH)}; give both, or neither")
    elif kind not in ("default", "mrope"):
        built = "default, llama3 and yarn" if family == "deepseek_v3" else "default and llama3"
        raise ConfigError(f"{text.where}: rope_type={kind} isn't built; {built} are")
    elif (factor := both.get(float, "factor", default=None)) is not None:
        raise ConfigError(f"{both.where} has factor={factor}, but no rope_type that uses it; add the type")
    if FAMILIES[family][0] is not None:
        is_interleaved = _interleaves(family)
        found |= {"mrope_section": both.get(tuple[int, ...], "mrope_section"), "mrope_interleaved": is_interleaved}
        both.must_be("mrope_interleaved", is_interleaved)
    return found


def _encoder(vision: Fields, encoder_type: str) -> EncoderConfig:
    width, heads = vision.get(int, "hidden_size"), vision.get(int, "num_heads")
    rope = Fields(f"{vision.where}.rope_parameters", (vision.mapping("rope_parameters"),))
    shared: dict[str, Any] = dict(
        model_type=encoder_type,
        num_layers=vision.get(int, "depth"),
        hidden_size=width,
        ffn_hidden_size=vision.get(int, "intermediate_size"),
        num_attention_heads=heads,
        kv_channels=width // heads,
        in_channels=vision.get(int, "in_channels", "in_chans"),
        patch_size=vision.get(int, "patch_size"),
        temporal_patch_size=vision.get(int, "temporal_patch_size"),
        spatial_merge_size=vision.get(int, "spatial_merge_size"),
        norm_epsilon=_ENCODER_EPSILON,
        rotary_base=rope.get(float, "rope_theta", default=_ENCODER_ROTARY_BASE),
        activation_func=_activation(vision),
    )
    if encoder_type == "qwen2_5_vit":
        return EncoderConfig(
            **shared,
            window_size=vision.get(int, "window_size"),
            fullatt_block_indexes=vision.get(tuple[int, ...], "fullatt_block_indexes"),
            tokens_per_second=vision.get(float, "tokens_per_second"),
        )
    return EncoderConfig(
        **shared,
        swiglu=False,
        normalization="LayerNorm",
        num_position_embeddings=vision.get(int, "num_position_embeddings"),
        deepstack_visual_indexes=vision.get(tuple[int, ...], "deepstack_visual_indexes"),
    )


def _activation(vision: Fields) -> str:
    name = vision.get(str, "hidden_act")
    if name not in _ACTIVATIONS:
        raise ConfigError(f"{vision.where}: hidden_act={name} isn't built; {', '.join(_ACTIVATIONS)} are")
    return _ACTIVATIONS[name]


def _new_config_json(model: ModelConfig, family: str) -> dict[str, Any]:
    decoder, encoder = model.decoder, model.encoder
    text = {
        "hidden_act": "silu",
        "hidden_size": decoder.hidden_size,
        "intermediate_size": decoder.ffn_hidden_size,
        "num_hidden_layers": decoder.num_layers,
        "num_attention_heads": decoder.num_attention_heads,
        "num_key_value_heads": decoder.num_query_groups,
        "head_dim": decoder.kv_channels,
        "vocab_size": decoder.vocab_size,
        "rms_norm_eps": decoder.norm_epsilon,
        "tie_word_embeddings": not decoder.untie_embeddings_and_output_weights,
        "initializer_range": decoder.init_method_std,
    }
    if family in ("qwen2", "qwen2_5_vl") and decoder.kv_channels * decoder.num_attention_heads == decoder.hidden_size:
        del text["head_dim"]  # these families' classes compute it
    if family in WITH_EXPERTS:
        text |= new_experts(decoder, family)
    if family == "deepseek_v3":
        del text["head_dim"]
        text |= new_latent_attention(decoder)
    top = {"architectures": [FAMILIES[family][1]], "model_type": family}
    if encoder is None:
        return top | text
    vision = {
        "depth": encoder.num_layers,
        "hidden_act": {ours: theirs for theirs, ours in _ACTIVATIONS.items()}[encoder.activation_func],
        "hidden_size": encoder.hidden_size,
        "intermediate_size": encoder.ffn_hidden_size,
        "num_heads": encoder.num_attention_heads,
        "in_channels": encoder.in_channels,
        "out_hidden_size": decoder.hidden_size,
        "patch_size": encoder.patch_size,
        "temporal_patch_size": encoder.temporal_patch_size,
        "spatial_merge_size": encoder.spatial_merge_size,
        "rope_parameters": {"rope_type": "axial", "rope_theta": encoder.rotary_base},
    }
    if encoder.model_type == "qwen2_5_vit":
        vision |= {
            "window_size": encoder.window_size,
            "fullatt_block_indexes": list(encoder.fullatt_block_indexes),
            # transformers takes a whole number only as an int
            "tokens_per_second": int(tokens) if (tokens := encoder.tokens_per_second).is_integer() else tokens,
        }
    else:
        vision |= {
            "num_position_embeddings": encoder.num_position_embeddings,
            "deepstack_visual_indexes": list(encoder.deepstack_visual_indexes),
        }
    return top | {
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": text | _rotary_fields(decoder) | {"model_type": f"{family}_text"},
        "vision_config": vision | {"model_type": f"{family}_vision"},
    }


def _rotary_fields(decoder: DecoderConfig) -> dict[str, Any]:
    """The rotary fields in the form of transformers 5 (rope_parameters) and of 4 (rope_theta, rope_scaling)."""
    special: dict[str, Any] = {}
    if decoder.use_rope_scaling:
        special |= {name: getattr(decoder, field) for name, field in _LLAMA3.items()}
    if decoder.mrope_section is not None:
        special["mrope_section"] = list(decoder.mrope_section)
    if decoder.mrope_interleaved:
        special["mrope_interleaved"] = True
    kind = {"rope_type": "llama3" if decoder.use_rope_scaling else "default"}
    if decoder.rope_type == "yarn":
        kind = {"rope_type": "yarn"}
        special |= {name: getattr(decoder, field) for name, field in _YARN.items()}
        if decoder.mscale_all_dim:
            special |= {name: getattr(decoder, name) for name in _YARN_GROWTH}
    return {
        "rope_theta": decoder.rotary_base,
        "rope_parameters": kind | special | {"rope_theta": decoder.rotary_base},
        "rope_scaling": kind | special if special else None,
    }
