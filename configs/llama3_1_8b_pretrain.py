"""Pretrains Llama 3.1 8B on 8 x H100: TP 4 with sequence parallel, DP 2.

    python -m jaxforge.train --config=configs/llama3_1_8b_pretrain.py
    python -m jaxforge.plan --config=configs/llama3_1_8b_pretrain.py --topology=h100:1x8

Rows of 8192 tokens, synthetic.  Not yet run on GPUs; compiled for 8 x H100 (jax 0.12.0.1): 26.8 of 79.1 GiB on each GPU
(11.2 parameters and optimizer, 15.6 temporary); a step of 131,072 tokens is 6.8e15 model FLOPs, 0.85 s at peak.
Compiling takes 15 s of CPU time.
"""

from ml_collections import ConfigDict

from jaxforge.config import default_config, model_config


def get_config() -> ConfigDict:
    config = default_config()
    config.model = model_config("llama3_1_8b")
    config.parallel.tensor_model_parallel_size = 4
    config.parallel.sequence_parallel = True
    config.parallel.data_parallel_sharding_strategy = "optim"
    config.loss.cross_entropy_loss_fusion = True
    config.memory.recompute_granularity = "full"
    config.memory.recompute_method = "uniform"
    config.memory.recompute_num_layers = 1
    config.train.seq_length = 8192
    config.train.micro_batch_size = 1
    config.train.global_batch_size = 16
    config.train.steps = 10_000
    config.optimizer.learning_rate = 3e-4
    config.optimizer.min_lr = 3e-5
    config.optimizer.lr_warmup_iters = 500
    config.optimizer.weight_decay = 0.1
    config.checkpoint.save_every_steps = 500
    return config
