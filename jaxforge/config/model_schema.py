"""The fields of `config.model`: decoder, vision encoder and projector."""

import dataclasses

from jaxforge.config.fields import field


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """The language decoder: a pre-norm transformer with SwiGLU (Llama, Qwen2.5, Qwen3 and their VL decoders).

    Its attention has grouped queries, or is DeepSeek's multi-head latent attention.
    """

    num_layers: int = field(2, "transformer layers", unit="layers", flag="--num-layers")
    hidden_size: int = field(64, "width of the residual stream", unit="features", flag="--hidden-size")
    ffn_hidden_size: int = field(128, "width of the gated feed-forward", unit="features", flag="--ffn-hidden-size")
    num_attention_heads: int = field(4, "query heads", unit="heads", flag="--num-attention-heads")
    num_query_groups: int = field(
        4, "key/value heads (grouped-query attention)", unit="heads", flag="--num-query-groups"
    )
    kv_channels: int = field(16, "width of one head", unit="features", flag="--kv-channels")
    vocab_size: int = field(256, "true vocabulary rows", unit="tokens", flag="--vocab-size")
    make_vocab_size_divisible_by: int = field(
        128,
        "embedding and head are padded to a multiple of this; padded rows never enter the loss, and checkpoints"
        " have the same shapes at every tensor parallel size that divides it",
        unit="tokens",
        flag="--make-vocab-size-divisible-by",
    )
    add_qkv_bias: bool = field(False, "bias on the query, key and value projections", flag="--add-qkv-bias")
    qk_layernorm: bool = field(False, "RMSNorm on each query and key head before RoPE", flag="--qk-layernorm")
    norm_epsilon: float = field(1e-6, "epsilon of every RMSNorm", flag="--norm-epsilon")
    rotary_base: float = field(1e4, "RoPE theta", flag="--rotary-base")
    use_rope_scaling: bool = field(False, "Llama-3.1 frequency scaling of RoPE", flag="--use-rope-scaling")
    rope_scaling_factor: float = field(8.0, "Llama-3.1 scaling factor", flag="--rope-scaling-factor")
    rope_scaling_low_freq_factor: float = field(1.0, "wavelengths above original / this are fully scaled")
    rope_scaling_high_freq_factor: float = field(4.0, "wavelengths below original / this are left alone")
    rope_scaling_original_max_position_embeddings: int = field(
        8192, "context length before scaling", unit="positions"
    )
    mrope_section: tuple[int, ...] | None = field(
        None,
        "rotary frequencies for time, height and width (mRoPE); None rotates by text position",
        unit="frequencies",
        flag="--mrope-section",
    )
    mrope_interleaved: bool = field(
        False, "mRoPE frequencies alternate t, h, w (Qwen3-VL) instead of lying in blocks", flag="--mrope-interleaved"
    )
    multi_latent_attention: bool = field(
        False,
        "multi-head latent attention (DeepSeek-V2 and V3): queries, keys and values come from narrow projections;"
        " num_query_groups and kv_channels are then unused",
        flag="--multi-latent-attention",
    )
    q_lora_rank: int | None = field(
        None, "latent: width of the compressed queries; None projects queries from the residual stream",
        unit="features", flag="--q-lora-rank",
    )
    kv_lora_rank: int = field(
        512, "latent: width of what keys and values are projected from", unit="features", flag="--kv-lora-rank"
    )
    qk_head_dim: int = field(
        128, "latent: features of a query or key head that don't rotate", unit="features", flag="--qk-head-dim"
    )
    qk_pos_emb_head_dim: int = field(
        64, "latent: features of a query or key head that rotate, in keys the same for all heads", unit="features",
        flag="--qk-pos-emb-head-dim",
    )
    v_head_dim: int = field(128, "latent: width of a value head", unit="features", flag="--v-head-dim")
    rope_type: str = field(
        "rope", "RoPE, or with latent attention YaRN, which stretches it beyond the context of pretraining",
        choices=("rope", "yarn"), flag="--rope-type",
    )
    rotary_scaling_factor: float = field(
        40.0, "YaRN: how much longer the context becomes", flag="--rotary-scaling-factor"
    )
    original_max_position_embeddings: int = field(4096, "YaRN: context length before scaling", unit="positions")
    beta_fast: float = field(
        32.0, "YaRN: frequencies with more turns in the original context are left alone", unit="turns"
    )
    beta_slow: float = field(
        1.0, "YaRN: frequencies with fewer turns in the original context are fully scaled", unit="turns"
    )
    mscale: float = field(
        1.0, "YaRN: how much the rotated features grow, by (0.1 mscale ln(rotary_scaling_factor) + 1) over the same of"
        " mscale_all_dim", flag="--mscale",
    )
    mscale_all_dim: float = field(
        0.0, "YaRN: how much attention scores grow, by the square of 0.1 mscale_all_dim ln(rotary_scaling_factor) + 1",
        flag="--mscale-all-dim",
    )
    untie_embeddings_and_output_weights: bool = field(
        True, "separate weights for embedding and output head", flag="--untie-embeddings-and-output-weights"
    )
    mtp_num_layers: int = field(
        0, "layers behind the decoder's that predict one token further ahead each, in training (multi-token prediction,"
        " DeepSeek-V3, arXiv:2412.19437, 2.2); they are like the last decoder layer", unit="layers",
        flag="--mtp-num-layers",
    )
    hidden_dropout: float = field(
        0.0, "dropout on the embeddings and the residual branches, in training", flag="--hidden-dropout"
    )
    init_method_std: float = field(0.02, "standard deviation of the initial weights", flag="--init-method-std")
    num_experts: int | None = field(
        None, "experts of a mixture-of-experts layer; None makes every layer dense", unit="experts",
        flag="--num-experts",
    )
    moe_router_topk: int = field(2, "experts that a token goes to", unit="experts", flag="--moe-router-topk")
    moe_ffn_hidden_size: int | None = field(
        None, "width of one expert; None is ffn_hidden_size", unit="features", flag="--moe-ffn-hidden-size"
    )
    moe_shared_expert_intermediate_size: int | None = field(
        None, "width of the shared experts together, which every token goes to; None has none", unit="features",
        flag="--moe-shared-expert-intermediate-size",
    )
    moe_layer_freq: tuple[int, ...] | None = field(
        None, "for each layer, 1 where it has experts and 0 where it is dense; None gives all layers experts",
        flag="--moe-layer-freq",
    )
    moe_router_score_function: str = field(
        "softmax", "scores of the experts from the router's logits", choices=("softmax", "sigmoid"),
        flag="--moe-router-score-function",
    )
    moe_router_pre_softmax: bool = field(
        False, "weigh the chosen experts by their scores as they are, instead of by scores normalised to sum 1",
        flag="--moe-router-pre-softmax",
    )
    moe_router_num_groups: int | None = field(
        None, "groups of consecutive experts; a token's experts come from the moe_router_group_topk best ones, by the"
        " sum of their two best scores", unit="groups", flag="--moe-router-num-groups",
    )
    moe_router_group_topk: int | None = field(
        None, "groups that a token's experts come from", unit="groups", flag="--moe-router-group-topk"
    )
    moe_router_topk_scaling_factor: float = field(
        1.0, "factor on the weights of the chosen experts", flag="--moe-router-topk-scaling-factor"
    )
    moe_router_enable_expert_bias: bool = field(
        False, "add a bias to the scores that experts are chosen by, not to those that they are weighed by; it follows"
        " the load, without a gradient (DeepSeek-V3, arXiv:2412.19437, 2.1.2)", flag="--moe-router-enable-expert-bias",
    )


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """The vision encoder.  Field names are those of LoongForge's vit.yaml; such a file loads as it is."""

    model_type: str = field(
        "qwen2_5_vit",
        "architecture: windowed attention with full-attention layers, or learned positions with DeepStack",
        choices=("qwen2_5_vit", "qwen3_vit"),
        flag="model_type",
    )
    num_layers: int = field(2, "transformer layers", unit="layers", flag="num_layers")
    hidden_size: int = field(32, "width of the residual stream", unit="features", flag="hidden_size")
    ffn_hidden_size: int = field(64, "width of the feed-forward", unit="features", flag="ffn_hidden_size")
    num_attention_heads: int = field(4, "attention heads", unit="heads", flag="num_attention_heads")
    num_query_groups: int | None = field(
        None, "key/value heads; must equal num_attention_heads when given", unit="heads", flag="num_query_groups"
    )
    kv_channels: int = field(8, "width of one head", unit="features", flag="kv_channels")
    in_channels: int = field(3, "image channels", unit="channels", flag="in_channels")
    patch_size: int = field(14, "side of a patch", unit="pixels", flag="patch_size")
    temporal_patch_size: int = field(2, "frames in a patch", unit="frames", flag="temporal_patch_size")
    spatial_merge_size: int = field(
        2, "side of the square of patches that becomes one visual token", unit="patches", flag="spatial_merge_size"
    )
    image_size: tuple[int, int] = field(
        (1344, 1344),
        "largest image area (height x width): larger images are scaled down to it, and synthetic images fill it",
        unit="pixels",
        flag="image_size",
    )
    window_size: int = field(
        112, "side of an attention window (qwen2_5_vit)", unit="pixels", flag="window_size"
    )
    fullatt_block_indexes: tuple[int, ...] = field(
        (), "layers that attend over the whole image (qwen2_5_vit)", unit="layer indexes", flag="fullatt_block_indexes"
    )
    tokens_per_second: float = field(
        2.0, "time positions that a second of video is long (qwen2_5_vit; qwen3_vit has timestamps in the text)",
        unit="positions/s", flag="tokens_per_second",
    )
    num_position_embeddings: int | None = field(
        None,
        "rows of the learned position table, a square number (qwen3_vit)",
        unit="positions",
        flag="num_position_embeddings",
    )
    deepstack_visual_indexes: tuple[int, ...] = field(
        (),
        "layers whose features are added after the first decoder layers (qwen3_vit)",
        unit="layer indexes",
        flag="deepstack_visual_indexes",
    )
    activation_func: str = field(
        "silu", "feed-forward activation", choices=("silu", "gelu", "gelu_tanh"), flag="activation_func"
    )
    swiglu: bool = field(True, "gated feed-forward", flag="swiglu")
    gated_linear_unit: bool | None = field(
        None, "another name for swiglu; must agree with it when given", flag="gated_linear_unit"
    )
    normalization: str = field(
        "RMSNorm", "normalisation of the encoder's layers", choices=("RMSNorm", "LayerNorm"), flag="normalization"
    )
    norm_epsilon: float = field(1e-6, "epsilon of every norm", flag="norm_epsilon")
    add_bias_linear: bool = field(True, "bias on the output and feed-forward projections", flag="add_bias_linear")
    add_qkv_bias: bool = field(True, "bias on the query, key and value projections", flag="add_qkv_bias")
    group_query_attention: bool = field(
        False,
        "the encoders have as many key/value heads as query heads, so only False is right",
        choices=(False,),
        flag="group_query_attention",
    )
    position_embedding_type: str = field(
        "none",
        "the decoder-style position embedding; both encoders use 2D RoPE of their own, so only none is right",
        choices=("none",),
        flag="position_embedding_type",
    )
    rotary_base: float = field(1e4, "theta of the 2D RoPE", flag="rotary_base")
    bias_activation_fusion: bool = field(
        False, "XLA fuses bias and activation in any case: both values give the same program",
        flag="bias_activation_fusion",
    )
    apply_rope_fusion: bool = field(
        False, "XLA fuses RoPE in any case: both values give the same program", flag="apply_rope_fusion"
    )
    hidden_dropout: float = field(
        0.0, "dropout on the residual branches", flag="hidden_dropout", planned="dropout in the vision encoder"
    )
    attention_dropout: float = field(
        0.0, "dropout on attention weights", flag="attention_dropout", planned="attention dropout"
    )
    init_method_std: float = field(0.02, "standard deviation of the initial weights", flag="--init-method-std")
    tensor_model_parallel_size: int | None = field(
        None,
        "tensor parallel size of the encoder and projector, a divisor of the decoder's; None inherits the decoder's",
        unit="devices",
        flag="tensor_model_parallel_size",
    )
    recompute_granularity: str | None = field(
        None, "full recomputes whole layers in the backward pass, selective modules of each; None keeps activations",
        choices=(None, "full", "selective"), flag="recompute_granularity",
    )
    recompute_method: str | None = field(
        None, "uniform groups layers; block recomputes the first ones", choices=(None, "uniform", "block"),
        flag="recompute_method",
    )
    recompute_num_layers: int | None = field(
        None, "layers in a group (uniform) or layers recomputed (block)", unit="layers", flag="recompute_num_layers"
    )
    recompute_modules: tuple[str, ...] = field(
        (), "modules recomputed by the selective granularity, of core_attn, mlp and layernorm; none named is core_attn",
        flag="recompute_modules",
    )
    activations: tuple[tuple[str, str], ...] = field(
        (), "(name, action) pairs: single activations to save, recompute or offload, such as (mlp_act, recompute)"
    )


@dataclasses.dataclass(frozen=True)
class ProjectorConfig:
    """From merged patches to decoder width: norm, linear, activation, linear (the patch merger of the Qwen VLs)."""

    ffn_hidden_size: int | None = field(
        None, "inner width; None is encoder width x spatial_merge_size^2", unit="features"
    )
    normalization: str = field("RMSNorm", "normalisation of the input", choices=("RMSNorm", "LayerNorm"))
    norm_epsilon: float = field(1e-6, "epsilon of the norm")
    activation_func: str = field("gelu", "activation between the two projections",
                                 choices=("silu", "gelu", "gelu_tanh"))


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """What is trained: a decoder, and for a vision-language model an encoder and a projector."""

    decoder: DecoderConfig = DecoderConfig()
    encoder: EncoderConfig | None = None
    projector: ProjectorConfig | None = None
