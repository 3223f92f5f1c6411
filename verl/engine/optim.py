"""AdamW and learning-rate schedules."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import nn

from verl.config import OptimConfig
from verl.utils.errors import ConfigError

# Maps the number of finished training steps to a factor on the learning rate.
Schedule = Callable[[int], float]


def build_adamw(parameters: Iterable[nn.Parameter], config: OptimConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101, algorithm 2), fused: one kernel on CUDA, one pass on CPU.

    One group: weights, biases and norms decay alike, as users of verl's recipes expect of `optim.weight_decay`.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in trained:
        if parameter.dtype in (torch.bfloat16, torch.float16):
            raise ConfigError(
                f"Trained parameters must be fp32, found {parameter.dtype}: small updates would be rounded away. "
                "Load the model with dtype=torch.float32; on CUDA forward and backward still run in bf16."
            )
    return torch.optim.AdamW(
        trained,
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def build_schedule(config: OptimConfig, total_steps: int) -> Schedule:
    """The schedule that `optim.*` asks for, over `optim.total_training_steps` or, where that is unset, `total_steps`.

    Steps are training steps, not optimizer steps. `lr_warmup_steps` < 0 means `lr_warmup_steps_ratio` of the total.
    """
    total = config.total_training_steps if config.total_training_steps > 0 else total_steps
    warmup = config.lr_warmup_steps if config.lr_warmup_steps >= 0 else int(config.lr_warmup_steps_ratio * total)
    if config.warmup_style == "constant":
        return constant_schedule(warmup)
    if config.warmup_style == "cosine":
        return cosine_schedule(warmup, total, min_ratio=config.min_lr_ratio, num_cycles=config.num_cycles)
    raise ConfigError(f"optim.warmup_style must be 'constant' or 'cosine', got '{config.warmup_style}'.")


def constant_schedule(warmup_steps: int) -> Schedule:
    """step / warmup_steps until it is 1, then 1. The first training step of a warm-up thus has learning rate 0."""

    def factor(step: int) -> float:
        return step / warmup_steps if step < warmup_steps else 1.0

    return factor


def cosine_schedule(warmup_steps: int, total_steps: int, *, min_ratio: float, num_cycles: float) -> Schedule:
    """Linear warm-up, then min_ratio + (1 - min_ratio) * (1 + cos(2 pi num_cycles t)) / 2 with t from 0 to 1.

    num_cycles 0.5 is one fall from 1 to `min_ratio`. After `total_steps` the last value stays.
    """

    def factor(step: int) -> float:
        if step < warmup_steps:
            return step / warmup_steps
        progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
        cosine = (1.0 + math.cos(2.0 * math.pi * num_cycles * progress)) / 2.0
        return min_ratio + (1.0 - min_ratio) * cosine

    return factor
