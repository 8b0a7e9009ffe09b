"""Pretrains Llama 3.1 70B on 64 x H100: TP 8 with sequence parallel, PP 4 with 5 virtual stages, DP 2.

    sbatch --nodes=8 scripts/slurm/train.sbatch --config=configs/llama3_1_70b_pretrain.py --workdir=/path/of/all/nodes
    python -m jaxforge.plan --config=configs/llama3_1_70b_pretrain.py --topology=h100:8x8

Rows of 8192 tokens, synthetic.  Not yet run on GPUs; compiled for 64 x H100 (jax 0.12.0.1): 27.1 of 79.1 GiB on each
GPU (12.3 parameters and optimizer, 14.7 temporary), 342 ticks with 0.9 % bubble; a step of 1,048,576 tokens is 4.7e17
model FLOPs, 7.4 s at peak.  Compiling takes 20 s of CPU time.
"""

from ml_collections import ConfigDict

from jaxforge.config import default_config, model_config


def get_config() -> ConfigDict:
    config = default_config()
    config.model = model_config("llama3_1_70b")
    config.parallel.tensor_model_parallel_size = 8
    config.parallel.sequence_parallel = True
    config.parallel.pipeline_model_parallel_size = 4
    config.parallel.num_layers_per_virtual_pipeline_stage = 4  # 80 layers / 4 ranks / 5 virtual stages
    config.parallel.vocabulary_parallel_over_pipeline = True
    config.parallel.data_parallel_sharding_strategy = "optim"
    config.loss.cross_entropy_loss_fusion = True
    config.memory.recompute_granularity = "full"
    config.memory.recompute_method = "uniform"
    config.memory.recompute_num_layers = 1
    config.train.seq_length = 8192
    config.train.micro_batch_size = 1
    config.train.global_batch_size = 128
    config.train.steps = 10_000
    config.optimizer.learning_rate = 1.5e-4
    config.optimizer.min_lr = 1.5e-5
    config.optimizer.lr_warmup_iters = 500
    config.checkpoint.save_every_steps = 500
    return config
