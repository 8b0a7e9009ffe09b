"""Time of a step of the four encoder modes, on the same model and data.

    python benchmarks/encoder_modes.py

Decoder TP 4 in two pipeline stages, on 8 simulated CPU devices that share the machine's cores: a mode in which several
devices encode the same images does that work several times, and takes the time of it.  The encoder is about as large as
the decoder, rows have 128 tokens and 256 patches.
"""

from steps import seconds_per_step

from jaxforge.config.schema import (
    Config,
    DataConfig,
    DecoderConfig,
    EncoderConfig,
    ModelConfig,
    ParallelConfig,
    ProjectorConfig,
    TrainConfig,
)

MODES = {
    "hetero TP, encoder 4 of 4": (4, {}),
    "hetero TP, encoder 1 of 4": (1, {}),
    "encoder hetero DP": (1, {"enable_encoder_hetero_dp": True}),
    "full hetero DP": (1, {"enable_full_hetero_dp": True}),
}


def main() -> None:
    base = None
    for name, (encoder_tensor, mode) in MODES.items():
        decoder = DecoderConfig(
            num_layers=4, hidden_size=128, ffn_hidden_size=384, num_attention_heads=4, num_query_groups=4,
            kv_channels=32, vocab_size=512, mrope_section=(4, 6, 6),
        )  # fmt: skip
        encoder = EncoderConfig(
            num_layers=4, hidden_size=128, ffn_hidden_size=384, num_attention_heads=4, kv_channels=32,
            fullatt_block_indexes=(1, 3), image_size=(224, 224), tensor_model_parallel_size=encoder_tensor,
        )  # fmt: skip
        config = Config(
            model=ModelConfig(decoder=decoder, encoder=encoder, projector=ProjectorConfig()),
            parallel=ParallelConfig(tensor_model_parallel_size=4, pipeline_model_parallel_size=2, **mode),
            data=DataConfig(max_patches_per_row=256),
            train=TrainConfig(global_batch_size=16, micro_batch_size=1, seq_length=128),
        )
        seconds = seconds_per_step(config, 8)
        base = base or seconds
        print(f"{name}: {seconds:.3f} s, {seconds / base:.2f} x hetero TP 4 of 4", flush=True)


if __name__ == "__main__":
    main()
