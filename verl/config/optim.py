"""Optimizer and learning-rate schedule, shared by actor and critic."""

from dataclasses import dataclass
from typing import Any

from verl.config.choices import OPTIMIZERS, SCHEDULES
from verl.config.setting import alias, setting


@dataclass(kw_only=True, slots=True)
class OptimConfig:
    optimizer: str = setting(
        "AdamW",
        (
            "AdamW; AdamW8bit: moments of 8 bits (torchao); Muon: hidden matrices by Muon, all "
            "else by AdamW"
        ),
        choices=OPTIMIZERS,
    )
    lr: float = setting(1e-6, "peak learning rate", at_least=0, finite=True)
    lr_warmup_steps_ratio: float = setting(
        0.0, "share of all steps spent warming up", at_least=0, at_most=1
    )
    lr_warmup_steps: int = setting(
        -1,
        "steps spent warming up; -1: take lr_warmup_steps_ratio",
        at_least=-1,
        null_is_default=True,
    )
    total_training_steps: int = setting(
        -1,
        "length of the schedule in optimizer steps; -1: the length of the run",
        at_least=-1,
        null_is_default=True,
    )
    weight_decay: float = setting(0.01, "decoupled weight decay", at_least=0, finite=True)
    min_lr_ratio: float = setting(
        0.0,
        "the schedules cosine and wsd end at this share of lr",
        at_least=0,
        at_most=1,
        null_is_default=True,
    )
    num_cycles: float = setting(
        0.5,
        "cosine waves over the fall; 0.5 goes from the peak to the minimum once",
        above=0,
        finite=True,
    )
    warmup_style: str = setting(
        "constant",
        "schedule after the warm-up; wsd: the peak for nine tenths of the rest, then a cosine",
        choices=SCHEDULES,
    )
    lr_scheduler_type: Any = alias(".warmup_style", "later name in verl")
    betas: list[float] = setting([0.9, 0.999], "AdamW's decay rates of the first and second moment")
    eps: float = setting(1e-8, "AdamW's epsilon", above=0, finite=True)
