"""The running requests of an engine, and the lines that report them."""

import time
from collections import Counter, deque
from dataclasses import dataclass, field

from verl.rollout.embedded.drafts import NgramDrafts
from verl.rollout.embedded.runner import Draws
from verl.rollout.embedded.scheduler import Scheduler
from verl.rollout.stopping import StopRule
from verl.rollout.types import Completion, SamplingParams
from verl.utils.logging import logger

PROGRESS_EVERY_S = 10.0


@dataclass
class Run:
    """The running requests, from the first `submit` until the last of them has ended."""

    params: SamplingParams
    rule: StopRule
    scheduler: Scheduler
    progress: "Progress"
    drafts: NgramDrafts | None
    counts: Counter[str] = field(default_factory=Counter)
    flight: deque[Draws] = field(default_factory=deque)
    finished: list[Completion] = field(default_factory=list)  # returned by the next step


class Progress:
    """One log line every PROGRESS_EVERY_S seconds of a long generation."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.finished = 0
        self.start = time.perf_counter()
        self.last_line = self.start

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.start

    def note(self, scheduler: Scheduler, finished: int, tokens: int) -> None:
        self.finished += finished
        now = time.perf_counter()
        if now - self.last_line < PROGRESS_EVERY_S:
            return
        self.last_line = now
        logger.info(
            f"rollout: {self.finished}/{self.total} samples done, {tokens} tokens at "
            f"{tokens / self.seconds:.0f}/s, {scheduler.running.size} running, "
            f"{len(scheduler.waiting)} waiting, {scheduler.pages.num_free} of "
            f"{scheduler.pages.num_pages} pages free"
        )
