"""Every config field: its type, default, unit, meaning, and the Megatron or LoongForge flag that it answers to.

The frozen dataclasses below are the typed form that the rest of the code reads.  A recipe fills an
`ml_collections.ConfigDict` of the same shape (`default_config`), which `load.py` checks and turns into a `Config`.
A field with `planned` names a feature that isn't built yet: it accepts its default alone and is otherwise refused.
"""

import dataclasses

from jaxforge.config.fields import field
from jaxforge.config.model_schema import DecoderConfig, EncoderConfig, ModelConfig, ProjectorConfig

__all__ = [
    "AdapterConfig", "CheckpointConfig", "Config", "DataConfig", "DecoderConfig", "EncoderConfig", "LoggingConfig",
    "LoraConfig", "LossConfig", "MemoryConfig", "ModelConfig", "MoeConfig", "OptimizerConfig", "ParallelConfig",
    "ProjectorConfig", "TrainConfig",
]  # fmt: skip


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
        1, "ranks that the decoder's layers are divided over", unit="ranks", flag="--pipeline-model-parallel-size"
    )
    num_layers_per_virtual_pipeline_stage: int | None = field(
        None, "layers of a virtual stage (interleaved 1F1B); None gives each rank one stage", unit="layers",
        flag="--num-layers-per-virtual-pipeline-stage",
    )
    virtual_pipeline_model_parallel_size: int | None = field(
        None, "virtual stages in each rank, with the layout balanced", unit="stages",
        flag="--num-virtual-stages-per-pipeline-rank",
    )
    decoder_first_pipeline_num_layers: int | None = field(
        None, "layers of the first stage; the stages without a number of their own share the rest", unit="layers",
        flag="--decoder-first-pipeline-num-layers",
    )
    decoder_last_pipeline_num_layers: int | None = field(
        None, "layers of the last stage", unit="layers", flag="--decoder-last-pipeline-num-layers"
    )
    pipeline_model_parallel_layout: str | None = field(
        None,
        "what each stage holds, as Ett|tt|ttL (E embedding, t layer, m layer for multi-token prediction, L loss, | ends"
        " a stage, *n repeats), or balanced: by FLOPs, head and loss counted", flag="--pipeline-model-parallel-layout",
    )
    vocabulary_parallel_over_pipeline: bool | None = field(
        None, "shard embedding and head over the stages too, which then share their work, so that no stage carries"
        " them alone; None does so where the vocabulary divides and nothing says what the outer stages hold (a layout"
        " string, or decoder_first_ and decoder_last_pipeline_num_layers)"
    )
    context_parallel_size: int = field(
        1, "devices that share each sequence", flag="--context-parallel-size", planned="context parallelism"
    )
    cp_comm_type: str | None = field(
        None, "how context parallelism moves keys and values", flag="--cp-comm-type", planned="context parallelism"
    )
    expert_model_parallel_size: int = field(
        1, "devices that the experts are shared out over, data parallel ranks otherwise", unit="devices",
        flag="--expert-model-parallel-size",
    )
    expert_tensor_parallel_size: int | None = field(
        None, "devices that share each expert: tensor_model_parallel_size, or 1, which shares the experts out over the"
        " tensor group too; None is the former", unit="devices", flag="--expert-tensor-parallel-size",
    )
    data_parallel_sharding_strategy: str = field(
        "no_shard", "what is sharded over data parallel ranks: optim the fp32 masters and the optimizer's state,"
        " optim_grads sums of gradients too, optim_grads_params compute weights too",
        choices=("no_shard", "optim", "optim_grads", "optim_grads_params"), flag="--data-parallel-sharding-strategy",
    )
    enable_encoder_hetero_dp: bool = field(
        False, "the decoder's tensor group encodes different microbatches", flag="--enable-encoder-hetero-dp",
    )
    enable_full_hetero_dp: bool = field(
        False, "the whole model-parallel group encodes different microbatches", flag="--enable-full-hetero-dp",
    )
    overlap_grad_reduce: bool = field(
        False, "reduce gradients while others are computed: with optim in the backward pass of the last microbatch,"
        " with optim_grads and optim_grads_params each layer's under that of the next one (on GPU)",
        flag="--overlap-grad-reduce",
    )
    overlap_param_gather: bool = field(
        False, "gather the weights of a layer while the one before it is computed (optim_grads_params, on GPU)",
        flag="--overlap-param-gather",
    )
    tp_comm_overlap: bool = field(
        False, "cut the products beside sequence-parallel gathers and scatters into pieces that are computed while"
        " others move (on GPU)", flag="--tp-comm-overlap",
    )
    overlap_moe_expert_parallel_comm: bool = field(
        False, "send one half of the tokens to their experts while the other half is computed",
        flag="--overlap-moe-expert-parallel-comm",
    )


