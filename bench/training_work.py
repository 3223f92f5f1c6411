"""The work of every side of `training.py`: rows to train on, and the timing.

A mini-batch is rows of random tokens, prompt and response, of about `tokens` tokens in all;
`lengths` says how long a row is, in the words of `rollout_work.py`. The loss is the policy gradient
at ratio 1, -sum(A exp(l - detach(l))) / M over all M response tokens, with a random advantage A for
each row. Prompts and responses are equal for all sides, so are the weights: mean log-prob and norm
of the gradient must agree.
"""

import gc
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from processes import JobFile, side_arguments
from rollout_models import random_model
from rollout_work import draw_limits, parse_lengths
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from verl.engine.flops import FlopsModel, model_flops_utilization
from verl.utils.peaks import phase_peaks
from verl.utils.units import GIB

SHORTEST_RESPONSE = 1
CLIP_NORM = 1.0
LEARNING_RATE = 1e-6


@dataclass(frozen=True, kw_only=True)
class Job(JobFile):
    """The work of one side."""

    folder: str  # of the model's config.json
    device: str
    vocabulary: int
    lengths: str  # of a row, prompt included: fixed:L or tail:L
    prompt_tokens: int  # of each row
    samples: int  # rows that share a prompt
    tokens: int  # of the mini-batch
    micro_tokens: int  # of a forward-backward pass
    checkpointing: bool
    optimizer: bool  # step too; without, gradients alone
    lora: int  # rank; 0 trains all weights
    entropy: bool  # computed in the update too, as trainers do for their logs
    compile: bool
    share_prompts: bool
    backend: str  # of torch.compile
    repeats: int
    seed: int
    checkpointing_share: float = 1.0  # of the layers, which only ours can choose
    keep_gathered: bool = False  # ours: bf16 weights stay from pass to pass


class Row(NamedTuple):
    """One trajectory."""

    prompt: torch.Tensor  # (P,) int64
    response: torch.Tensor  # (R,) int64
    advantage: float

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.response)


class Numbers(NamedTuple):
    """Results of a pass by which sides are compared: means over all response tokens."""

    loss: float
    log_prob: float


class Side(Protocol):
    """One engine with its model, ready to train on rows.

    Its calls return when the device is done.
    """

    versions: str

    def gradients(self, rows: list[Row]) -> Numbers:
        """Compute the gradients of the whole mini-batch, from zero."""
        ...

    def norm(self) -> float:
        """Return the L2 norm of the current gradients. Not timed."""
        ...

    def step(self) -> float:
        """Clip, step, and drop the gradients. Return their norm before the clipping."""
        ...

    def log_probs(self, rows: list[Row]) -> float:
        """Run the log-prob pass. Return the mean log-prob of the response tokens."""
        ...


