"""The demo's task for a model that is too small to learn it: encoder TP 1, decoder TP 2, DP 4."""

from jaxforge.config import default_config, encoder_defaults


def get_config():
    config = default_config()
    config.model.decoder.update(
        num_layers=1, hidden_size=32, ffn_hidden_size=32, num_attention_heads=2, num_query_groups=2, kv_channels=8,
        vocab_size=261, mrope_section=(2, 1, 1),
    )  # fmt: skip
    config.model.encoder = encoder_defaults("qwen2_5_vit")
    config.model.encoder.update(
        num_layers=1, hidden_size=16, ffn_hidden_size=16, num_attention_heads=2, kv_channels=8, in_channels=1,
        patch_size=8, temporal_patch_size=1, image_size=(256, 256), window_size=32, fullatt_block_indexes=(0,),
        tensor_model_parallel_size=1,
    )  # fmt: skip
    config.parallel.tensor_model_parallel_size = 2
    config.data.update(source="digits", max_patches_per_row=128, eval_samples=16)
    config.train.update(simulated_devices=8, steps=4, global_batch_size=8, micro_batch_size=1, seq_length=96)
    config.optimizer.learning_rate = 1e-3
    config.logging.tensorboard = False
    return config
