"""Multi-token prediction against plain loops, and what a document's end means for it."""

import jax
import numpy as np
import numpy_reference
import pytest
from tiny_models import model_function, random_parameters, rows_of_many_kinds, tiny_config

from jaxforge.models.multi_token import ahead
from jaxforge.training.step import DepthLosses, count_tokens, with_counts


def wide(tree):
    return jax.tree.map(lambda a: np.asarray(a, np.float64), tree)


@pytest.mark.parametrize("encoder, depths", [(None, 1), (None, 2), ("qwen3_vit", 2)])
def test_states_and_losses_are_those_of_the_loops(encoder, depths):
    config = tiny_config(encoder, decoder_changes=dict(mtp_num_layers=depths))
    parameters, rows = random_parameters(config), rows_of_many_kinds(config)
    weights = np.arange(2, 2 + depths).astype(np.float32)
    batch = rows | ahead(rows, depths) | {"mtp_weights": weights}
    _, *states = model_function(config, "states")(parameters, batch)
    losses = model_function(config, "loss")(parameters, batch)
    expected = np.zeros(depths)
    for number in range(4):
        row, p = {key: array[number] for key, array in rows.items()}, wide(parameters)
        visual, _ = numpy_reference.visual_tokens(row, p, config.model)
        own = numpy_reference.hidden(row, p, config.model)
        further = numpy_reference.states_ahead(row, p["decoder"], config.model.decoder, own, visual)
        is_token = row["segment_ids"] > 0
        for depth, (found, targets) in enumerate(further):
            np.testing.assert_allclose(states[depth][number][is_token], found[is_token], atol=2e-5)
            logits = found @ p["decoder"]["head_VD"][: config.model.decoder.vocab_size].T
            for s in np.flatnonzero(targets >= 0):
                expected[depth] += np.log(np.exp(logits[s]).sum()) - logits[s, targets[s]]
    np.testing.assert_allclose(losses.mtp_J, weights * expected, rtol=2e-6)


def test_tokens_and_targets_ahead_are_those_of_the_same_document():
    batch = {
        "tokens": np.array([[11, 12, 13, 21, 22, 0]]),
        "segment_ids": np.array([[1, 1, 1, 2, 2, 0]]),
        "targets": np.array([[12, 13, -100, 22, -100, -100]]),
    }
    found = {key: np.asarray(array).tolist() for key, array in ahead(batch, 2).items()}
    assert found == {
        "mtp_tokens": [[[12, 13, -1, 22, -1, -1]], [[13, -1, -1, -1, -1, -1]]],
        "mtp_targets": [[[13, -100, -100, -100, -100, -100]], [[-100] * 6]],
    }
    assert np.asarray(ahead(batch, 7)["mtp_targets"])[-1].tolist() == [[-100] * 6]


def test_each_depth_counts_by_the_mean_over_its_own_targets():
    config = tiny_config(None, decoder_changes=dict(mtp_num_layers=2))
    rows = {key: array[None] for key, array in rows_of_many_kinds(config).items()}
    depths = DepthLosses(2, 0.6)
    counts = count_tokens(rows, depths)
    batch = with_counts(rows, {}, counts, depths)
    # a sum over a depth's targets times its weight, over all targets, is 0.6 / 2 of its mean
    expected = 0.3 * int(counts["target_tokens"]) / np.asarray(counts["mtp_targets_J"])
    np.testing.assert_allclose(batch["mtp_weights"], expected[None], rtol=1e-6)
    # documents of 4, 2; 6, 5; 3; 4, 2 targets, of which each depth loses one more where the answer begins at once
    assert np.asarray(counts["mtp_targets_J"]).tolist() == [3 + 1 + 5 + 5 + 3 + 3 + 2, 2 + 0 + 4 + 4 + 3 + 2 + 1]


def test_the_next_tokens_loss_is_the_one_without():
    without = tiny_config(None)
    config = tiny_config(None, decoder_changes=dict(mtp_num_layers=1))
    parameters, rows = random_parameters(config), rows_of_many_kinds(config)
    batch = rows | ahead(rows, 1) | {"mtp_weights": np.ones(1, np.float32)}
    losses = model_function(config, "loss")(parameters, batch)
    decoder = {name: tree for name, tree in parameters["decoder"].items() if name != "mtp"}
    decoder["layers"] = jax.tree.map(lambda a: a[:-1], decoder["layers"])
    alone = model_function(without, "loss")({"decoder": decoder}, rows)
    np.testing.assert_allclose(losses.loss, alone.loss, rtol=1e-6)
