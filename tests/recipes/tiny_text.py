"""A language model that trains in seconds: 8 simulated devices, TP 2, DP 4."""

from jaxforge.config import default_config


def get_config():
    config = default_config()
    config.model.decoder.update(
        num_layers=2, hidden_size=32, ffn_hidden_size=64, num_attention_heads=4, num_query_groups=2, kv_channels=8
    )
    config.parallel.tensor_model_parallel_size = 2
    config.train.update(
        simulated_devices=8, steps=12, global_batch_size=8, micro_batch_size=1, seq_length=32, log_every_steps=4
    )
    config.optimizer.update(learning_rate=1e-2, lr_warmup_iters=2)
    config.checkpoint.save_every_steps = 5
    config.logging.update(tensorboard=False, pictures=False)
    return config
