"""The work of every side of `step.py`: GRPO steps with the same model and response lengths.

The model and a tokenizer lie in `folder/model`. The lengths of responses are those of
`rollout_work.py`, drawn once and imposed on every step.
"""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from processes import JobFile, side_arguments
from rollout_work import draw_limits, parse_lengths

from verl.utils.units import GIB

SAMPLED_EVERY_S = 0.02


@dataclass(frozen=True, kw_only=True)
class StepJob(JobFile):
    """The work of one side."""

    folder: str
    device: str
    vocabulary: int
    prompts: int
    samples: int
    prompt_tokens: int
    lengths: str  # of responses: fixed:L or tail:L
    steps: int  # the first is a warm-up
    micro_tokens: int  # of a forward-backward pass
    checkpointing: bool
    old_log_probs: bool  # a pass for them, though the whole batch is one update
    vllm_memory: float  # share of the device that vLLM may take
    backend: str  # of torch.compile
    seed: int
    verl_python: str = ""  # interpreter of the peer verl, if not this one
    verl_site: str = ""  # folder that holds the peer's package
    verl_attention: str = "sdpa"  # of transformers
    verl_set: tuple[str, ...] = ()  # further keys of the peer's configuration
    verl_timeout_s: float = 420.0

    @property
    def longest(self) -> int:
        return parse_lengths(self.lengths)[1]

    @property
    def rows(self) -> int:
        return self.prompts * self.samples

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)

    def limits(self) -> NDArray[np.int64]:
        """Return the number of tokens (prompts, samples) of each response."""
        return draw_limits(self.lengths, self.rows, self.seed).reshape(self.prompts, self.samples)


def digit_prompts(job: StepJob, tokenizer: Any) -> list[str]:
    """Return the prompts of all steps for a side that takes text: digits, each a token of its own.

    Raises RuntimeError if the tokenizer makes other tokens of them.
    """
    draw = np.random.default_rng(job.seed)
    digits = draw.integers(10, size=(job.prompts * job.steps, job.prompt_tokens))
    prompts = ["".join(map(str, row)) for row in digits]

    num_tokens = len(tokenizer(prompts[0])["input_ids"])
    if num_tokens != job.prompt_tokens:
        raise RuntimeError(f"a prompt of {job.prompt_tokens} digits has {num_tokens} tokens")
    return prompts


class DeviceMemory:
    """The most memory in use on the whole device, by any process, sampled every 20 ms."""

    def __init__(self, device: torch.device) -> None:
        self.peak_gib = 0.0
        self.device = device
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "DeviceMemory":
        if self.device.type == "cuda":
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        if self.device.type == "cuda":
            self._thread.join()

    def _look(self) -> None:
        while not self._done.wait(SAMPLED_EVERY_S):
            free, total = torch.cuda.mem_get_info()
            self.peak_gib = max(self.peak_gib, (total - free) / GIB)


def serve(run: Callable[[StepJob], dict[str, Any]], description: str | None) -> None:
    """Run the job that the command line names, and write its result as JSON.

    `run` returns `versions`, `steps` with the seconds of every phase, and further values to print.
    """
    arguments = side_arguments(description)
    job = StepJob.read(arguments.job)
    with DeviceMemory(job.torch_device) as memory:
        result = run(job)
    result["peak_gib"] = memory.peak_gib
    arguments.json.write_text(json.dumps(result) + "\n", encoding="utf-8")
