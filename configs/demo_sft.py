"""Fine-tunes a tiny Hugging Face checkpoint on a JSONL file with images.

8 simulated devices: encoder TP 1, decoder TP 2, DP 4.

    make demo-sft

is, step by step,

    python scripts/make_sft_demo.py runs/demo_sft_data
    python -m jaxforge.train --config=configs/demo_sft.py --workdir=runs/demo_sft
    python -m jaxforge.convert to-hf runs/demo_sft runs/demo_sft_hf --verify

The checkpoint (random weights) and the questions about coloured shapes are made by the first command.
"""

from ml_collections import ConfigDict

from jaxforge.config import default_config, hf_model


def get_config(folder: str = "runs/demo_sft_data") -> ConfigDict:
    config = default_config()
    config.model = hf_model(f"{folder}/hf")
    config.checkpoint.init_from_hf = f"{folder}/hf"
    config.data.path = (f"{folder}/train.jsonl",)
    config.data.eval_path = (f"{folder}/eval.jsonl",)
    config.data.cache_dir = f"{folder}/cache"
    config.data.max_patches_per_row = 384
    config.parallel.tensor_model_parallel_size = 2
    config.model.encoder.tensor_model_parallel_size = 1
    config.train.simulated_devices = 8
    config.train.seq_length = 256
    config.train.global_batch_size = 8
    config.train.micro_batch_size = 2
    config.train.steps = 200
    config.train.log_every_steps = 20
    config.train.eval_every_steps = 50
    config.optimizer.learning_rate = 3e-3
    config.optimizer.lr_warmup_iters = 20
    config.checkpoint.save_every_steps = 100
    config.checkpoint.export_hf_every_steps = 200
    return config
