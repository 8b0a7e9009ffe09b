"""A decoder, both encoders and whole vision-language models against plain loops, and what packing must not change."""

import jax
import numpy as np
import numpy_reference
import pytest
from flax import nnx
from tiny_models import (
    ENCODERS,
    SEQ_LENGTH,
    document,
    image,
    model_function,
    random_parameters,
    row,
    rows_of_many_kinds,
    tiny_config,
)

from jaxforge.training.program import make_model

encoders = pytest.mark.parametrize("encoder", ENCODERS)


def wide(tree):
    return jax.tree.map(lambda a: np.asarray(a, np.float64), tree)


def batched(*rows):
    return {key: np.stack([one[key] for one in rows]) for key in rows[0]}


def row_of(batch, index):
    return {key: value[index] for key, value in batch.items()}


def encoder_function(config):
    """(parameters, batch) -> visual tokens [B, N, E], and DeepStack's [J, B, N, E] or None."""
    graph = nnx.graphdef(nnx.eval_shape(lambda: make_model(config, "xla", nnx.Rngs(params=0))))

    def run(parameters, batch):
        model = nnx.merge(graph, parameters)
        return model.projector(*model.encoder(batch))

    return jax.jit(run)


def close(actual, expected):
    # fp32 against float64; values are of order 1 and pass some dozens of operations
    np.testing.assert_allclose(actual, expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(untie_embeddings_and_output_weights=False, qk_layernorm=True),
        dict(add_qkv_bias=True, num_query_groups=2, norm_epsilon=0.1, rotary_base=100.0),
        dict(num_layers=3, num_query_groups=8),
    ],
    ids=["untied", "tied, q/k norm", "q/k/v biases", "three layers, no groups"],
)
def test_a_language_model_is_that_of_the_loops(changes):
    config = tiny_config(None, decoder_changes=changes)
    parameters, rows = random_parameters(config), rows_of_many_kinds(config)
    logits = model_function(config, "logits")(parameters, rows)
    expected = [numpy_reference.logits(row_of(rows, b), wide(parameters), config.model) for b in range(4)]
    close(logits, np.stack(expected))
    loss = model_function(config, "loss")(parameters, rows).loss
    losses = [numpy_reference.loss_sum(row_of(rows, b), wide(parameters), config.model) for b in range(4)]
    assert float(loss) == pytest.approx(sum(losses), rel=2e-6)


@pytest.mark.parametrize(
    "encoder, changes",
    [
        ("qwen2_5_vit", dict()),
        # windows in all layers but the first, and windows of one visual token
        ("qwen2_5_vit", dict(num_layers=3, fullatt_block_indexes=(0,), window_size=4, add_bias_linear=False)),
        ("qwen3_vit", dict()),
        ("qwen3_vit", dict(num_layers=3, deepstack_visual_indexes=(0, 2), num_position_embeddings=25)),
    ],
    ids=["qwen2_5_vit", "qwen2_5_vit, small windows", "qwen3_vit", "qwen3_vit, two features"],
)
def test_a_vision_language_model_is_that_of_the_loops(encoder, changes):
    config = tiny_config(encoder, encoder_changes=changes)
    parameters, rows = random_parameters(config), rows_of_many_kinds(config)
    logits = model_function(config, "logits")(parameters, rows)
    expected = [numpy_reference.logits(row_of(rows, b), wide(parameters), config.model) for b in range(4)]
    is_token = rows["segment_ids"] > 0
    assert np.sum(rows["visual_index"] >= 0) == 8 + 0 + 1 + 7
    close(np.asarray(logits)[is_token], np.stack(expected)[is_token])


def test_any_encoder_goes_with_any_decoder():
    config = tiny_config(
        "qwen3_vit", decoder_changes=dict(mrope_section=None, mrope_interleaved=False, add_qkv_bias=True)
    )
    parameters, rows = random_parameters(config), rows_of_many_kinds(config)
    logits = model_function(config, "logits")(parameters, rows)
    expected = numpy_reference.logits(row_of(rows, 3), wide(parameters), config.model)
    close(logits[3], expected)


@encoders
def test_an_image_among_others_has_the_features_it_has_alone(encoder):
    config = tiny_config(encoder)
    parameters, encode = random_parameters(config), encoder_function(config)
    images = [image(8, 8, 1), image(4, 12, 2), image(4, 4, 3)]  # 4, 3 and 1 visual tokens
    together, deepstack = encode(parameters, batched(row(config, document(config, 1, images))))
    first = 0
    for pixels, num_tokens in zip(images, (4, 3, 1), strict=True):
        alone, deepstack_alone = encode(parameters, batched(row(config, document(config, 1, [pixels]))))
        last = first + num_tokens
        # the same sums in another place of the row: equal but for the order of additions
        np.testing.assert_allclose(together[0, first:last], alone[0, :num_tokens], atol=1e-5)
        if deepstack is not None:
            np.testing.assert_allclose(deepstack[:, 0, first:last], deepstack_alone[:, 0, :num_tokens], atol=1e-5)
        first = last


