"""The least time of a rollout on one device: its reads and products at the best measured speeds.

The bound is additive. A decode step of r rows takes max(weights read, matrix products of r rows)
plus the reading of the keys and values of each row's context so far, within the window of a layer
that has one; prefill computes each distinct prompt once. Of E experts, r rows that choose k each at
random read the share 1 - (1 - k / E)^r. Sampling, norms and launches count nothing. The keys and
values of a prompt count for each of its samples; a kernel that reads them once for all samples of a
prompt may go below this bound.

Run `python bench/roofline.py` to measure this machine: a copy of 4 GiB, read and written, and a
product of two 8,192 x 8,192 bf16 matrices of random numbers.
"""

import argparse
import heapq
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import torch
from floor import REPEATS, Machine, Shape, measure_machine
from numpy.typing import NDArray

H200 = Machine(gflops=790e3, gb_per_s=4300.0)
COPIED_BYTES = 4 * 1024**3
MATRIX_SIZE = 8192
CPU_COPIED_BYTES = 64 * 1024**2


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Seconds of one rollout; `decode_steps` of them share `weights_s` and `cache_s`."""

    prefill_s: float
    weights_s: float  # the larger of reading them and multiplying with them, summed over the steps
    cache_s: float
    decode_steps: int

    @property
    def decode_s(self) -> float:
        return self.weights_s + self.cache_s

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s


def decode_schedule(
    limits: NDArray[np.int64], prompt_tokens: int, max_num_seqs: int, window: int | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows alive in each decode step, and the tokens of context that they read together.

    New tokens count too, and at most `window` of a row. All samples start together; where they
    are more than max_num_seqs, the longest start first and a slot that falls free is filled at
    once. A sample's first token comes from the prefill, so that it takes part in limit - 1 steps.
    """
    order = np.sort(limits)[::-1]
    free_from = [0] * min(max_num_seqs, len(order))
    # No schedule of a list is longer: the last row starts when all slots have shared the work of
    # the others at most.
    rows = np.zeros(int(np.sum(order - 1)) // max(1, len(free_from)) + int(order[0]), np.int64)
    context = np.zeros_like(rows)
    for limit in order.tolist():
        start = heapq.heappop(free_from)
        end = start + limit - 1
        rows[start:end] += 1
        read = prompt_tokens + np.arange(1, limit)
        context[start:end] += read if window is None else np.minimum(read, window)
        heapq.heappush(free_from, end)
    steps = max(free_from)
    return rows[:steps], context[:steps]


def rollout_roofline(
    machine: Machine,
    shape: Shape,
    limits: NDArray[np.int64],
    *,
    prompts: int,
    prompt_tokens: int,
    max_num_seqs: int,
    dtype_bytes: int,
) -> Roofline:
    """Return the bound for samples of `limits` (n,) tokens.

    They answer `prompts` distinct prompts of `prompt_tokens` tokens each.
    """
    flops = machine.gflops * 1e9
    bandwidth = machine.gb_per_s * 1e9
    # Embeddings that are not the output projection too are looked up, not read; `shape` leaves them
    # out.
    rows, context = decode_schedule(limits, prompt_tokens, max_num_seqs)
    _, windowed = decode_schedule(limits, prompt_tokens, max_num_seqs, shape.window)
    visited = 1 - (1 - shape.active) ** rows
    dense = shape.body + shape.head
    weights_read_s = (dense + shape.experts * visited) * dtype_bytes / bandwidth
    multiplied = shape.body + shape.experts * shape.active
    products_s = 2 * (multiplied + shape.head) * rows / flops
    cache_bytes = shape.cache_bytes / 4 * dtype_bytes  # `shape` counts fp32
    read_tokens = context.sum() * (1 - shape.windowed) + windowed.sum() * shape.windowed
    causal_pairs = prompts * prompt_tokens * (prompt_tokens + 1) / 2
    prefill = (
        2 * multiplied * prompts * prompt_tokens
        + 2 * shape.head * prompts
        + shape.attention * causal_pairs
    )

    return Roofline(
        prefill_s=max(prefill / flops, (dense + shape.experts) * dtype_bytes / bandwidth),
        weights_s=float(np.maximum(weights_read_s, products_s).sum()),
        cache_s=float(read_tokens * cache_bytes / bandwidth),
        decode_steps=len(rows),
    )


def measure(device: str) -> Machine:
    """Measure the best speeds of this machine in several runs: bf16 on CUDA, fp32 on CPU."""
    if device == "cpu":
        return measure_machine(CPU_COPIED_BYTES)
    source = torch.ones(COPIED_BYTES // 4, device=device)
    target = torch.empty_like(source)
    copy_s = _best_cuda(lambda: target.copy_(source))
    one = torch.randn(MATRIX_SIZE, MATRIX_SIZE, device=device, dtype=torch.bfloat16)
    other = torch.randn_like(one)
    product = torch.empty_like(one)
    product_s = _best_cuda(lambda: torch.mm(one, other, out=product))
    return Machine(
        gflops=2 * MATRIX_SIZE**3 / product_s / 1e9, gb_per_s=2 * COPIED_BYTES / copy_s / 1e9
    )


def _best_cuda(work: Callable[[], object]) -> float:
    """Return the least seconds on the device; the first runs choose kernels and raise the clock."""
    seconds = []
    for _ in range(REPEATS):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    print(json.dumps(asdict(measure(parser.parse_args().device))))


if __name__ == "__main__":
    main()
