"""Pretrains DeepSeek-V3 on 128 x 8 H100: PP 16 with two chunks, TP 8, experts over 64 devices of 8 nodes.

    python -m jaxforge.train --config=configs/deepseek_v3_pretrain.py
    python -m jaxforge.plan --config=configs/deepseek_v3_pretrain.py --topology=h100:128x8

Not yet run on GPUs; compiled for 128 x 8 H100 (jax 0.12.0.1): 37.6 of 79.1 GiB on each GPU (8.4 parameters and
optimizer, 29.2 temporary), bubble 10.5 %.  With full recompute 17.2.  Compiling takes two to three minutes on two
cores.
"""

from ml_collections import ConfigDict

from jaxforge.config import default_config, model_config


def get_config() -> ConfigDict:
    config = default_config()
    config.model = model_config("deepseek_v3")
    config.parallel.tensor_model_parallel_size = 8
    config.parallel.sequence_parallel = True
    config.parallel.pipeline_model_parallel_size = 16
    # three dense layers first; multi-token prediction on a stage of its own; the loss is shared by all stages
    config.parallel.pipeline_model_parallel_layout = "Et*3|(tt|)*29,m|L"
    config.parallel.vocabulary_parallel_over_pipeline = True
    config.parallel.expert_model_parallel_size = 64
    config.parallel.expert_tensor_parallel_size = 1
    config.parallel.data_parallel_sharding_strategy = "optim"
    config.moe.moe_token_dispatcher_type = "flex"
    config.moe.moe_buffer_factor = 2.0
    config.moe.moe_router_load_balancing_type = "seq_aux_loss"
    config.moe.moe_aux_loss_coeff = 1e-4
    # what is large and cheap to find again; experts' and attention's products are kept
    config.memory.recompute_granularity = "selective"
    config.memory.recompute_modules = ("layernorm", "mla_up_proj", "moe_act", "mlp", "shared_experts")
    config.loss.cross_entropy_loss_fusion = True
    config.train.seq_length = 4096
    config.train.micro_batch_size = 1
    config.train.global_batch_size = 512
    config.train.steps = 100_000
    config.optimizer.learning_rate = 2.2e-4
    config.optimizer.min_lr = 2.2e-5
    config.optimizer.lr_warmup_iters = 2000
    config.optimizer.weight_decay = 0.1
    config.checkpoint.save_every_steps = 500
    return config
