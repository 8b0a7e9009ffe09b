"""Fine-tunes Qwen2.5-VL 7B on 8 x H100, as a whole or with LoRA.

    python -m jaxforge.train --config=configs/qwen2_5_vl_7b_sft.py \
        --config.checkpoint.init_from_hf=DIR --config.data.path=train.jsonl
    python -m jaxforge.train --config=configs/qwen2_5_vl_7b_sft.py:lora ...

DIR is the Hugging Face folder; its tokenizer and image settings are used too.  Another size of the family:
--config.model=DIR.  Without a data path it runs on synthetic rows.  Trained weights are exported to hf/STEP of the
run's directory at the end, adapters folded in.  Add --config.data.max_pixels=802816 for photographs: the folder's own
limit is 16 times that, and an image of more patches than a row holds is dropped.

Not yet run on GPUs; compiled for 8 x H100 (jax 0.12.0.1): with the encoder frozen and decoder TP 4, 26.9 of 79.1 GiB on
each GPU; with LoRA of rank 16 on decoder and projector, all on every GPU, 18.3 GiB.
"""

from ml_collections import ConfigDict

from jaxforge.config import ConfigError, default_config, model_config


def get_config(method: str = "full") -> ConfigDict:
    if method not in ("full", "lora"):
        raise ConfigError(f"qwen2_5_vl_7b_sft.py:{method} is no way to fine-tune; use :full or :lora")
    config = default_config()
    config.model = model_config("qwen2_5_vl_7b")
    config.model.encoder.image_size = (896, 896)  # 4096 patches, 1024 visual tokens
    config.model.encoder.tensor_model_parallel_size = 1
    config.loss.cross_entropy_loss_fusion = True
    config.memory.recompute_granularity = "full"
    config.memory.recompute_method = "uniform"
    config.memory.recompute_num_layers = 1
    config.train.seq_length = 4096
    config.train.micro_batch_size = 1
    config.train.global_batch_size = 16
    config.train.steps = 1000
    config.data.max_patches_per_row = 8192
    config.optimizer.weight_decay = 0.0
    config.optimizer.lr_warmup_iters = 30
    config.checkpoint.save_every_steps = 200
    config.checkpoint.export_hf_every_steps = 1000
    if method == "lora":
        # the frozen weights are 2 bytes a parameter: every GPU holds them all, and adapters have little state to shard
        config.optimizer.learning_rate = 1e-4
        config.lora.decoder.rank = 16
        config.lora.decoder.alpha = 32.0
        config.lora.projector.rank = 16
        config.lora.projector.alpha = 32.0
    else:
        config.optimizer.learning_rate = 1e-5
        config.optimizer.freeze = ("encoder/**",)
        config.parallel.tensor_model_parallel_size = 4
        config.parallel.sequence_parallel = True
        config.parallel.data_parallel_sharding_strategy = "optim"
    return config
