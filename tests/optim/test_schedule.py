"""Learning rates, by hand."""

import numpy as np
import pytest

from jaxforge.config.schema import OptimizerConfig
from jaxforge.optim import learning_rate_schedule


def rates(counts, train_steps=100, **fields):
    schedule = learning_rate_schedule(OptimizerConfig(learning_rate=1.0, **fields), train_steps)
    return [float(schedule(count)) for count in counts]


def test_the_warm_up_starts_above_zero_and_reaches_the_peak_with_its_last_update():
    # 4 updates at 1/4, 2/4, 3/4 and 4/4
    assert rates(range(6), lr_warmup_iters=4, lr_decay_style="constant") == [0.25, 0.5, 0.75, 1, 1, 1]


def test_without_warm_up_the_first_update_has_the_peak():
    for style in ("constant", "cosine", "linear"):
        assert rates([0], lr_decay_style=style) == [1]


def test_constant_stays():
    assert rates([0, 50, 1000], lr_decay_style="constant") == [1, 1, 1]


def test_linear_goes_straight_from_the_warm_up_to_the_end_and_stays_there():
    found = rates([20, 30, 60, 90, 100, 500], lr_warmup_iters=20, min_lr=0.2, lr_decay_style="linear")
    # of 80 updates: 0, 1/8, 1/2, 7/8, all
    np.testing.assert_allclose(found, [1, 0.9, 0.6, 0.3, 0.2, 0.2], rtol=1e-6)


def test_cosine_is_half_a_period():
    found = rates([20, 40, 60, 80, 100, 500], lr_warmup_iters=20, min_lr=0.2, lr_decay_style="cosine")
    half = np.sqrt(0.5)
    expected = [1, 0.2 + 0.4 * (1 + half), 0.6, 0.2 + 0.4 * (1 - half), 0.2, 0.2]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_wsd_is_stable_until_its_final_linear_decay():
    found = rates([0, 9, 50, 80, 85, 95, 100, 500], lr_warmup_iters=10, lr_wsd_decay_iters=20, lr_decay_style="WSD")
    np.testing.assert_allclose(found, [0.1, 1, 1, 1, 0.75, 0.25, 0, 0], rtol=1e-6)


def test_the_decay_may_end_before_the_run():
    found = rates([25, 50, 99], lr_decay_iters=50, lr_decay_style="linear")
    np.testing.assert_allclose(found, [0.5, 0, 0], rtol=1e-6)


@pytest.mark.parametrize("style", ["cosine", "linear", "WSD"])
def test_the_rate_never_rises_after_the_warm_up_and_never_leaves_its_bounds(style):
    final = 10 if style == "WSD" else None
    found = rates(range(120), lr_warmup_iters=7, min_lr=0.1, lr_wsd_decay_iters=final, lr_decay_style=style)
    assert found[6] == 1 and np.all(np.diff(found[6:]) <= 0)
    assert min(found[7:]) == pytest.approx(0.1) and max(found) == 1
