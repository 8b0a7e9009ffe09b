"""Costs of documents by hand, and rows dealt to ranks so that none waits long."""

import dataclasses

import numpy as np
import pytest
from data_configs import text_config, vision_config

from jaxforge.config.schema import DecoderConfig
from jaxforge.data.balance import balanced_order, document_costs
from jaxforge.training.flops import forward_flops_per_row


def costs(config, tokens, patches):
    return document_costs(np.array(tokens), np.array(patches), config)


def test_a_text_costs_its_products_and_the_square_of_its_length():
    decoder = DecoderConfig(
        num_layers=2, hidden_size=8, ffn_hidden_size=16, num_attention_heads=2, num_query_groups=1, kv_channels=4,
        vocab_size=10,
    )  # fmt: skip
    config = dataclasses.replace(text_config(), model=dataclasses.replace(text_config().model, decoder=decoder))
    # a token in a layer: query and output 2 x 2 8 8, key and value 2 x 2 8 4, feed-forward 3 x 2 8 16; head 2 8 10
    linear = 2 * (256 + 128 + 768) + 160
    # attention to half of n tokens: scores and values 2 x 2 8 n / 2, in 2 layers
    assert costs(config, [1, 3], [0, 0]).tolist() == [linear + 32, 3 * linear + 9 * 32]


@pytest.mark.parametrize("encoder", [{"fullatt_block_indexes": (1,)}, {"model_type": "qwen3_vit"}])
def test_a_document_that_fills_a_row_costs_what_a_full_row_is_counted_for(encoder):
    # 512 patches are an image of image_size, 128 x 256 pixels; training counts a row as one such document
    config = vision_config(encoder=encoder, data={"max_patches_per_row": 512}, train={"seq_length": 160})
    full = forward_flops_per_row(config)
    assert costs(config, [160], [512])[0] == full.encoder + full.projector + full.decoder


def test_an_image_of_twice_the_patches_costs_more_than_twice_where_patches_see_it_whole():
    windowed, full = (vision_config(encoder={"fullatt_block_indexes": layers}) for layers in ((), (0, 1)))
    half, whole = costs(full, [0, 0], [256, 512])
    assert whole > 2 * half
    half, whole = costs(windowed, [0, 0], [256, 512])
    assert whole == 2 * half


def test_patches_beyond_a_full_image_are_further_images():
    # 1024 patches are two images of 512: they don't see each other
    config = vision_config(encoder={"fullatt_block_indexes": (0, 1)})
    one, two = costs(config, [0, 0], [512, 1024])
    assert two == 2 * one


def dealt(costs_R, microbatches, ranks, rows_per_rank):
    """Costs by [microbatch, rank], each the sum of its rows."""
    order = balanced_order(costs_R, microbatches, ranks, rows_per_rank)
    assert sorted(order.tolist()) == list(range(len(costs_R)))
    return costs_R[order].reshape(microbatches, ranks, rows_per_rank).sum(axis=2)


def test_known_costs_are_dealt_by_hand():
    # the first microbatch has 9 8 7 6: 9 to rank 0, 8 to rank 1, 7 to rank 1 (8 < 9), 6 to rank 0, which has room;
    # the second 4 3 2 1, at loads of 15 and 15: 4 to rank 0, 3 to rank 1, 2 to rank 1 (18 < 19), 1 to rank 0
    order = balanced_order(np.array([1.0, 9, 2, 8, 3, 7, 4, 6]), microbatches=2, ranks=2, rows_per_rank=2)
    assert order.tolist() == [1, 7, 3, 5, 6, 0, 4, 2]


def test_ranks_cost_about_the_same_in_each_microbatch_and_in_the_step():
    rng = np.random.default_rng(0)
    costs_R = rng.lognormal(0, 0.5, 256)
    by_rank = dealt(costs_R, microbatches=8, ranks=8, rows_per_rank=4)
    in_order = costs_R.reshape(8, 8, 4).sum(axis=2)

    def waits(by_rank):  # what ranks of the mean cost wait for the slowest of each microbatch
        return by_rank.max(axis=1).sum() / by_rank.mean(axis=1).sum() - 1

    # the rest is in the first microbatch, whose largest row costs more than a mean rank of it
    assert waits(by_rank) < waits(in_order) / 4
    assert by_rank.sum(axis=0).max() / by_rank.sum(axis=0).mean() < 1.01


def test_equal_costs_keep_their_order():
    order = balanced_order(np.ones(8), microbatches=2, ranks=2, rows_per_rank=2)
    assert sorted(order[:4].tolist()) == [0, 1, 2, 3]
    assert order.tolist() == balanced_order(np.ones(8), 2, 2, 2).tolist()
