"""TRL's GRPOTrainer in transformers mode at the work of `step.py`, which starts this script.

The clock of a phase waits until the device is done. All responses get the longest length: TRL has
no limit for each sample, and would pad to it. Prompts are digits, each a token of its own. Needs
`pip install trl`.
"""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trl_peer import (  # first: it sets variables of the libraries below
    ALGORITHM,
    NO_REPORTS,
    Stopwatch,
)

# isort: split
import numpy as np
import torch
import trl
from datasets import Dataset
from rollout_models import versions
from step_work import StepJob, digit_prompts, serve
from training_work import CLIP_NORM, LEARNING_RATE, synchronize
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

# A row of `step.py`'s table: the phases of the stopwatch that it adds up.
ROWS = {
    "generate": ("gen",),
    "old log-probs": ("log_probs",),
    "update": ("loss_forward", "backward", "optimizer"),
    "step": ("step",),
}


class DeviceStopwatch(Stopwatch):
    """Counts the work of the device to the phase that started it."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def timing(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def whole(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            synchronize(self.device)
            return result

        timed = super().timing(name, whole)

        @functools.wraps(function)
        def alone(*args: Any, **kwargs: Any) -> Any:
            synchronize(self.device)
            return timed(*args, **kwargs)

        return alone

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        synchronize(self.device)
        super().on_pre_optimizer_step(*args, **kwargs)

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        synchronize(self.device)
        super().on_optimizer_step(*args, **kwargs)


def make_config(job: StepJob, folder: Path) -> GRPOConfig:
    """Configure TRL. A micro-batch has as many rows as fit into micro_tokens, each padded."""
    micro_rows = max(1, job.micro_tokens // (job.prompt_tokens + job.longest))
    while job.rows % micro_rows:
        micro_rows -= 1
    return GRPOConfig(
        **ALGORITHM,
        **NO_REPORTS,
        output_dir=str(folder),
        use_cpu=job.device == "cpu",
        bf16=job.device == "cuda",  # autocast over fp32 parameters
        gradient_checkpointing=job.checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        seed=job.seed,
        per_device_train_batch_size=micro_rows,
        gradient_accumulation_steps=job.rows // micro_rows,
        num_generations=job.samples,
        max_completion_length=job.longest,
        generation_kwargs={"min_new_tokens": job.longest},
        top_k=0,
        learning_rate=LEARNING_RATE,
        max_grad_norm=CLIP_NORM,
        max_steps=job.steps,
    )


def even_share(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(np.mean(np.array(ids) % 2 == 0)) for ids in completion_ids]


def run(job: StepJob) -> dict[str, Any]:
    folder = Path(job.folder) / "trl"
    shutil.rmtree(folder, ignore_errors=True)
    watch = DeviceStopwatch(job.device)
    model: Any = AutoModelForCausalLM.from_pretrained(
        Path(job.folder) / "model", dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(Path(job.folder) / "model")
    prompts = digit_prompts(job, tokenizer)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=watch.timing("reward", even_share),
        args=make_config(job, folder),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=tokenizer,
        callbacks=[watch],
    )

    watch.attach(trainer, model)
    trainer.train()

    steps = []
    for line in watch.steps:
        seconds = {}
        for row, names in ROWS.items():
            seconds[row] = sum(line.get(name, 0.0) for name in names)
        steps.append(seconds)

    return {
        "versions": f"trl {trl.__version__}, {versions(job.device)}",
        "steps": steps,
        "response_tokens": round(watch.lengths[-1] * job.rows),
    }


if __name__ == "__main__":
    serve(run, __doc__)
