"""The work of every side of `rollout.py`, and how it is timed. Imports neither torch nor an engine.

How long each sample gets is drawn here and imposed on every engine in the same way: a limit of its
own, end-of-sequence ignored. `fixed:L` gives every sample L tokens. `tail:L` is long-tailed as the
answers in reinforcement learning on mathematics: log-normal with median 300 / 1024 of L and sigma
0.8, clipped to [L / 64, L]. For L = 1024 the median is 300, the mean near 380, and one sample in
sixteen is cut off at L. Samples of one prompt draw independently.
"""

import gc
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from processes import JobFile, side_arguments

# of `tail:L`; the first and the last as shares of L
MEDIAN = 300 / 1024
SIGMA = 0.8
SHORTEST = 1 / 64
WARM_UP_TOKENS = 16


class Ask(NamedTuple):
    """One prompt, and how many tokens each of its samples gets."""

    prompt_ids: tuple[int, ...]
    limits: tuple[int, ...]


class Answer(NamedTuple):
    """The checked facts of one sample."""

    num_tokens: int
    finite: bool | None  # whether all log-probs are; None from an engine that gives none


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One `generate` call: `prompts` prompts of `prompt_tokens` random tokens, `samples` samples of
    each."""

    prompts: int
    samples: int
    prompt_tokens: int
    lengths: str  # fixed:L or tail:L

    @property
    def name(self) -> str:
        return (
            f"{self.prompts} prompts x {self.samples}, {self.prompt_tokens} + {self.lengths} tokens"
        )

    def limits(self, seed: int) -> NDArray[np.int64]:
        """Return how many tokens each sample gets, (prompts, samples)."""
        return draw_limits(self.lengths, self.prompts * self.samples, seed).reshape(
            self.prompts, self.samples
        )


@dataclass(frozen=True, kw_only=True)
class Job(JobFile):
    """The work of one side, and the sizes that its engine is made with."""

    folder: str  # of the model's config.json
    device: str
    vocabulary: int
    max_num_seqs: int
    gpu_memory_utilization: float
    deterministic: bool  # the same bits whatever the batch, which ours alone can do
    repeats: int
    seed: int
    workloads: tuple[Workload, ...]
    quantization: str | None = None  # ours alone
    kv_cache_dtype: str = "auto"  # ours alone
    dtype: str = "bfloat16"  # vLLM's
    load_format: str = "dummy"  # vLLM's: random weights; auto: those in the folder

    @property
    def prompt_tokens(self) -> int:
        return max(workload.prompt_tokens for workload in self.workloads)

    @property
    def response_tokens(self) -> int:
        """Return the most tokens that a sample may get."""
        return max(parse_lengths(workload.lengths)[1] for workload in self.workloads)

    @classmethod
    def read(cls, path: Path) -> "Job":
        """Return the job of a file."""
        job = super().read(path)
        workloads: Any = job.workloads  # plain values in the file
        return replace(job, workloads=tuple(Workload(**values) for values in workloads))


class Side(Protocol):
    """One engine, ready to generate."""

    versions: str

    def prepare(self, asks: Sequence[Ask]) -> Any:
        """Prepare the same work in the engine's own words. Not timed."""
        ...

    def generate(self, prepared: Any) -> Any:
        """Draw all samples of all prompts, back on the host. This alone is timed."""
        ...

    def answers(self, generated: Any, asks: Sequence[Ask]) -> list[Answer]:
        """Return the result of `generate`, prompt by prompt and sample by sample. Not timed."""
        ...

    def statistics(self) -> dict[str, float]:
        """Return the engine's own counters of the last `generate`."""
        ...


def parse_lengths(text: str) -> tuple[str, int]:
    """Return the kind and the longest of `fixed:L` or `tail:L`. Raises ValueError otherwise."""
    kind, _, longest = text.partition(":")
    if kind not in ("fixed", "tail") or not longest.isdecimal() or int(longest) < 1:
        raise ValueError(
            f"Lengths are 'fixed:L' or 'tail:L' with L tokens, at least 1, got '{text}'. Try "
            "tail:1024."
        )
    return kind, int(longest)


