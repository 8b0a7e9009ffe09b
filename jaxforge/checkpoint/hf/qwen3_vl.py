"""Qwen3-VL: Qwen3's decoder, a ViT with learned positions and LayerNorms, and mergers for DeepStack."""

from jaxforge.checkpoint.hf import qwen3
from jaxforge.checkpoint.hf.qwen2_5_vl import attention_tensors
from jaxforge.checkpoint.hf.tensors import Linear, Matrix, Tensor, Vector
from jaxforge.config.model_schema import ModelConfig

PREFIXES = ({"decoder": "model.language_model.", "encoder": "model.visual."},)


def tensors(model: ModelConfig, prefixes: dict[str, str]) -> list[Tensor]:
    assert model.encoder is not None
    there = prefixes["encoder"]
    layer, ours = f"{there}blocks.{{}}.", "encoder/layers/"
    found: list[Tensor] = [
        *qwen3.tensors(model, prefixes),
        *attention_tensors(layer, ours, model.encoder, there),
        Vector(f"{there}patch_embed.proj.bias", "encoder/patch_bias_D"),
        Matrix(f"{there}pos_embed.weight", "encoder/position_ND"),
        *_norm(f"{layer}norm1", f"{ours}attention_norm"),
        *_norm(f"{layer}norm2", f"{ours}mlp_norm"),
        *_feed_forward(f"{layer}mlp.", f"{ours}mlp/"),
        *_norm(f"{there}merger.norm", "projector/merger/norm"),
        *_feed_forward(f"{there}merger.", "projector/merger/mlp/"),
    ]
    if model.encoder.deepstack_visual_indexes:
        merger = f"{there}deepstack_merger_list.{{}}."
        found += _norm(f"{merger}norm", "projector/deepstack/norm")
        found += _feed_forward(merger, "projector/deepstack/mlp/")
    return found


def _norm(there: str, here: str) -> list[Tensor]:
    return [Vector(f"{there}.weight", f"{here}/scale"), Vector(f"{there}.bias", f"{here}/bias")]


def _feed_forward(there: str, here: str) -> list[Tensor]:
    return [
        Linear(f"{there}linear_fc1.weight", f"{here}up_DF"),
        Vector(f"{there}linear_fc1.bias", f"{here}up_bias_F"),
        Linear(f"{there}linear_fc2.weight", f"{here}down_FE"),
        Vector(f"{there}linear_fc2.bias", f"{here}down_bias_E"),
    ]
