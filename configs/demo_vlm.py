"""Reads handwritten digits.  8 simulated devices: encoder TP 1, decoder TP 2, DP 4.

    python -m jaxforge.train --config=configs/demo_vlm.py
"""

from ml_collections import ConfigDict

from jaxforge.config import default_config, model_config


def get_config() -> ConfigDict:
    config = default_config()
    config.model = model_config("demo_vlm_tiny")
    config.parallel.tensor_model_parallel_size = 2
    config.model.encoder.tensor_model_parallel_size = 1
    config.data.source = "digits"
    config.data.max_patches_per_row = 256
    config.train.simulated_devices = 8
    config.train.seq_length = 128
    config.train.global_batch_size = 32
    config.train.micro_batch_size = 8
    config.train.steps = 600
    config.train.log_every_steps = 20
    config.train.eval_every_steps = 100
    config.optimizer.learning_rate = 2e-3
    config.optimizer.lr_warmup_iters = 50
    config.optimizer.weight_decay = 0.05
    config.checkpoint.save_every_steps = 200
    return config
