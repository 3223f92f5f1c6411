"""Capture the kernels of a step as a CUDA graph."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from verl.utils.garbage import not_collecting


def captured(
    step: Callable[[], None], stream: torch.cuda.Stream, pool: Any, *, errors_of: str
) -> torch.cuda.CUDAGraph:
    """Return a graph of the kernels that `step` launches.

    They must have been compiled. If `step` raises, the capture is ended, and `pool` may still count
    as in use by it.

    Args:
        step: to be captured.
        stream: of the capture.
        pool: of the graph's memory.
        errors_of: the threads whose calls must not break the capture, "global" or "thread_local".
    """
    graph = torch.cuda.CUDAGraph()
    # Not torch.cuda.graph: it collects garbage and empties the allocator's cache at every capture.
    # A collection during the capture may free device memory, which breaks it.
    with torch.cuda.stream(stream), not_collecting():
        try:
            graph.capture_begin(pool=pool, capture_error_mode=errors_of)
            step()
        # Interrupts too: a stream that is still capturing refuses all other work.
        except BaseException:
            # This error only repeats that the capture is broken.
            with suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
    return graph
