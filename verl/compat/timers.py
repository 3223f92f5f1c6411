"""Timers of phases and logs of GPU memory, by verl 0.5's names (`verl.utils.debug`)."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from verl.utils.logging import logger as own_logger


@contextmanager
def simple_timer(name: str, timing_raw: dict[str, float]) -> Iterator[None]:
    """Add the seconds of this context to `timing_raw[name]`."""
    start = time.perf_counter()
    yield
    timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - start


@contextmanager
def marked_timer(
    name: str,
    timing_raw: dict[str, float],
    color: str | None = None,
    domain: str | None = None,
    category: str | None = None,
) -> Iterator[None]:
    """Time as `simple_timer` does; ignore `color`, `domain` and `category`, marks of a profiler."""
    with simple_timer(name, timing_raw):
        yield


def log_gpu_memory_usage(
    head: str, logger: Any = None, level: int = logging.DEBUG, rank: int = 0
) -> None:
    """Log allocated and reserved GiB of the current GPU, if there is one."""
    if not torch.cuda.is_available():
        return
    allocated = torch.cuda.memory_allocated() / 2**30
    reserved = torch.cuda.memory_reserved() / 2**30
    message = f"{head}, allocated {allocated:.2f} GiB, reserved {reserved:.2f} GiB"
    (logger or own_logger).log(level, message)