@dataclasses.dataclass(frozen=True)
class MemoryConfig:
    """What the decoder recomputes in its backward pass, and what leaves device memory (docs/memory.md)."""

    recompute_granularity: str | None = field(
        None, "full recomputes whole layers of the decoder, selective modules of each; None keeps activations",
        choices=(None, "full", "selective"), flag="--recompute-granularity",
    )
    recompute_method: str | None = field(
        None, "uniform groups layers; block recomputes the first ones", choices=(None, "uniform", "block"),
        flag="--recompute-method",
    )
    recompute_num_layers: int | None = field(
        None,
        "layers in a group (uniform) or layers recomputed (block); with a pipeline, of each stage, whose last group may"
        " be smaller", unit="layers", flag="--recompute-num-layers",
    )
    recompute_modules: tuple[str, ...] = field(
        (), "modules recomputed by the selective granularity, of core_attn, mlp, layernorm, and with latent attention"
        " mla_up_proj; none named is core_attn",
        flag="--recompute-modules",
    )
    activations: tuple[tuple[str, str], ...] = field(
        (), "(name, action) pairs: single activations to save, recompute or offload, such as (mlp_act, recompute)"
    )
    fine_grained_activation_offloading: bool = field(
        False, "keep the activations that offload_modules and offload_tensors name in host memory between forward and"
        " backward", flag="--fine-grained-activation-offloading",
    )
    offload_modules: tuple[str, ...] = field(
        (), "modules whose input moves to host memory, of attn_norm, core_attn, attn_proj and mlp_norm",
        flag="--offload-modules",
    )
    offload_tensors: tuple[str, ...] = field(
        (), "tensors that move, of pre_mlp_layernorm_output", flag="--offload-tensors"
    )
    min_offloaded_tensor_size: int | None = field(
        None, "smallest activation that moves, what one device holds of it in one layer; None moves all", unit="bytes",
        flag="--min-offloaded-tensor-size",
    )
    optimizer_cpu_offload: bool = field(
        False, "keep fp32 masters and moments in host memory, and stream them through the update",
        flag="--optimizer-cpu-offload",
    )
    optimizer_offload_fraction: float | None = field(
        None, "share of their bytes on a device that goes to host memory, the largest tensors first, above 0; None is"
        " all", flag="--optimizer-offload-fraction",
    )


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """The training loss: cross-entropy summed over target tokens, divided once by their number."""

    z_loss_coefficient: float = field(0.0, "weight of the squared log-sum-exp (PaLM, arXiv:2204.02311, 5)")
    mtp_loss_scaling_factor: float = field(
        0.1, "weight of the mean, over the layers for multi-token prediction, of each one's mean cross-entropy",
        flag="--mtp-loss-scaling-factor",
    )
    cross_entropy_loss_fusion: bool = field(
        False, "fuse the output projection with the loss, so that logits of all tokens never exist",
        flag="--cross-entropy-loss-fusion",
    )
    cross_entropy_fusion_impl: str | None = field(
        None, "which fusion; None is linear: projection, loss and their gradients a chunk of tokens at a time",
        choices=(None, "linear"), flag="--cross-entropy-fusion-impl",
    )
    lce_fwd_vocab_split_size: int | None = field(
        None, "rows of the vocabulary whose logits are formed at a time; None is the environment's"
        " LCE_GENERIC_FWD_VOCAB_SPLIT_SIZE, or 3072", unit="rows", flag="LCE_GENERIC_FWD_VOCAB_SPLIT_SIZE",
    )
    lce_bwd_vocab_split_size: int | None = field(
        None, "rows whose gradients are; None is the environment's LCE_GENERIC_BWD_VOCAB_SPLIT_SIZE, or 3072",
        unit="rows", flag="LCE_GENERIC_BWD_VOCAB_SPLIT_SIZE",
    )


