"""TRL's GRPOTrainer at the work of `digit_task.py`, timed from outside. Needs `pip install trl`.

The timed methods are public: the model's `generate` and `forward`, the trainer's `compute_loss`, its
accelerator's `backward`, the reward function, and the trainer's callbacks. The result is a median
each over the steps after the warm-up, in seconds.
"""

import argparse
import functools
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

# Before the libraries below read them.
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", WANDB_MODE="disabled")

import torch
import transformers
import trl
from datasets import Dataset
from digit_task import add_task_arguments, digit_share, make_prompts, medians, write_result
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

# The same algorithm as ours: one update a batch, no KL, advantages over the group's deviation.
ALGORITHM: dict[str, Any] = {
    "shuffle_dataset": False,
    "temperature": 1.0,
    "beta": 0.0,
    "loss_type": "grpo",
    "scale_rewards": "group",
    "num_iterations": 1,
    "lr_scheduler_type": "constant",
}
NO_REPORTS: dict[str, Any] = {
    "save_strategy": "no",
    "logging_steps": 1,
    "report_to": [],
    "disable_tqdm": True,
}
PHASES = ("gen", "reward", "log_probs", "loss_forward", "backward", "optimizer")


class Stopwatch(TrainerCallback):
    """Seconds of every phase of every step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.rewards: list[float] = []
        self.lengths: list[float] = []
        self.now: dict[str, float] = {}
        self.inside: list[str] = []

    def timing(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, which adds its time to `name`.

        A call within another timed call belongs to the outer one.
        """

        @functools.wraps(function)  # transformers looks at the parameters of `forward`
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self.inside:
                return function(*args, **kwargs)
            self.inside.append(name)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.inside.pop()
                self.now[name] = self.now.get(name, 0.0) + time.perf_counter() - start

        return timed

    def attach(self, trainer: GRPOTrainer, model: Any) -> None:
        """Time the phases of `trainer`, which trains `model`."""
        trainer.compute_loss = self.timing("loss_forward", trainer.compute_loss)
        trainer.accelerator.backward = self.timing("backward", trainer.accelerator.backward)
        model.generate = self.timing("gen", model.generate)
        # outside generate and compute_loss: old log-probs
        model.forward = self.timing("log_probs", model.forward)

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.now = {}
        self.start = time.perf_counter()

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.optimizer_start = time.perf_counter()

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.now["optimizer"] = time.perf_counter() - self.optimizer_start

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.now["step"] = time.perf_counter() - self.start
        self.steps.append(self.now)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "reward" in logs:
            self.rewards.append(float(logs["reward"]))
            self.lengths.append(float(logs["completions/mean_length"]))


def make_config(arguments: argparse.Namespace, folder: str) -> GRPOConfig:
    return GRPOConfig(
        **ALGORITHM,
        **NO_REPORTS,
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=0,
        per_device_train_batch_size=arguments.prompts * arguments.samples,
        gradient_accumulation_steps=1,
        num_generations=arguments.samples,
        max_completion_length=arguments.new,
        generation_kwargs={"min_new_tokens": arguments.new},
        learning_rate=arguments.lr,
        max_grad_norm=1.0,
        max_steps=arguments.steps,
    )


def train(arguments: argparse.Namespace, folder: str, watch: Stopwatch) -> None:
    """Run all steps, with `watch` around the parts."""

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [digit_share(text) for text in completions]

    model: Any = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=watch.timing("reward", reward),
        args=make_config(arguments, folder),
        train_dataset=Dataset.from_list(
            [{"prompt": text} for text in make_prompts(arguments.prompts * arguments.steps)]
        ),
        processing_class=AutoTokenizer.from_pretrained(arguments.model),
        callbacks=[watch],
    )
    watch.attach(trainer, model)
    trainer.train()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_task_arguments(parser, needs_model=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        train(arguments, folder, watch)

    versions = (
        f"trl {trl.__version__}, transformers {transformers.__version__}, torch {torch.__version__}"
    )
    write_result(
        arguments.json,
        {
            **medians(watch.steps, PHASES),
            "versions": versions,
            "reward_first": watch.rewards[0],
            "reward_last": watch.rewards[-1],
            "response_tokens": watch.lengths[-1],
        },
    )


if __name__ == "__main__":
    main()
