"""Pretrains Qwen3-30B-A3B on 2 x 8 H100: experts over the 8 devices of a node, everything else sharded over all 16.

    python -m jaxforge.train --config=configs/qwen3_30b_a3b_pretrain.py
    python -m jaxforge.plan --config=configs/qwen3_30b_a3b_pretrain.py --topology=h100:2x8

Not yet run on GPUs; compiled for 2 x 8 H100 (jax 0.12.0.1): 68.1 of 79.1 GiB on each GPU (21.3 parameters and
optimizer, 46.7 temporary), so JAX must be given more than its default: XLA_PYTHON_CLIENT_MEM_FRACTION=0.97.
"""

from ml_collections import ConfigDict

from jaxforge.config import default_config, model_config


def get_config() -> ConfigDict:
    config = default_config()
    config.model = model_config("qwen3_30b_a3b")
    config.parallel.expert_model_parallel_size = 8
    config.parallel.data_parallel_sharding_strategy = "optim_grads_params"
    config.parallel.overlap_param_gather = True
    config.moe.moe_buffer_factor = 2.0
    config.moe.moe_router_load_balancing_type = "aux_loss"
    config.moe.moe_aux_loss_coeff = 1e-3
    config.memory.recompute_granularity = "selective"
    config.memory.recompute_modules = ("moe_act", "layernorm")
    config.loss.cross_entropy_loss_fusion = True
    config.train.seq_length = 4096
    config.train.micro_batch_size = 1
    config.train.global_batch_size = 256
    config.train.steps = 10_000
    config.optimizer.learning_rate = 3e-4
    config.optimizer.min_lr = 3e-5
    config.optimizer.lr_warmup_iters = 500
    config.optimizer.weight_decay = 0.1
    config.checkpoint.save_every_steps = 500
    return config
