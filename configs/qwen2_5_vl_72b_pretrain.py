"""Pretrains Qwen2.5-VL 72B on 32 x H100: decoder TP 8 with sequence parallel and PP 4, full hetero DP of the encoder.

    python -m jaxforge.train --config=configs/qwen2_5_vl_72b_pretrain.py
    python -m jaxforge.plan --config=configs/qwen2_5_vl_72b_pretrain.py --topology=h100:4x8

Rows of 8192 tokens with up to 16384 patches, synthetic.  Not yet run on GPUs; compiled for 32 x H100 (jax 0.12.0.1):
45.7 of 79.1 GiB on each GPU (27.4 parameters and optimizer, 18.3 temporary); a step of 262,144 tokens is 1.2e17 model
FLOPs, 3.9 s at peak.  Compiling takes 49 s of CPU time.
"""

from ml_collections import ConfigDict

from jaxforge.config import default_config, model_config


def get_config() -> ConfigDict:
    config = default_config()
    config.model = model_config("qwen2_5_vl_72b")
    config.parallel.tensor_model_parallel_size = 8
    config.parallel.sequence_parallel = True
    config.parallel.pipeline_model_parallel_size = 4
    config.parallel.num_layers_per_virtual_pipeline_stage = 5
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

    config.data.max_patches_per_row = 16384  # four of the largest images: half of a row's tokens
    config.train.seq_length = 8192
    config.train.micro_batch_size = 1
    config.train.global_batch_size = 32
    config.train.steps = 10_000
    config.optimizer.learning_rate = 5e-6
    config.optimizer.min_lr = 5e-7
    config.optimizer.lr_warmup_iters = 300
    config.optimizer.weight_decay = 0.1
    config.checkpoint.save_every_steps = 500
    return config