_DEEPEP = (
    "DeepEP's transport, or TransformerEngine's (the one has no interface for JAX, the other none inside of mesh axes"
    " that are manual; moe_token_dispatcher_type=flex sends a token once to each node by XLA's exchange)"
)


@dataclasses.dataclass(frozen=True)
class MoeConfig:
    """How tokens reach their experts, and how the experts' load is kept even; the experts are model.decoder's."""

    moe_router_load_balancing_type: str = field(
        "none", "what keeps the load even beside the selection bias: aux_loss, by the load of all tokens of the step"
        " before, or seq_aux_loss, by that of the row's own tokens", choices=("none", "aux_loss", "seq_aux_loss"),
        flag="--moe-router-load-balancing-type",
    )
    moe_aux_loss_coeff: float = field(
        0.0, "weight of the load-balancing loss of each layer", flag="--moe-aux-loss-coeff"
    )
    moe_z_loss_coeff: float = field(
        0.0, "weight of the mean squared log-sum-exp of the router's logits (ST-MoE, arXiv:2202.08906)",
        flag="--moe-z-loss-coeff",
    )
    moe_router_bias_update_rate: float = field(
        1e-3, "what a step adds to, or takes from, the selection bias of an expert with less, or more, than the mean"
        " load", flag="--moe-router-bias-update-rate",
    )
    moe_token_dispatcher_type: str | None = field(
        None, "how tokens reach their experts on other devices: allgather sends all tokens to all of them, alltoall the"
        " chosen ones, flex one copy to each node, which spreads it; None is alltoall where experts are shared out",
        choices=(None, "allgather", "alltoall", "flex"), flag="--moe-token-dispatcher-type",
    )
    moe_buffer_factor: float | None = field(
        None, "rows that a device has room for, as a multiple of what it sends; what overflows is dropped, and counted"
        " in moe/dropped_tokens; None has room for any routing", flag="--moe-expert-rank-capacity-factor",
    )
    moe_expert_capacity_factor: float | None = field(
        None, "rows that an expert takes from each device, as a multiple of an even share; None drops none",
        flag="--moe-expert-capacity-factor",
    )
    moe_token_drop_policy: str = field(
        "probs", "which rows beyond the capacity are dropped: those of the smallest weight, or the last ones",
        choices=("probs", "position"), flag="--moe-token-drop-policy",
    )
    moe_enable_deepep: bool = field(
        False, "exchange tokens by DeepEP's transport", flag="--moe-enable-deepep", planned=_DEEPEP
    )
    moe_deepep_num_sms: int | None = field(
        None, "streaming multiprocessors that it may use", flag="--moe-deepep-num-sms", planned=_DEEPEP
    )
    moe_permute_fusion: bool = field(
        True, "bring tokens into the order of their experts, and back, by kernels instead of XLA's gathers (on GPU)",
        flag="--moe-permute-fusion",
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
    exp_avg_dtype: str = field(
        "float32", "dtype that the first moment is stored in; updates are computed in float32",
        choices=("float32", "bfloat16"), flag="--exp-avg-dtype",
    )
    exp_avg_sq_dtype: str = field(
        "float32", "dtype that the second moment is stored in", choices=("float32", "bfloat16"),
        flag="--exp-avg-sq-dtype",
    )
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
class AdapterConfig:
    """LoRA on one component: W + scale B A, of which A and B train (Hu et al. 2021, arXiv:2106.09685)."""

    rank: int = field(0, "inner width of the adapters; 0 has none", unit="features", flag="--lora-rank")
    alpha: float = field(16.0, "scale is alpha / rank", flag="--lora-alpha")
    use_rslora: bool = field(
        False, "scale is alpha / sqrt(rank), which suits large ranks (arXiv:2312.03732)", flag="--use-rslora"
    )
    targets: tuple[str, ...] = field(
        ("**/attention/*", "**/mlp/*"),
        "projections that get an adapter: patterns on paths inside the component; norms, biases and tables have none",
        flag="--target-modules",
    )


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters.  Where any component has some, all other parameters are frozen."""

    decoder: AdapterConfig = AdapterConfig()
    encoder: AdapterConfig = AdapterConfig()
    projector: AdapterConfig = AdapterConfig()
    train_also: tuple[str, ...] = field(
        (), "parameters that train as a whole beside the adapters: patterns on paths, such as projector/**",
        flag="--modules-to-save",
    )


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where rows come from.  A row is seq_length tokens of packed documents, with the patches of their images."""

    source: str = field(
        "auto",
        "files reads data.path; digits composes images of real handwritten digits; synthetic has the right shapes and"
        " random content; auto is files where data.path is set, else synthetic",
        choices=("auto", "files", "synthetic", "digits"),
    )
    path: tuple[str, ...] = field(
        (), "files (.jsonl, .json, .parquet, .tar) and folders of them", flag="--data-path"
    )
    weights: tuple[float, ...] = field(
        (), "share of each data.path in what is read; none reads every sample once an epoch", flag="--data-path"
    )
    eval_path: tuple[str, ...] = field((), "held-out files, whose loss an evaluation shows", flag="--valid-data-path")
    media_root: str | None = field(
        None, "folder that image and video paths start from and may not leave; None is the data file's own",
        flag="--media-dir",
    )
    tokenizer: str | None = field(
        None, "folder of a Hugging Face tokenizer; None is that of checkpoint.init_from_hf", flag="--tokenizer-model"
    )
    chat_template: str = field(
        "auto",
        "how a conversation becomes text; checkpoint is the jinja template of the tokenizer's folder; auto knows"
        " ChatML and Llama-3.1 by their special tokens and else uses checkpoint",
        choices=("auto", "chatml", "llama3", "checkpoint"), flag="--chat-template",
    )
    system: str | None = field(
        None, "system message of conversations that have none; None leaves it to the template", flag="--system"
    )
    strict: bool = field(
        False,
        "stop before training at the first broken sample, with file and line, instead of skipping and counting it;"
        " every image is decoded once to find the corrupt ones",
    )
    max_skipped_fraction: float = field(
        0.05, "share of broken samples above which the run stops; one that is too long isn't broken"
    )
    overlong: str = field(
        "drop",
        "a conversation longer than a row is dropped and counted, or its text after the last image is cut; a plain"
        " text is always split over rows instead", choices=("drop", "truncate"), flag="--truncation-strategy",
    )
    min_pixels: int | None = field(
        None, "smallest area of an image; None is the checkpoint's, or the model family's", unit="pixels",
        flag="--min-pixels",
    )
    max_pixels: int | None = field(
        None, "largest area of an image; None is the checkpoint's, or model.encoder.image_size", unit="pixels",
        flag="--max-pixels",
    )
    video_fps: float = field(2.0, "frames taken from a second of video", unit="frames/s", flag="--fps")
    video_max_frames: int = field(64, "most frames taken from a video", unit="frames", flag="--fps-max-frames")
    packing_window: int = field(
        20_000, "documents among which the packing seeks those that fill a row", unit="documents"
    )
    cache_dir: str | None = field(
        None, "folder of the lengths and packing plans; None is ~/.cache/jaxforge", flag="--data-cache-path"
    )
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
        "auto", "xla is the reference, which runs anywhere and holds all scores of a row; flash and cudnn need a GPU,"
        " and cudnn's mask holds a number for each pair of tokens; auto is flash on GPU and xla on CPU",
        choices=("auto", "xla", "cudnn", "flash"), flag="--attention-backend",
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
        None, "a Hugging Face folder (config.json, safetensors) whose weights training starts from",
        flag="--pretrained-checkpoint",
    )
    pretrained_checkpoint: str | None = field(
        None, "a folder of jaxforge.convert, or another run's directory, whose weights training starts from",
        flag="--pretrained-checkpoint",
    )
    init_allow_missing: tuple[str, ...] = field(
        (), "tensors that the Hugging Face folder may lack or hold in another shape: patterns on their names there;"
        " they start at random",
    )
    init_allow_unexpected: tuple[str, ...] = field(
        (), "tensors of the Hugging Face folder that the model has no place for and may be left out: patterns",
    )
    export_hf_every_steps: int = field(
        0, "steps between two exports to hf/STEP in the run directory, and one at the end; 0 exports none",
        unit="steps",
    )
    export_hf_dtype: str = field(
        "bfloat16", "dtype of exported weights", choices=("bfloat16", "float16", "float32")
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
    lora: LoraConfig = LoraConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