def draw_limits(lengths: str, count: int, seed: int) -> NDArray[np.int64]:
    """Return numbers of tokens (count,); see the module's docstring."""
    kind, longest = parse_lengths(lengths)
    if kind == "fixed":
        return np.full(count, longest, np.int64)
    drawn = np.random.default_rng(seed).lognormal(math.log(MEDIAN * longest), SIGMA, count)
    return np.clip(np.rint(drawn).astype(np.int64), max(1, round(SHORTEST * longest)), longest)


def draw_prompts(
    count: int, length: int, vocabulary: int, seed: int, draw: int
) -> list[tuple[int, ...]]:
    """Return prompts of random tokens.

    Another `draw` gives other prompts, whose first tokens no prefix cache has seen.
    """
    ids = np.random.default_rng((seed, draw)).integers(vocabulary, size=(count, length))
    return [tuple(row) for row in ids.tolist()]


def check(answers: Sequence[Answer], asks: Sequence[Ask]) -> int:
    """Return the number of tokens.

    Raises RuntimeError unless every sample has its limit of tokens and finite log-probs.
    """
    limits = [limit for ask in asks for limit in ask.limits]
    if len(answers) != len(limits):
        raise RuntimeError(
            f"The engine was asked for {len(limits)} samples and gave {len(answers)}."
        )

    wrong = [
        number
        for number, (answer, limit) in enumerate(zip(answers, limits))
        if answer.num_tokens != limit
    ]
    if wrong:
        first = wrong[0]
        raise RuntimeError(
            f"{len(wrong)} of {len(limits)} samples do not have the length that was imposed; "
            f"sample {first} has {answers[first].num_tokens} tokens instead of {limits[first]}."
        )

    broken = sum(answer.finite is False for answer in answers)
    if broken:
        raise RuntimeError(f"{broken} of {len(limits)} samples have log-probs that are not finite.")
    return sum(limits)


def measure(side: Side, workload: Workload, job: Job, draws: Iterator[int]) -> dict[str, Any]:
    """Measure a warm-up at the full batch, then every repeat on prompts of its own.

    The lengths are those of the workload.
    """
    limits = workload.limits(job.seed)

    def generate(limits: NDArray[np.int64]) -> tuple[float, int]:
        prompts = draw_prompts(
            workload.prompts, workload.prompt_tokens, job.vocabulary, job.seed, next(draws)
        )
        asks = [Ask(prompt, tuple(row)) for prompt, row in zip(prompts, limits.tolist())]
        prepared = side.prepare(asks)
        gc.collect()
        start = time.perf_counter()
        generated = side.generate(prepared)
        seconds = time.perf_counter() - start
        return seconds, check(side.answers(generated, asks), asks)

    warm_up_s, _ = generate(limits.clip(max=WARM_UP_TOKENS))
    runs = [generate(limits) for _ in range(job.repeats)]
    print(f"{workload.name}: {', '.join(f'{seconds:.3f}' for seconds, _ in runs)} s", flush=True)
    return {
        "workload": workload.name,
        "warm_up_s": warm_up_s,
        "seconds": [seconds for seconds, _ in runs],
        "tokens": runs[0][1],
        "statistics": side.statistics(),
    }


def run_job(make: Callable[[Job], Side], job: Job) -> dict[str, Any]:
    """Run all measurements of one side.

    Start-up is making the engine, its model included, and one first token.
    """
    draws = itertools.count()
    start = time.perf_counter()
    side = make(job)
    construct_s = time.perf_counter() - start
    asks = [Ask(draw_prompts(1, job.prompt_tokens, job.vocabulary, job.seed, next(draws))[0], (1,))]
    check(side.answers(side.generate(side.prepare(asks)), asks), asks)
    start_up_s = time.perf_counter() - start
    print(
        f"start-up: {start_up_s:.2f} s, of which making the engine {construct_s:.2f} s", flush=True
    )

    results = [measure(side, workload, job, draws) for workload in job.workloads]
    return {
        "versions": side.versions,
        "construct_s": construct_s,
        "start_up_s": start_up_s,
        "workloads": results,
    }


def serve(make: Callable[[Job], Side], description: str | None) -> None:
    """Run the command line of a side: a job in a file, the result as one line of JSON in another."""
    arguments = side_arguments(description)
    result = run_job(make, Job.read(arguments.job))
    arguments.json.write_text(json.dumps(result) + "\n", encoding="utf-8")
