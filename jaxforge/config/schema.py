"""Every config field: its type, default, unit, meaning, and the Megatron or LoongForge flag that it answers to.

The frozen dataclasses below are the typed form that the rest of the code reads.  A recipe fills an
`ml_collections.ConfigDict` of the same shape (`default_config`), which `load.py` checks and turns into a `Config`.
A field with `planned` names a feature that isn't built yet: it accepts its default alone and is otherwise refused.
"""

import dataclasses
from typing import Any


def field(default: Any, meaning: str, *, unit: str = "", flag: str = "", choices: tuple = (), planned: str = ""):
    """A dataclass field with what docs/config.md and the validator need to know about it."""
    metadata = {"meaning": meaning, "unit": unit, "flag": flag, "choices": choices, "planned": planned}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """The language decoder: a pre-norm transformer with SwiGLU (Llama, Qwen2.5, Qwen3 and their VL decoders)."""

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
    untie_embeddings_and_output_weights: bool = field(
        True, "separate weights for embedding and output head", flag="--untie-embeddings-and-output-weights"
    )
    hidden_dropout: float = field(
        0.0, "dropout on the embeddings and the residual branches, in training", flag="--hidden-dropout"
    )
    init_method_std: float = field(0.02, "standard deviation of the initial weights", flag="--init-method-std")


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
        None, "full recomputes whole layers in the backward pass; None keeps activations",
        choices=(None, "full"), flag="recompute_granularity",
    )
    recompute_method: str | None = field(
        None, "uniform groups layers; block recomputes the first ones", choices=(None, "uniform", "block"),
        flag="recompute_method",
    )
    recompute_num_layers: int | None = field(
        None, "layers in a group (uniform) or layers recomputed (block)", unit="layers", flag="recompute_num_layers"
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


@dataclasses.dataclass(frozen=True)
class ParallelConfig:
    """How the devices are shared out.  Data parallel size is what remains of the devices."""

    tensor_model_parallel_size: int = field(
        1, "devices that share each decoder layer", unit="devices", flag="--tensor-model-parallel-size"
    )
    sequence_parallel: bool = field(
        False, "shard the residual stream and norms over the tensor group by sequence", flag="--sequence-parallel"
    )
    pipeline_model_parallel_size: int = field(
        1, "pipeline stages", flag="--pipeline-model-parallel-size", planned="pipeline parallelism"
    )
    num_layers_per_virtual_pipeline_stage: int | None = field(
        None, "layers in a virtual stage", flag="--num-layers-per-virtual-pipeline-stage",
        planned="pipeline parallelism",
    )
    pipeline_model_parallel_layout: str | None = field(
        None, "layers of each stage, as a string", flag="--pipeline-model-parallel-layout",
        planned="pipeline parallelism",
    )
    vocabulary_parallel_over_pipeline: bool = field(
        False, "shard embedding and loss over stages too", planned="pipeline parallelism"
    )
    context_parallel_size: int = field(
        1, "devices that share each sequence", flag="--context-parallel-size", planned="context parallelism"
    )
    cp_comm_type: str | None = field(
        None, "how context parallelism moves keys and values", flag="--cp-comm-type", planned="context parallelism"
    )
    expert_model_parallel_size: int = field(
        1, "devices that share the experts", flag="--expert-model-parallel-size", planned="expert parallelism"
    )
    expert_tensor_parallel_size: int | None = field(
        None, "devices that share each expert", flag="--expert-tensor-parallel-size", planned="expert parallelism"
    )
    data_parallel_sharding_strategy: str = field(
        "no_shard", "which state is sharded over data parallel ranks", flag="--data-parallel-sharding-strategy",
        planned="sharding state over data parallel ranks",
    )
    enable_encoder_hetero_dp: bool = field(
        False, "the decoder's tensor group encodes different microbatches", flag="--enable-encoder-hetero-dp",
        planned="encoder hetero DP",
    )
    enable_full_hetero_dp: bool = field(
        False, "the whole model-parallel group encodes different microbatches", flag="--enable-full-hetero-dp",
        planned="full hetero DP",
    )
    overlap_grad_reduce: bool = field(
        False, "overlap gradient reduction with the backward pass", flag="--overlap-grad-reduce",
        planned="control of communication overlap",
    )
    overlap_param_gather: bool = field(
        False, "overlap parameter gathering with the forward pass", flag="--overlap-param-gather",
        planned="control of communication overlap",
    )
    tp_comm_overlap: bool = field(
        False, "overlap tensor parallel communication", flag="--tp-comm-overlap",
        planned="control of communication overlap",
    )
    overlap_moe_expert_parallel_comm: bool = field(
        False, "overlap expert all-to-all with compute", flag="--overlap-moe-expert-parallel-comm",
        planned="mixture of experts",
    )


@dataclasses.dataclass(frozen=True)
class MemoryConfig:
    """What the decoder recomputes in its backward pass, and what leaves device memory."""

    recompute_granularity: str | None = field(
        None, "full recomputes whole decoder layers; None keeps activations",
        choices=(None, "full"), flag="--recompute-granularity",
    )
    recompute_method: str | None = field(
        None, "uniform groups layers; block recomputes the first ones", choices=(None, "uniform", "block"),
        flag="--recompute-method",
    )
    recompute_num_layers: int | None = field(
        None, "layers in a group (uniform) or layers recomputed (block)", unit="layers",
        flag="--recompute-num-layers",
    )
    recompute_modules: tuple[str, ...] = field(
        (), "modules recomputed by the selective granularity", flag="--recompute-modules",
        planned="selective recompute",
    )
    fine_grained_activation_offloading: bool = field(
        False, "move activations to host memory", flag="--fine-grained-activation-offloading",
        planned="activation offload",
    )
    offload_modules: tuple[str, ...] = field(
        (), "modules whose activations move", flag="--offload-modules", planned="activation offload"
    )
    offload_tensors: tuple[str, ...] = field(
        (), "activations that move", flag="--offload-tensors", planned="activation offload"
    )
    min_offloaded_tensor_size: int | None = field(
        None, "smallest activation that moves", unit="bytes", flag="--min-offloaded-tensor-size",
        planned="activation offload",
    )
    optimizer_cpu_offload: bool = field(
        False, "optimizer state in host memory", flag="--optimizer-cpu-offload", planned="optimizer offload"
    )
    optimizer_offload_fraction: float | None = field(
        None, "fraction of the optimizer state in host memory", flag="--optimizer-offload-fraction",
        planned="optimizer offload",
    )


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """The training loss: cross-entropy summed over target tokens, divided once by their number."""

    z_loss_coefficient: float = field(0.0, "weight of the squared log-sum-exp (PaLM, arXiv:2204.02311, 5)")
    cross_entropy_loss_fusion: bool = field(
        False, "fuse the output projection with the loss", flag="--cross-entropy-loss-fusion",
        planned="fused linear cross-entropy",
    )
    cross_entropy_fusion_impl: str | None = field(
        None, "which fusion", flag="--cross-entropy-fusion-impl", planned="fused linear cross-entropy"
    )


@dataclasses.dataclass(frozen=True)
class MoeConfig:
    """Mixture of experts; not built yet."""

    moe_token_dispatcher_type: str | None = field(
        None, "how tokens reach their experts", flag="--moe-token-dispatcher-type", planned="mixture of experts"
    )
    moe_enable_deepep: bool = field(
        False, "DeepEP transport", flag="--moe-enable-deepep", planned="mixture of experts"
    )
    moe_deepep_num_sms: int | None = field(
        None, "SMs that DeepEP may use", flag="--moe-deepep-num-sms", planned="mixture of experts"
    )
    moe_permute_fusion: bool = field(
        False, "fused token permutation", flag="--moe-permute-fusion", planned="mixture of experts"
    )


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW on fp32 master weights, clipping by global norm, and the learning-rate schedule."""

    learning_rate: float = field(1e-4, "peak learning rate", flag="--lr")
    min_lr: float = field(0.0, "learning rate at the end of the decay", flag="--min-lr")
    lr_decay_style: str = field(
        "cosine", "shape after the warm-up", choices=("constant", "cosine", "linear", "WSD"),
        flag="--lr-decay-style",
    )
    lr_warmup_iters: int = field(0, "linear warm-up", unit="steps", flag="--lr-warmup-iters")
    lr_decay_iters: int | None = field(
        None, "step at which min_lr is reached; None is train.steps", unit="steps", flag="--lr-decay-iters"
    )
    lr_wsd_decay_iters: int | None = field(
        None, "length of the final linear decay of WSD; needed by it alone", unit="steps",
        flag="--lr-wsd-decay-iters",
    )
    adam_beta1: float = field(0.9, "decay of the first moment", flag="--adam-beta1")
    adam_beta2: float = field(0.95, "decay of the second moment", flag="--adam-beta2")
    adam_eps: float = field(1e-8, "added to the root of the second moment", flag="--adam-eps")
    weight_decay: float = field(0.1, "decoupled weight decay; none on norms and biases", flag="--weight-decay")
    clip_grad: float = field(1.0, "largest global gradient norm; 0 never clips", flag="--clip-grad")
    freeze: tuple[str, ...] = field(
        (), "parameters that don't train: patterns on paths, such as encoder/** or decoder/layers/mlp/*",
        flag="--freeze-ViT and others",
    )
    lr_scale: tuple[tuple[str, float], ...] = field(
        (), "(pattern, factor) pairs: the first match scales a parameter's learning rate", flag="--lr-mult"
    )


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where rows come from.  A row is seq_length tokens of packed documents, with the patches of their images."""

    source: str = field(
        "synthetic", "digits composes images of real handwritten digits; synthetic has the right shapes and random"
        " content", choices=("synthetic", "digits"),
    )
    path: str | None = field(None, "the user's data set", flag="--data-path", planned="user data sets")
    max_patches_per_row: int | None = field(
        None, "image patches in a row, padding included; needed with an encoder", unit="patches"
    )
    digits_max: int = field(6, "most digits in an image (source digits)", unit="digits")
    eval_samples: int = field(256, "held-out samples in an evaluation (source digits)", unit="samples")
    prefetch: int = field(4, "batches prepared ahead of the step", unit="batches")
    num_threads: int = field(2, "threads that prepare rows", unit="threads", flag="--num-workers")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The run: its length, its batch, and where it runs."""

    steps: int = field(100, "optimizer steps", unit="steps", flag="--train-iters")
    global_batch_size: int = field(8, "rows in an optimizer step", unit="rows", flag="--global-batch-size")
    micro_batch_size: int = field(
        1, "rows that a data parallel rank computes at once", unit="rows", flag="--micro-batch-size"
    )
    seq_length: int = field(128, "tokens in a row", unit="tokens", flag="--seq-length")
    seed: int = field(0, "seed of the weights and the data, below 2^31", flag="--seed")
    log_every_steps: int = field(1, "steps between two lines of progress", unit="steps", flag="--log-interval")
    eval_every_steps: int = field(
        0, "steps between two evaluations; 0 evaluates at the end alone, if the data have an evaluation set",
        unit="steps", flag="--eval-interval",
    )
    compute_dtype: str = field(
        "auto", "dtype of the forward and backward pass; auto is bfloat16 on GPU, float32 on CPU",
        choices=("auto", "float32", "bfloat16"), flag="--bf16",
    )
    attention_backend: str = field(
        "auto", "xla is the reference and runs anywhere; cudnn needs a GPU; auto chooses by platform",
        choices=("auto", "xla", "cudnn"), flag="--attention-backend",
    )
    max_skipped_steps: int = field(
        0, "updates with a loss or gradient that is not finite that may be skipped before the run stops",
        unit="steps",
    )
    simulated_devices: int | None = field(
        None, "on a machine without a GPU, the number of CPU devices to simulate in each process", unit="devices"
    )


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints under the run directory; the same command resumes from the newest that is whole."""

    save_every_steps: int = field(
        0, "steps between two checkpoints; 0 saves at the end alone", unit="steps", flag="--save-interval"
    )
    keep: int = field(2, "newest checkpoints kept", unit="checkpoints", flag="--keep-latest")
    init_from_hf: str | None = field(
        None, "a Hugging Face folder to start from", flag="--pretrained-checkpoint",
        planned="Hugging Face checkpoints",
    )
    export_hf_every_steps: int = field(
        0, "steps between two Hugging Face exports", unit="steps", planned="Hugging Face checkpoints"
    )


@dataclasses.dataclass(frozen=True)
class LoggingConfig:
    """What is shown and kept besides metrics.jsonl and config.yml."""

    tensorboard: bool = field(True, "write scalars under tensorboard/", flag="--tensorboard-dir")
    pictures: bool = field(True, "draw loss, throughput and data wait under pictures/ at the end")


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole run."""

    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    memory: MemoryConfig = MemoryConfig()
    loss: LossConfig = LossConfig()
    moe: MoeConfig = MoeConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
