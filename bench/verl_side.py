"""Our trainer at the work of `digit_task.py`, timed by its own `timing_s/*` metrics.

The result is a median each over the steps after the warm-up, in seconds. `--profile FILE` writes a
cProfile of those steps.
"""

import argparse
import cProfile
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import torch
import transformers
from digit_task import WARMUP_STEPS, add_task_arguments, medians, write_prompts, write_result
from runs import read_metrics

from verl.config.load import config_from_dict
from verl.protocol import DataProto
from verl.trainer.ppo_trainer import PPOTrainer

PHASES = ("gen", "reward", "old_log_prob", "adv", "update_actor", "sync_weights")


def make_config(arguments: argparse.Namespace, folder: Path) -> Any:
    """Configure GRPO as the peer: one update a batch, no KL, the plain text of the prompts."""
    return config_from_dict(
        {
            "data": {
                "train_files": str(folder / "prompts.jsonl"),
                "train_batch_size": arguments.prompts,
                "max_prompt_length": 32,
                "max_response_length": arguments.new,
                "shuffle": False,
            },
            "actor_rollout_ref": {
                "model": {
                    "path": str(arguments.model),
                    "custom_chat_template": "{{ messages[0].content }}",
                    "enable_gradient_checkpointing": False,
                },
                "rollout": {"n": arguments.samples, "ignore_eos": True, "temperature": 1.0},
                "actor": {
                    "loss_agg_mode": "seq-mean-token-mean",
                    "grad_clip": 1.0,
                    "optim": {"lr": arguments.lr, "weight_decay": 0.0},
                },
            },
            "algorithm": {"adv_estimator": "grpo"},
            "custom_reward_function": {"path": str(Path(__file__).parent / "digit_task.py")},
            "trainer": {
                "device": "cpu",
                "total_training_steps": arguments.steps,
                "logger": ["file"],
                "default_local_dir": str(folder / "run"),
                "resume_mode": "disable",
            },
        }
    )


def train(arguments: argparse.Namespace) -> list[dict[str, float]]:
    """Train, and return the metrics of every step."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_prompts(folder / "prompts.jsonl", arguments.prompts * arguments.steps)
        trainer = PPOTrainer(make_config(arguments, folder))
        trainer.init_workers()
        profile = profile_counted_steps(trainer) if arguments.profile else None
        trainer.fit()
        lines = read_metrics(folder / "run")
    if profile is not None:
        profile.disable()
        profile.dump_stats(arguments.profile)
    return lines


def profile_counted_steps(trainer: PPOTrainer) -> cProfile.Profile:
    """Start a profile after the warm-up.

    `run_step` is replaced on the object: a subclass with a `run_step` of its own might read the old
    log-probs, so the trainer would compute them.
    """
    profile = cProfile.Profile()
    run_step = trainer.run_step

    def profiled(prompts: DataProto) -> None:
        if trainer.global_step == WARMUP_STEPS:
            profile.enable()
        run_step(prompts)

    trainer.run_step = profiled
    return profile


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_task_arguments(parser, needs_model=True)
    parser.add_argument("--profile", type=Path, help="file for a cProfile of the counted steps")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    steps = train(arguments)

    seconds = [
        {name: step.get(f"timing_s/{name}", 0.0) for name in ("step", *PHASES)} for step in steps
    ]
    write_result(
        arguments.json,
        {
            **medians(seconds, PHASES),
            "versions": f"transformers {transformers.__version__}, torch {torch.__version__}",
            "reward_first": steps[0]["critic/score/mean"],
            "reward_last": steps[-1]["critic/score/mean"],
            "response_tokens": steps[-1]["response_length/mean"],
            "prompt_tokens": steps[-1]["prompt_length/mean"],
        },
    )


if __name__ == "__main__":
    main()
