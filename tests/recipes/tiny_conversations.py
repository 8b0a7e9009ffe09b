"""A vision-language model that reads a folder's train.jsonl: 8 simulated devices, encoder TP 1, decoder TP 2, DP 4.

The argument is the folder, with a tokenizer in tokenizer/.
"""

from jaxforge.config import default_config, encoder_defaults


def get_config(folder):
    config = default_config()
    config.model.decoder.update(
        num_layers=1, hidden_size=32, ffn_hidden_size=64, num_attention_heads=4, num_query_groups=2, kv_channels=8,
        vocab_size=300, mrope_section=(1, 1, 2),
    )  # fmt: skip
    config.model.encoder = encoder_defaults("qwen2_5_vit")
    config.model.encoder.update(
        num_layers=1, hidden_size=32, ffn_hidden_size=48, num_attention_heads=4, kv_channels=8, patch_size=8,
        image_size=(128, 256), window_size=32, fullatt_block_indexes=(0,), tensor_model_parallel_size=1,
    )  # fmt: skip
    config.data.update(
        path=(f"{folder}/train.jsonl",), tokenizer=f"{folder}/tokenizer", cache_dir=f"{folder}/cache",
        max_patches_per_row=128, min_pixels=256, max_pixels=1024, num_threads=4,
    )  # fmt: skip
    config.parallel.tensor_model_parallel_size = 2
    config.train.update(
        simulated_devices=8, steps=16, global_batch_size=64, micro_batch_size=8, seq_length=256, log_every_steps=4
    )
    config.optimizer.update(learning_rate=1e-3, lr_warmup_iters=2)
    config.logging.update(tensorboard=False, pictures=False)
    return config
