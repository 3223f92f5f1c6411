"""The best that can be assembled from parts at the work of `step.py`, which starts this script.

vLLM generates, the packed and compiled transformers model of `training_torch.py` learns, and takes
turns with vLLM on the device (sleep level 2, wake). Weights go over in buckets of bf16 within this
process. Needs `pip install vllm`.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Before vllm reads them: its engine in this process, so that weights are handed over without a
# copy, and functions may be sent to its worker.
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_ALLOW_INSECURE_SERIALIZATION="1")

import numpy as np
import torch
import vllm
from rollout_vllm import VLLM, graphs_up_to
from rollout_work import Ask, draw_prompts
from step_work import StepJob, serve
from training_torch import Torch
from training_work import Job, Row, synchronize
from transformers import AutoModelForCausalLM

BUCKET_BYTES = 2**30


class SleepingVLLM(VLLM):
    """vLLM as `rollout.py` runs it, which gives its memory back between rollouts."""

    def __init__(self, job: StepJob) -> None:
        self.engine = vllm.LLM(
            model=f"{job.folder}/model",
            load_format="dummy",  # the first hand-over brings the weights
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=job.prompt_tokens + job.longest,
            max_num_seqs=min(1024, job.rows),
            gpu_memory_utilization=job.vllm_memory,
            enable_sleep_mode=True,
            compilation_config=graphs_up_to(min(1024, job.rows)),
        )

    def take(self, buckets: Iterator[list[tuple[str, torch.Tensor]]]) -> None:
        """Wake the weights, fill them, and only then wake the cache."""
        self.engine.wake_up(tags=["weights"])
        for bucket in buckets:
            self.engine.apply_model(lambda model, bucket=bucket: len(model.load_weights(bucket)))
        self.engine.wake_up(tags=["kv_cache"])
        self.engine.reset_prefix_cache()


class Clock:
    """Seconds of the phases of one step."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}
        self._start = self._last = self._now()

    def _now(self) -> float:
        synchronize(self.device)
        return time.perf_counter()

    def lap(self, name: str) -> None:
        now = self._now()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def total(self) -> dict[str, float]:
        return {**self.seconds, "step": self._last - self._start}


def buckets(model: torch.nn.Module) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Yield all weights by name in bf16, about a GiB at a time; a tied weight once."""
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, parameter in model.named_parameters():
        bucket.append((name, parameter.detach().to(torch.bfloat16)))
        size += 2 * parameter.numel()
        if size >= BUCKET_BYTES:
            yield bucket
            bucket = []
            size = 0
    if bucket:
        yield bucket


def make_trainer(job: StepJob) -> Torch:
    """Make the side of `training.py`, with the weights of the folder."""
    sizes = Job(
        folder=f"{job.folder}/model",
        device=job.device,
        vocabulary=job.vocabulary,
        lengths=f"fixed:{job.prompt_tokens + job.longest}",
        prompt_tokens=job.prompt_tokens,
        samples=job.samples,
        tokens=0,  # draws no rows of its own
        micro_tokens=max(job.micro_tokens, job.prompt_tokens + job.longest),
        checkpointing=job.checkpointing,
        optimizer=True,
        lora=0,
        entropy=False,
        compile=True,
        share_prompts=False,
        backend=job.backend,
        repeats=1,
        seed=job.seed,
    )
    trainer = Torch(sizes)

    saved = AutoModelForCausalLM.from_pretrained(Path(sizes.folder), dtype=torch.float32)
    trainer.model.load_state_dict(saved.state_dict())
    return trainer


def to_rows(asks: list[Ask], outputs: list[Any]) -> list[Row]:
    """Return trajectories with GRPO's advantages.

    The reward is the share of even token ids, as in `gpu_step.py`.
    """
    rows: list[Row] = []
    requests = iter(outputs)
    for ask in asks:
        responses = []
        for _ in ask.limits:
            answer = next(requests).outputs[0]
            # A trainer reads the log-probs of the rollout, to compare them with its own.
            read = [at[token].logprob for token, at in zip(answer.token_ids, answer.logprobs)]
            assert read
            responses.append(tuple(answer.token_ids))

        rewards = np.array([np.mean(np.array(response) % 2 == 0) for response in responses])
        advantages = rewards
        if len(rewards) > 1:
            advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        prompt = torch.tensor(ask.prompt_ids)
        for ids, advantage in zip(responses, advantages):
            rows.append(Row(prompt, torch.tensor(ids), float(advantage)))

    return rows


def step(
    job: StepJob, number: int, rollout: SleepingVLLM, trainer: Torch
) -> tuple[dict[str, float], list[Row], float]:
    """Run one GRPO step. Return the seconds of each phase, the rows, and the gradient's norm."""
    limits = job.limits().tolist()
    prompts = draw_prompts(job.prompts, job.prompt_tokens, job.vocabulary, job.seed, number)
    asks = [Ask(prompt, tuple(row)) for prompt, row in zip(prompts, limits)]
    clock = Clock(job.device)
    outputs = rollout.generate(rollout.prepare(asks))
    clock.lap("generate")
    rollout.engine.sleep(level=2)
    clock.lap("weights")

    rows = to_rows(asks, outputs)
    clock.lap("rest")
    if job.old_log_probs:
        trainer.log_probs(rows)
        clock.lap("old log-probs")

    trainer.gradients(rows)
    norm = trainer.step()
    clock.lap("update")
    # Activations go back to the device, or vLLM finds no room to wake.
    if job.device == "cuda":
        torch.cuda.empty_cache()
    rollout.take(buckets(trainer.model))
    clock.lap("weights")

    return clock.total(), rows, norm


def run(job: StepJob) -> dict[str, Any]:
    rollout = SleepingVLLM(job)
    rollout.engine.sleep(level=2)
    trainer = make_trainer(job)
    rollout.take(buckets(trainer.model))
    steps: list[dict[str, float]] = []
    tokens = 0
    norm = 0.0

    for number in range(job.steps):
        seconds, rows, norm = step(job, number, rollout, trainer)
        tokens = sum(len(row.response) for row in rows)
        steps.append(seconds)
        print(f"step {number + 1}: {seconds}", flush=True)

    return {
        "versions": f"vllm {vllm.__version__}, {trainer.versions}",
        "steps": steps,
        "response_tokens": tokens,
        "grad_norm": norm,
    }


if __name__ == "__main__":
    serve(run, __doc__)
