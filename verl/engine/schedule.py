"""The learning rate, training step after training step."""

import math
from collections.abc import Callable

import torch

from verl.config import OptimConfig
from verl.config.choices import SCHEDULES
from verl.utils.errors import ConfigError

# Maps the number of finished training steps to a factor on the learning rate.
Schedule = Callable[[int], float]

STABLE_SHARE = 0.9  # of the steps after the warm-up, at the peak before wsd falls


class LearningRate:
    """Set an optimizer's learning rate; `position` is the number of finished training steps."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, config: OptimConfig, total_steps: int
    ) -> None:
        self._optimizer = optimizer
        self._base = config.lr
        self._schedule = build_schedule(config, total_steps)
        self._stepped = False
        self.go_to(0)

    def go_to(self, position: int) -> None:
        """Set the rate of the training step after `position` others.

        A rate that is a tensor changes in place, because a compiled step reads it.
        """
        self.position = position
        self._stepped = False
        self.value = self._base * self._schedule(position)
        for group in self._optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(self.value)
            else:
                group["lr"] = self.value

    def note_step(self) -> None:
        """Note that the optimizer has stepped."""
        self._stepped = True

    def advance(self) -> None:
        """End a training step; the rate stays if the optimizer has not stepped in it."""
        if self._stepped:
            self.go_to(self.position + 1)


def build_schedule(config: OptimConfig, total_steps: int) -> Schedule:
    """Build the schedule that `optim.*` asks for.

    It spans `optim.total_training_steps` or, where that is unset, `total_steps`. Steps are
    training steps, not optimizer steps. `lr_warmup_steps` < 0 means
    `lr_warmup_steps_ratio` of the total.
    """
    total = config.total_training_steps if config.total_training_steps > 0 else total_steps
    warmup = config.lr_warmup_steps
    if warmup < 0:
        warmup = int(config.lr_warmup_steps_ratio * total)

    if config.warmup_style == "constant":
        return constant_schedule(warmup)
    if config.warmup_style == "cosine":
        return cosine_schedule(
            warmup, total, min_ratio=config.min_lr_ratio, num_cycles=config.num_cycles
        )
    if config.warmup_style == "wsd":
        plateau_end = warmup + int(STABLE_SHARE * max(0, total - warmup))
        fall = cosine_schedule(
            plateau_end, total, min_ratio=config.min_lr_ratio, num_cycles=config.num_cycles
        )
        rise = constant_schedule(warmup)
        return lambda step: rise(step) if step < plateau_end else fall(step)
    raise ConfigError(
        f"optim.warmup_style must be one of {', '.join(SCHEDULES)}, got '{config.warmup_style}'."
    )


def constant_schedule(warmup_steps: int) -> Schedule:
    """Return step / warmup_steps until it is 1, then 1.

    The first training step of a warm-up thus has learning rate 0.
    """

    def factor(step: int) -> float:
        return step / warmup_steps if step < warmup_steps else 1.0

    return factor


def cosine_schedule(
    warmup_steps: int, total_steps: int, *, min_ratio: float, num_cycles: float
) -> Schedule:
    """Return a linear warm-up, then a cosine.

        min_ratio + (1 - min_ratio) * (1 + cos(2 pi num_cycles t)) / 2    with t from 0 to 1

    num_cycles 0.5 is one fall from 1 to `min_ratio`. After `total_steps` the last value stays.
    """

    def factor(step: int) -> float:
        if step < warmup_steps:
            return step / warmup_steps
        progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
        cosine = (1.0 + math.cos(2.0 * math.pi * num_cycles * progress)) / 2.0
        return min_ratio + (1.0 - min_ratio) * cosine

    return factor
