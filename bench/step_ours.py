"""Our trainer at the work of `step.py`, which starts this script.

It is the run of `gpu_step.py`, timed by the trainer.
"""

import argparse
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_step import RandomPrompts, even_share, make_config
from rollout_models import versions
from runs import read_metrics
from step_work import StepJob, serve

from verl.rollout import Request
from verl.trainer.ppo_trainer import PPOTrainer

# A row of `step.py`'s table, and the phase of the trainer that it is.
ROWS = {
    "generate": "timing_s/gen",
    "old log-probs": "timing_s/old_log_prob",
    "update": "timing_s/update_actor",
    "weights": "timing_s/sync_weights",
    "step": "timing_s/step",
}


def impose_lengths(rollout: Any, job: StepJob) -> None:
    """Give every sample of a step its length. The trainer has no key for that."""
    generate = rollout.generate
    limits = job.limits().tolist()

    def limited(requests: list[Request], *arguments: Any, **named: Any) -> Any:
        asked = []
        for request, row in zip(requests, limits, strict=True):
            asked.append(replace(request, limits=tuple(row)))
        return generate(asked, *arguments, **named)

    rollout.generate = limited


def run(job: StepJob) -> dict[str, Any]:
    folder = Path(job.folder)
    shutil.rmtree(folder / "run", ignore_errors=True)
    sizes = argparse.Namespace(
        prompts=job.prompts,
        samples=job.samples,
        prompt_tokens=job.prompt_tokens,
        new_tokens=job.longest,
        steps=job.steps,
        micro_tokens=job.micro_tokens,
        no_checkpointing=not job.checkpointing,
    )

    config = make_config(sizes, folder, job.torch_device)
    trainer = PPOTrainer(
        config,
        reward_fn=even_share,
        val_reward_fn=even_share,
        train_dataset=RandomPrompts(job.prompts * job.steps, job.prompt_tokens, job.vocabulary),
    )
    trainer.reads_old_log_probs = job.old_log_probs

    trainer.init_workers()
    impose_lengths(trainer.rollout_wg.worker.engine, job)
    trainer.fit()
    lines = read_metrics(folder / "run")

    return {
        "versions": versions(job.device),
        "steps": [
            {row: line[phase] for row, phase in ROWS.items() if phase in line} for line in lines
        ],
        "response_tokens": round(lines[-1]["response_length/mean"] * job.rows),
        "grad_norm": lines[-1]["actor/grad_norm"],
        "probs_diff": max(line["training/rollout_probs_diff_max"] for line in lines),
    }


if __name__ == "__main__":
    serve(run, __doc__)
