"""The optimizer, its schedules, and which parameters train."""

from jaxforge.optim.optimizer import Optimizer, make_optimizer
from jaxforge.optim.paths import split_trainable
from jaxforge.optim.schedule import learning_rate_schedule

__all__ = ["Optimizer", "learning_rate_schedule", "make_optimizer", "split_trainable"]
