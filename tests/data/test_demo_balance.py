"""The demo's images, dealt to its eight devices: none encodes much more than the mean."""

import numpy as np

from jaxforge.config import load_config, resolve
from jaxforge.data.balance import balanced_order
from jaxforge.data.digits import DigitsSource
from jaxforge.data.encoder_division import divide

STAGES, TENSOR, RANKS = 2, 2, 2


def test_the_most_loaded_device_of_the_demo_encodes_at_most_a_tenth_more_than_the_mean():
    config = resolve(load_config("configs/demo_vlm.py"))
    parallel = config.parallel
    assert (parallel.pipeline_model_parallel_size, parallel.tensor_model_parallel_size) == (STAGES, TENSOR)
    source, batch, size = DigitsSource(config, "train"), config.train.global_batch_size, config.train.micro_batch_size
    microbatches = batch // (RANKS * size)
    for step in range(20):
        order = balanced_order(source.costs(step * batch, batch), microbatches, RANKS, size)
        rows = [source.row(step * batch + int(number)) for number in order]
        places = np.arange(batch).reshape(microbatches, RANKS, size)
        loads = []
        for rank in range(RANKS):
            of_rank = {key: np.stack([[rows[p][key] for p in of_mb] for of_mb in places[:, rank]]) for key in rows[0]}
            loads += divide(of_rank, stages=STAGES, tensor=TENSOR, merge=2).patches_G.tolist()
        assert max(loads) <= 1.1 * np.mean(loads), step