def draw_rows(job: Job) -> list[Row]:
    """Draw whole prompts of `samples` rows, as many as fit into `tokens` tokens, at least one."""
    _, longest = parse_lengths(job.lengths)
    most = max(job.samples, 4 * job.tokens // longest * job.samples)
    lengths = draw_limits(job.lengths, most, job.seed)
    draw = np.random.default_rng(job.seed)
    rows: list[Row] = []

    num_tokens = 0
    for start in range(0, len(lengths), job.samples):
        group = lengths[start : start + job.samples]
        responses = np.maximum(group - job.prompt_tokens, SHORTEST_RESPONSE)
        num_tokens += responses.sum() + job.prompt_tokens * len(group)
        if rows and num_tokens > job.tokens:
            break

        prompt = torch.from_numpy(draw.integers(job.vocabulary, size=job.prompt_tokens))
        for count in responses:
            response = torch.from_numpy(draw.integers(job.vocabulary, size=count))
            rows.append(Row(prompt, response, float(draw.standard_normal())))

    return rows


def padded(rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Pad prompts on the left and responses on the right.

    Returns:
        Token ids and mask (B, P + R), and P, the longest prompt.
    """
    prompt_width = max(len(row.prompt) for row in rows)
    response_width = max(len(row.response) for row in rows)
    ids = torch.zeros(len(rows), prompt_width + response_width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        real = slice(prompt_width - len(row.prompt), prompt_width + len(row.response))
        ids[number, real] = torch.cat([row.prompt, row.response])
        mask[number, real] = 1
    return ids, mask, prompt_width


def trained_model(job: Job) -> PreTrainedModel:
    """Return the random model with fp32 parameters.

    With LoRA on CUDA its frozen weights stay bf16.
    """
    model = random_model(job.folder, job.device)
    return model if job.lora else model.float()


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def update_flops(job: Job, rows: list[Row]) -> tuple[float, float]:
    """Return model FLOPs of an update and of a log-prob pass.

    The head counts at response tokens alone, causal attention at its pairs, recomputation not at
    all. Frozen weights (LoRA) have no gradient of their own.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(job.folder))
    lengths = [row.length for row in rows]
    shape = FlopsModel.from_model(model)
    num_prompt_tokens = sum(len(row.prompt) for row in rows)
    head = model.get_output_embeddings().weight.numel()
    forward = shape.forward(lengths) - 2.0 * head * num_prompt_tokens
    update = 3.0 * forward
    if job.lora:
        pairs = sum(length * (length + 1) / 2 for length in lengths)
        attention = 4.0 * shape.attention_width * pairs * len(shape.windows)
        update -= forward - attention  # the gradients of all matrices
    return update, forward


def measure(side: Side, job: Job, start: float) -> dict[str, Any]:
    """Run a warm-up with all phases, then the timed repeats.

    Seconds are the best of the repeats, peaks the highest.
    """
    rows = draw_rows(job)
    recorder = _Recorder(job.device)
    before = side.log_probs(rows)
    numbers = side.gradients(rows)
    norm = side.norm()
    if job.optimizer:
        side.step()
    start_up_s = time.perf_counter() - start

    print(
        f"start-up {start_up_s:.1f} s, {numbers}, log-prob pass {before:.6f}, norm {norm:.6g}",
        flush=True,
    )
    for _ in range(job.repeats):
        recorder.time("log_prob", lambda: side.log_probs(rows))
        recorder.time("gradients", lambda: side.gradients(rows))
        if job.optimizer:
            recorder.time("optimizer", side.step)
        print(f"{recorder.seconds}", flush=True)

    train_flops, forward_flops = update_flops(job, rows)
    best = {name: min(seconds) for name, seconds in recorder.seconds.items()}
    update_s = best["gradients"] + best.get("optimizer", 0.0)
    device = torch.device(job.device)

    return {
        "versions": side.versions,
        "start_up_s": start_up_s,
        "rows": len(rows),
        "tokens": sum(row.length for row in rows),
        "response_tokens": sum(len(row.response) for row in rows),
        "seconds": recorder.seconds,
        "update_s": update_s,
        "optimizer_s": best.get("optimizer"),
        "log_prob_s": best["log_prob"],
        "update_mfu": model_flops_utilization(train_flops, update_s, device),
        "log_prob_mfu": model_flops_utilization(forward_flops, best["log_prob"], device),
        "update_peak_gib": max(
            recorder.peaks.get("gradients", 0.0), recorder.peaks.get("optimizer", 0.0)
        ),
        "log_prob_peak_gib": recorder.peaks.get("log_prob", 0.0),
        "loss": numbers.loss,
        "update_log_prob": numbers.log_prob,
        "log_prob": before,
        "grad_norm": norm,
    }


class _Recorder:
    """Seconds of every call and the device's peak memory, by name."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.seconds: dict[str, list[float]] = {}
        self.peaks: dict[str, float] = {}

    def time(self, name: str, work: Callable[[], object]) -> None:
        gc.collect()
        synchronize(self.device)
        if self.device == "cuda":
            phase_peaks.take(torch.device(self.device))
        start = time.perf_counter()
        work()
        synchronize(self.device)
        self.seconds.setdefault(name, []).append(time.perf_counter() - start)
        if self.device == "cuda":
            peak_gib = phase_peaks.take(torch.device(self.device))[0] / GIB
            self.peaks[name] = max(self.peaks.get(name, 0.0), peak_gib)


def serve(make: Callable[[Job], Side], description: str | None) -> None:
    """Measure the job that the command line names, and write the result as JSON."""
    arguments = side_arguments(description)
    job = Job.read(arguments.job)
    start = time.perf_counter()
    result = measure(make(job), job, start)
    arguments.json.write_text(json.dumps(result) + "\n", encoding="utf-8")
