"""Mixtures of experts and DeepSeek's attention, from the fields of config.json and back."""

from typing import Any

from jaxforge.config.derived import expert_ffn_hidden_size, layer_has_experts
from jaxforge.config.errors import ConfigError
from jaxforge.config.hf_fields import Fields
from jaxforge.config.model_schema import DecoderConfig

WITH_EXPERTS = ("qwen3_moe", "qwen3_vl_moe", "deepseek_v3")
# With layers for multi-token prediction.
WITH_MTP = ("deepseek_v3",)
# Names of the number of layers for multi-token prediction behind the decoder's: as released, and of transformers 5.
MTP_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers")


def latent_attention(text: Fields, num_heads: int) -> dict[str, Any]:
    """The fields of DeepSeek's attention."""
    text.get(int, "num_key_value_heads")
    text.must_be("num_key_value_heads", num_heads)
    # that of the norms inside the attention, in every release, whatever the file says of the others
    text.must_be("rms_norm_eps", 1e-6)
    text.must_be("rope_interleave", True)
    return dict(
        multi_latent_attention=True,
        q_lora_rank=None if text.is_null("q_lora_rank") else text.get(int, "q_lora_rank"),
        kv_lora_rank=text.get(int, "kv_lora_rank"),
        qk_head_dim=text.get(int, "qk_nope_head_dim"),
        qk_pos_emb_head_dim=text.get(int, "qk_rope_head_dim"),
        v_head_dim=text.get(int, "v_head_dim"),
    )


def experts(text: Fields, family: str) -> dict[str, Any]:
    """The fields of a mixture of experts; none for a dense family."""
    if family not in WITH_EXPERTS:
        return {}
    inner, layers = text.get(int, "moe_intermediate_size"), range(text.get(int, "num_hidden_layers"))
    found: dict[str, Any] = dict(moe_router_topk=text.get(int, "num_experts_per_tok"), moe_ffn_hidden_size=inner)
    if family == "deepseek_v3":
        text.must_be("scoring_func", "sigmoid")
        text.must_be("topk_method", "noaux_tc")
        dense, step = text.count("first_k_dense_replace"), text.get(int, "moe_layer_freq", default=1)
        num_mtp = text.count(*MTP_LAYERS, default=0)
        of_all = tuple(int(layer >= dense and layer % step == 0) for layer in range(len(layers) + num_mtp))
        has_experts, of_mtp = of_all[: len(layers)], of_all[len(layers) :]
        if any(has != has_experts[-1] for has in of_mtp):
            raise ConfigError(
                f"{text.where}: {MTP_LAYERS[0]}={num_mtp}: by first_k_dense_replace={dense} and moe_layer_freq={step}"
                " such a layer has experts where the last decoder layer hasn't, or the other way round, which isn't"
                f" built; set {MTP_LAYERS[0]} to 0 there"
            )
        groups, best = text.get(int, "n_group"), text.get(int, "topk_group")
        found |= dict(
            mtp_num_layers=num_mtp,
            num_experts=text.get(int, "n_routed_experts"),
            moe_shared_expert_intermediate_size=inner * text.get(int, "n_shared_experts"),
            moe_router_score_function="sigmoid",
            moe_router_enable_expert_bias=True,
            moe_router_topk_scaling_factor=text.get(float, "routed_scaling_factor"),
            # one group of all experts is none
            moe_router_num_groups=groups if groups > 1 else None,
            moe_router_group_topk=best if groups > 1 else None,
        )
    else:
        text.must_be("shared_expert_intermediate_size", 0)
        text.must_be("qkv_bias", False)
        step, dense_layers = text.get(int, "decoder_sparse_step"), text.get(tuple[int, ...], "mlp_only_layers")
        has_experts = tuple(int(layer not in dense_layers and (layer + 1) % step == 0) for layer in layers)
        # transformers 5 writes the second name
        found["num_experts"] = text.get(int, "num_experts", "num_local_experts")
    if family == "qwen3_vl_moe":
        # what its class computes, whatever the file says
        text.must_be("norm_topk_prob", True)
    else:
        found["moe_router_pre_softmax"] = not text.get(bool, "norm_topk_prob")
    return found | dict(moe_layer_freq=None if all(has_experts) else has_experts)


def new_latent_attention(decoder: DecoderConfig) -> dict[str, Any]:
    """What config.json says of DeepSeek's attention."""
    return {
        "num_key_value_heads": decoder.num_attention_heads,
        "q_lora_rank": decoder.q_lora_rank,
        "kv_lora_rank": decoder.kv_lora_rank,
        "qk_nope_head_dim": decoder.qk_head_dim,
        "qk_rope_head_dim": decoder.qk_pos_emb_head_dim,
        "v_head_dim": decoder.v_head_dim,
        "rope_interleave": True,
    }


def new_experts(decoder: DecoderConfig, family: str) -> dict[str, Any]:
    """What config.json says of a mixture of experts."""
    has_experts = layer_has_experts(decoder)
    shared = {
        "num_experts_per_tok": decoder.moe_router_topk,
        "moe_intermediate_size": expert_ffn_hidden_size(decoder),
        "norm_topk_prob": not decoder.moe_router_pre_softmax,
    }
    if family != "deepseek_v3":
        dense = [layer for layer, has in enumerate(has_experts) if not has]
        return shared | {"num_experts": decoder.num_experts, "decoder_sparse_step": 1, "mlp_only_layers": dense}
    width = decoder.moe_shared_expert_intermediate_size or 0
    return shared | {
        "n_routed_experts": decoder.num_experts,
        "n_shared_experts": max(1, width // expert_ffn_hidden_size(decoder)),
        "n_group": decoder.moe_router_num_groups or 1,
        "topk_group": decoder.moe_router_group_topk or 1,
        "routed_scaling_factor": decoder.moe_router_topk_scaling_factor,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        # where some dense layer comes later this says another model, and is refused
        "first_k_dense_replace": has_experts.index(True) if any(has_experts) else decoder.num_layers,
        "moe_layer_freq": 1,
    }
