"""Time of a step at PP 4 against PP 1 for the same work: what the pipeline engine costs.

    python benchmarks/pipeline_overhead.py

On simulated CPU devices all arithmetic shares the machine's cores, so a pipeline can't be faster: what it takes longer
is overhead (a rank that has nothing to do computes nothing).  16 microbatches of a row of 256 tokens, 8 layers of width
256.
"""

from steps import seconds_per_step

from jaxforge.config.schema import (
    Config,
    DecoderConfig,
    MemoryConfig,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
)

LAYOUTS = {
    "PP 1": ParallelConfig(),
    "PP 4": ParallelConfig(pipeline_model_parallel_size=4),
    "PP 4 x 2 virtual stages": ParallelConfig(
        pipeline_model_parallel_size=4, num_layers_per_virtual_pipeline_stage=1
    ),
}
RECOMPUTE = {
    "activations kept": MemoryConfig(),
    "full recompute": MemoryConfig(
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
    ),
}


def main() -> None:
    decoder = DecoderConfig(
        num_layers=8, hidden_size=256, ffn_hidden_size=704, num_attention_heads=4, num_query_groups=4, kv_channels=64,
        vocab_size=1024,
    )  # fmt: skip
    train = TrainConfig(global_batch_size=16, micro_batch_size=1, seq_length=256)
    for memory_name, memory in RECOMPUTE.items():
        base = None
        for name, parallel in LAYOUTS.items():
            config = Config(model=ModelConfig(decoder=decoder), parallel=parallel, memory=memory, train=train)
            seconds = seconds_per_step(config, parallel.pipeline_model_parallel_size)
            base = base or seconds
            print(f"{memory_name}, {name}: {seconds:.3f} s, {seconds / base:.2f} x PP 1", flush=True)


if __name__ == "__main__":
    main()
