"""Pretrains Qwen2.5-VL 7B on 8 x H100: decoder TP 4 with sequence parallel and PP 2, full hetero DP of the encoder.

    python -m jaxforge.train --config=configs/qwen2_5_vl_7b_pretrain.py
    python -m jaxforge.plan --config=configs/qwen2_5_vl_7b_pretrain.py --topology=h100:1x8

Rows of 4096 tokens with up to 8192 patches, synthetic.  Not yet run on GPUs; compiled for 8 x H100 (jax 0.12.0.1): 24.3
of 79.1 GiB on each GPU (14.5 parameters and optimizer, 9.8 temporary); a step of 65,536 tokens is 3.5e15 model FLOPs,
0.44 s at peak.  Compiling takes 40 s of CPU time.
"""

from ml_collections import ConfigDict

from jaxforge.config import default_config, model_config


def get_config() -> ConfigDict:
    config = default_config()
    config.model = model_config("qwen2_5_vl_7b")
    config.parallel.tensor_model_parallel_size = 4
    config.parallel.sequence_parallel = True
    config.parallel.pipeline_model_parallel_size = 2
    config.parallel.enable_full_hetero_dp = True
    config.parallel.data_parallel_sharding_strategy = "optim"
    config.loss.cross_entropy_loss_fusion = True
    config.memory.recompute_granularity = "full"
    config.memory.recompute_method = "uniform"
    config.memory.recompute_num_layers = 1

    encoder = config.model.encoder
    encoder.tensor_model_parallel_size = 1
    encoder.recompute_granularity = "full"
    encoder.recompute_method = "uniform"
    encoder.recompute_num_layers = 1
    encoder.image_size = (896, 896)  # 4096 patches, 1024 visual tokens

    config.data.max_patches_per_row = 8192  # two of the largest images: half of a row's tokens
    config.train.seq_length = 4096
    config.train.micro_batch_size = 1
    config.train.global_batch_size = 16
    config.train.steps = 10_000
    config.optimizer.learning_rate = 1e-5
    config.optimizer.min_lr = 1e-6
    config.optimizer.lr_warmup_iters = 300
    config.optimizer.weight_decay = 0.1
    config.checkpoint.save_every_steps = 500
    return config
