"""How long the host works for the steps of a rollout, on a device that answers at once.

A CUDA device waits wherever a step of the host takes longer than its own. Requests, pages and
tables are those of the embedded engine; kernels, graphs and copies to a device are left out.

    python bench/host_steps.py --lengths tail:1024 --prompts 64 --samples 16
"""

import argparse
import gc
import itertools
import statistics
import time
from typing import Any

import numpy as np
import torch
from rollout_work import draw_limits, draw_prompts

from verl.rollout import Request, SamplingParams
from verl.rollout.embedded.cuda_runner import FRESH_PROGRAMS, REFILL_SHARE
from verl.rollout.embedded.device_slots import DeviceSlots
from verl.rollout.embedded.kernels import PROCESSORS
from verl.rollout.embedded.pages import PageAllocator
from verl.rollout.embedded.prefix_blocks import neighbors
from verl.rollout.embedded.run import Progress, Run
from verl.rollout.embedded.runner import Draws
from verl.rollout.embedded.samples import samples_of
from verl.rollout.embedded.scheduler import Scheduler
from verl.rollout.embedded.steps import Steps
from verl.rollout.stopping import StopRule
from verl.utils.arithmetic import ceil_div

VOCABULARY = 150_000
PAGE_SIZE = 16
PAGES = 60_000
PREFILL_TOKENS = 8192
KV_HEADS = 2
SMALL_ROWS = FRESH_PROGRAMS * PROCESSORS // KV_HEADS  # such steps read no shared pages


class InstantRunner:
    """Keeps the slots of a CUDA device, and draws random tokens."""

    spare_rows = 0

    def __init__(self, max_num_seqs: int, longest: int) -> None:
        self.random = np.random.default_rng(0)
        self.slots = DeviceSlots(
            max_num_seqs,
            0,
            width=ceil_div(longest, PAGE_SIZE),
            page_size=PAGE_SIZE,
            device=torch.device("cpu"),
            shifts=False,
        )

    def steps_at_once(self, scheduler: Scheduler) -> int:
        return 1

    def to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array)

    def prefill(self, sequences: Any, pages: Any, pictured: Any) -> torch.Tensor:
        return torch.zeros(len(sequences), 1)

    def copy_pages(self, pairs: Any) -> None:
        torch.tensor(pairs)

    def start(self, scheduler: Scheduler, slots: np.ndarray, hidden: torch.Tensor) -> Draws:
        self.slots.show(scheduler, slots)
        return self._draw(scheduler, slots)

    def decode(self, scheduler: Scheduler, slots: np.ndarray, steps: int) -> list[Draws]:
        slots = neighbors(scheduler, slots)
        self.slots.show(scheduler, slots, blocks=len(slots) > SMALL_ROWS)
        return [self._draw(scheduler, slots)]

    def _draw(self, scheduler: Scheduler, slots: np.ndarray) -> Draws:
        tokens = self.random.integers(VOCABULARY, size=len(slots))
        answer = tokens, np.zeros(len(slots), np.float32)
        return Draws.done(slots, scheduler.epoch[slots], answer)


def rollout(
    given: argparse.Namespace, runner: Any, pages: PageAllocator, number: int
) -> list[float]:
    """Return the seconds of every step of the host."""
    limits = draw_limits(given.lengths, given.prompts * given.samples, 0)
    prompts = draw_prompts(given.prompts, given.prompt_tokens, VOCABULARY, 0, number)
    ids = itertools.count()
    requests = []
    for prompt, own in zip(prompts, limits.reshape(given.prompts, -1).tolist()):
        sample_ids = tuple(itertools.islice(ids, len(own)))
        requests.append(Request(prompt_ids=prompt, sample_ids=sample_ids, limits=tuple(own)))

    params = SamplingParams(max_new_tokens=int(limits.max()), temperature=1.0, ignore_eos=True)
    longest = given.prompt_tokens + int(limits.max())
    gc.collect()  # as `rollout.py` does
    scheduler = Scheduler(
        samples_of(requests, params, 0, number, longest),
        pages,
        max_num_seqs=limits.size,
        max_num_batched_tokens=PREFILL_TOKENS,
        refill=max(1, int(REFILL_SHARE * limits.size)),
        prefix_caching=True,
    )
    runner.slots.forget()
    run = Run(params, StopRule(params, [], None), scheduler, Progress(limits.size), None)
    steps = Steps(runner)
    seconds = []
    while scheduler.has_work:
        start = time.perf_counter()
        launched = steps.launch(run)
        run.flight.extend(launched)
        while run.flight and (not launched or len(run.flight) > 1):
            steps.collect(run)
        seconds.append(time.perf_counter() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--lengths", default="tail:1024", help="fixed:L or tail:L")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()

    torch.set_num_threads(1)
    longest = int(given.lengths.partition(":")[2])
    runner = InstantRunner(given.prompts * given.samples, given.prompt_tokens + longest)
    pages = PageAllocator(PAGES, PAGE_SIZE)
    print("| rollout | steps | all, s | median, ms | over 1 ms | their sum, ms | longest, ms |")
    print("|---|---|---|---|---|---|---|")
    for number in range(given.repeats):
        seconds = rollout(given, runner, pages, number)
        long = [each for each in seconds if each > 1e-3]
        print(
            f"| {number} | {len(seconds)} | {sum(seconds):.3f} | "
            f"{1e3 * statistics.median(seconds):.3f} | {len(long)} | {1e3 * sum(long):.0f} | "
            f"{1e3 * max(seconds):.1f} |"
        )


if __name__ == "__main__":
    main()
