"""Numbers that follow from the config, so that each formula is written once.

All of them assume a config that `validate` accepts.
"""

import math

from jaxforge.config.schema import Config, DecoderConfig, EncoderConfig, ModelConfig

BALANCED = "balanced"


def padded_vocab_size(decoder: DecoderConfig) -> int:
    """Rows of the embedding and of the output head: the vocabulary padded to a multiple that no layout changes."""
    multiple = decoder.make_vocab_size_divisible_by
    return -(-decoder.vocab_size // multiple) * multiple


def encoder_tensor_parallel_size(config: Config) -> int:
    """Devices that share each encoder layer and the projector.

    Where unset, 1 in the hetero DP modes, whose devices encode different images, and else the decoder's.
    """
    encoder = config.model.encoder
    if encoder is None or encoder.tensor_model_parallel_size is None:
        return 1 if encoder_devices(config) > 1 else config.parallel.tensor_model_parallel_size
    return encoder.tensor_model_parallel_size


def encoder_group(config: Config) -> tuple[int, int]:
    """The stages and tensor ranks of a model-parallel group whose devices encode different images; (1, 1) for none."""
    parallel = config.parallel
    if parallel.enable_full_hetero_dp:
        return parallel.pipeline_model_parallel_size, parallel.tensor_model_parallel_size
    return 1, parallel.tensor_model_parallel_size if parallel.enable_encoder_hetero_dp else 1


def encoder_devices(config: Config) -> int:
    """Devices among which a data parallel rank divides its images; 1 outside of the hetero DP modes."""
    return math.prod(encoder_group(config))


def data_parallel_size(config: Config, num_devices: int) -> int:
    """What remains of the devices beside model parallelism."""
    return num_devices // (config.parallel.tensor_model_parallel_size * config.parallel.pipeline_model_parallel_size)


def layer_has_experts(decoder: DecoderConfig) -> tuple[bool, ...]:
    """Of each decoder layer, whether its feed-forward is a mixture of experts."""
    if decoder.num_experts is None or decoder.moe_layer_freq is None:
        return (decoder.num_experts is not None,) * decoder.num_layers
    return tuple(bool(has) for has in decoder.moe_layer_freq)


def stacked_layer_has_experts(decoder: DecoderConfig) -> tuple[bool, ...]:
    """The same of each layer in the decoder's stack: its own, then those for multi-token prediction, like the last."""
    own = layer_has_experts(decoder)
    return own + own[-1:] * decoder.mtp_num_layers


def expert_ffn_hidden_size(decoder: DecoderConfig) -> int:
    """Width of one expert."""
    return decoder.moe_ffn_hidden_size or decoder.ffn_hidden_size


def experts_are_over_tensor(config: Config) -> bool:
    """Whether the tensor group shares the experts out, instead of sharing each of them."""
    return config.parallel.expert_tensor_parallel_size == 1 and config.parallel.tensor_model_parallel_size > 1


def expert_axis_size(config: Config) -> int:
    """Data parallel ranks that the experts are shared out over."""
    tensor = config.parallel.tensor_model_parallel_size if experts_are_over_tensor(config) else 1
    return max(config.parallel.expert_model_parallel_size // tensor, 1)


def vocabulary_is_over_stages(config: Config) -> bool:
    """`parallel.vocabulary_parallel_over_pipeline`, with None resolved."""
    parallel = config.parallel
    if parallel.vocabulary_parallel_over_pipeline is not None:
        return parallel.vocabulary_parallel_over_pipeline
    if parallel.pipeline_model_parallel_size == 1 or pipeline_layers_are_uneven(config):
        return False
    shards = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    divides = config.model.decoder.make_vocab_size_divisible_by % shards == 0
    return divides and parallel.pipeline_model_parallel_layout in (None, BALANCED)


def pipeline_layers_are_uneven(config: Config) -> bool:
    """Whether the first or the last stage has a number of layers of its own."""
    parallel = config.parallel
    return (parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers) != (None, None)


def num_microbatches(config: Config, num_devices: int) -> int:
    """Microbatches that each data parallel rank computes in an optimizer step."""
    rows_at_once = config.train.micro_batch_size * data_parallel_size(config, num_devices)
    return config.train.global_batch_size // rows_at_once


def merged_patch_width(encoder: EncoderConfig) -> int:
    """Features of the square of patches that becomes one visual token: the projector's input."""
    return encoder.hidden_size * encoder.spatial_merge_size**2


def projector_ffn_hidden_size(model: ModelConfig) -> int:
    """The projector's inner width; the model has an encoder."""
    assert model.encoder is not None and model.projector is not None
    return model.projector.ffn_hidden_size or merged_patch_width(model.encoder)


def patches_per_full_image(encoder: EncoderConfig) -> int:
    """Patches of an image of `image_size`, each side rounded down to whole visual tokens."""
    token_side = encoder.patch_size * encoder.spatial_merge_size
    height, width = encoder.image_size
    return (height // token_side) * (width // token_side) * encoder.spatial_merge_size**2


def data_source(config: Config) -> str:
    """`data.source`, with auto resolved: files where data.path is set, else synthetic."""
    if config.data.source != "auto":
        return config.data.source
    return "files" if config.data.path else "synthetic"


def lr_decay_iters(config: Config) -> int:
    """The step at which the learning rate reaches `min_lr`."""
    return config.optimizer.lr_decay_iters or config.train.steps
