"""Fine-tunes a tiny Llama of the parity fixtures on random tokens: 8 simulated devices, TP 2, DP 4."""

from pathlib import Path

from jaxforge.config import default_config, hf_model

FOLDER = Path(__file__).parents[1] / "parity" / "fixtures" / "llama"


def get_config():
    config = default_config()
    config.model = hf_model(FOLDER, config.model)
    config.checkpoint.init_from_hf = str(FOLDER)
    config.checkpoint.update(save_every_steps=2, keep=5, export_hf_every_steps=2, export_hf_dtype="float32")
    config.parallel.tensor_model_parallel_size = 2
    config.train.update(
        simulated_devices=8, steps=4, global_batch_size=8, micro_batch_size=1, seq_length=32, log_every_steps=4
    )
    config.optimizer.update(learning_rate=1e-2, lr_decay_style="constant")
    config.logging.update(tensorboard=False, pictures=False)
    return config
