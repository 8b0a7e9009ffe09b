"""Layers for multi-token prediction as DeepSeek-V3 has them: behind the decoder's, and numbered on from these.

What such a layer has as any other lies in the decoder's stacks, and is in the map of those.
"""

from jaxforge.checkpoint.hf.tensors import Linear, Tensor, Vector, Vocabulary
from jaxforge.config.model_schema import DecoderConfig, ModelConfig


def tensors(model: ModelConfig, prefixes: dict[str, str]) -> list[Tensor]:
    """What these layers have besides; each also has a copy of the model's embedding and one of its head."""
    decoder, ours = model.decoder, "decoder/mtp/"
    numbers, rows = _numbers(decoder), decoder.vocab_size
    if not numbers:
        return []
    layer = f"{prefixes['decoder']}layers.{{}}."
    head = "head_VD" if decoder.untie_embeddings_and_output_weights else "embedding_VD"
    copies = {"embed_tokens": "embedding_VD", "shared_head.head": head}
    return [
        Vector(f"{layer}enorm.weight", f"{ours}embedding_norm/scale", layers=numbers),
        Vector(f"{layer}hnorm.weight", f"{ours}states_norm/scale", layers=numbers),
        # its inputs are the embedding, then the states
        Linear(f"{layer}eh_proj.weight", f"{ours}projection_2DE", num_inputs=2, layers=numbers),
        Vector(f"{layer}shared_head.norm.weight", f"{ours}final_norm/scale", layers=numbers),
        *(
            Vocabulary(f"{layer.format(number)}{name}.weight", f"decoder/{table}", num_rows=rows, is_copy=True)
            for name, table in copies.items()
            for number in numbers
        ),
    ]


def patterns(decoder: DecoderConfig) -> tuple[str, ...]:
    """One on the names of all tensors of each of these layers."""
    return tuple(f"*.layers.{number}.*" for number in _numbers(decoder))


def _numbers(decoder: DecoderConfig) -> tuple[int, ...]:
    return tuple(range(decoder.num_layers, decoder.num_layers + decoder.mtp_num_layers))