@encoders
def test_images_never_see_each_other(encoder):  # F34
    config = tiny_config(encoder)
    parameters, encode = random_parameters(config), encoder_function(config)

    def features(second):
        images = [image(8, 8, 1), second, image(4, 4, 3)]
        return [np.asarray(x) for x in encode(parameters, batched(row(config, document(config, 1, images))))
                if x is not None]  # fmt: skip

    for before, after in zip(features(image(4, 12, 2)), features(9 * image(4, 12, 4)), strict=True):
        # the last two dimensions are visual tokens and width; tokens 4 to 6 are the second image's
        assert np.array_equal(before[..., :4, :], after[..., :4, :])
        assert np.array_equal(before[..., 7, :], after[..., 7, :])
        assert not np.array_equal(before[..., 4:7, :], after[..., 4:7, :])


def test_a_window_sees_itself_alone_in_windowed_layers():  # F34
    # 8 x 12 pixels: a window of 8 x 8 (4 visual tokens) and one of 8 x 4 (2), in squares of row-major order
    seen = {}
    for fullatt in ((), (0,)):
        config = tiny_config("qwen2_5_vit", encoder_changes=dict(num_layers=1, fullatt_block_indexes=fullatt))
        parameters, encode = random_parameters(config), encoder_function(config)
        pixels = image(8, 12, 1)
        other = pixels.copy()
        other[:, 8:] *= -5
        before, after = (
            np.asarray(encode(parameters, batched(row(config, document(config, 1, [x]))))[0][0, :6])
            for x in (pixels, other)
        )
        seen[fullatt] = np.any(before != after, axis=-1).tolist()
    assert seen[()] == [False, False, True, False, False, True]
    assert seen[(0,)] == [True] * 6


@encoders
def test_one_compile_serves_any_number_of_images(encoder):  # F68
    config = tiny_config(encoder)
    parameters, loss = random_parameters(config), model_function(config, "loss")
    for images in ([], [image(4, 4, 0)], [image(4, 8, 1), image(8, 4, 2), image(4, 4, 3)]):
        assert np.isfinite(loss(parameters, batched(row(config, document(config, 2, images))))[0])
    assert loss._cache_size() == 1


@pytest.mark.parametrize("encoder", (None, *ENCODERS))
def test_a_document_does_not_change_its_neighbours_logits_by_one_bit(encoder):  # F23
    config = tiny_config(encoder)
    parameters, logits_of = random_parameters(config), model_function(config, "logits")

    def logits(seed, scale):
        first = document(config, 2, [scale * image(8, 4, seed)] if encoder else [], 3, seed=seed)
        second = document(config, 1, [image(4, 8, 7)] if encoder else [], 3, seed=9)
        both = row(config, first, second)
        start, end = np.flatnonzero(both["segment_ids"] == 2)[[0, -1]]
        return np.asarray(logits_of(parameters, batched(both)))[0], start, end + 1

    (before, start, end), (after, *_) = logits(1, 1.0), logits(2, 5.0)
    assert np.array_equal(before[start:end], after[start:end])
    assert not np.array_equal(before[:start], after[:start])
    assert 0 < start < end < SEQ_LENGTH


@pytest.mark.parametrize("encoder", (None, *ENCODERS))
def test_the_loss_is_the_same_packed_and_one_by_one(encoder):  # F29
    config = tiny_config(encoder)
    parameters, loss_of = random_parameters(config), model_function(config, "loss")

    def images(*sizes):
        return [image(*size, seed=sum(size)) for size in sizes] if encoder else []

    documents = [
        document(config, 1, images((4, 4)), 2, seed=1),
        document(config, 2, images((8, 4), (4, 4)), 2, seed=2),
        document(config, 1, after=3, seed=3),
    ]
    packed = loss_of(parameters, batched(row(config, *documents)))[:2]
    alone = [loss_of(parameters, batched(row(config, one)))[:2] for one in documents]
    # sums in another order
    np.testing.assert_allclose(packed, np.sum(alone, axis=0), rtol=2e-6)


@encoders
def test_padded_patches_and_unused_visual_tokens_change_nothing(encoder):
    config = tiny_config(encoder)
    parameters, loss_of = random_parameters(config), model_function(config, "loss")
    one = row(config, document(config, 2, [image(4, 8, 1)]))
    dirty = one | {"patches": np.where((one["patch_segments"] > 0)[:, None], one["patches"], 1e3).astype(np.float32)}
    assert loss_of(parameters, batched(one))[:2] == loss_of(parameters, batched(dirty))[:2]


def test_scoring_agrees_with_loss_and_logits():
    config = tiny_config("qwen2_5_vit")
    parameters, rows = random_parameters(config), rows_of_many_kinds(config)
    loss, tokens = model_function(config, "score")(parameters, rows)
    assert float(loss) == pytest.approx(float(model_function(config, "loss")(parameters, rows)[0]), rel=1e-6)
    assert np.array_equal(tokens, np.argmax(model_function(config, "logits")(parameters, rows), axis=-1))
