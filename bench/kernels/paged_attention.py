"""Decode attention over a paged cache, as a share of the memory bandwidth of one CUDA device.

Rows have between 256 and 1,280 keys, evenly. The pages of several layers interleave, as in the
engine, and a CUDA graph computes each layer once, so that no key is found in the L2 cache. For
every shape and batch the best launches of a sweep are printed, then how far each launch is from the
best over all batches, by which defaults are chosen.

In a rollout whose samples start together, rows are as long as one another. `--tail L` takes the
length at which a batch is left of `--samples` samples of tail:L (`rollout_work.py`), and 256 tokens
of prompts.

Run `python bench/kernels/paged_attention.py`; `--shapes qwen2.5-1.5b --batches 256` does a part of
it. With `--fresh` the rows' newest tokens come as the projections give them, and the kernel rotates
and stores them too. With `--small fp8` or `int8` keys and values are in eight bits with their
scales, which count as read. `--launches 64/4/2,64/4/3/168` tries these alone, the second with a
bound on registers, and more numbers of splits.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

# the package of this repository, installed or not, and the folder of benchmarks
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rollout_work import draw_limits
from triton.runtime.errors import OutOfResources

from verl.rollout.eight_bits import DTYPES, FP8, cached_bytes
from verl.rollout.embedded.kernels.decode_launch import (
    DecodeConfig,
    choose_num_splits,
    decode_config,
    fixed_num_splits,
    split_workspace,
)
from verl.rollout.embedded.kernels.paged_attention import Fresh, decode_attention

PAGE_SIZE = 16
SHORTEST = 256
LONGEST = 1280
BATCHES = (16, 64, 256, 1024)
MEMORY_GB_PER_S = 4300
READ_BYTES = 400e6  # by one replay of a graph: several times the L2 cache


class Shape(NamedTuple):
    heads: int
    kv_heads: int
    dim: int
    layers: int


SHAPES = {
    "qwen2.5-0.5b": Shape(14, 2, 64, 24),
    "qwen2.5-1.5b": Shape(12, 2, 128, 28),
    "qwen2.5-7b": Shape(28, 4, 128, 28),
}
LAUNCHES = [
    DecodeConfig(block_n, num_warps, num_stages)
    for (block_n, num_warps), num_stages in product(
        ((16, 1), (32, 1), (32, 2), (32, 4), (64, 2), (64, 4), (64, 8), (128, 4), (128, 8)),
        (2, 3, 4),
    )
]
LAUNCHES += [DecodeConfig(32, 2, 3, 168), DecodeConfig(64, 4, 3, 168)]


class Batch:
    """b rows in a cache of as many layers as it takes to read READ_BYTES."""

    def __init__(
        self,
        shape: Shape,
        rows: int,
        tokens: tuple[int, int],
        *,
        fresh: bool,
        small: torch.dtype | None,
    ) -> None:
        self.shape = shape
        self.rows = rows
        shortest, longest = tokens
        with torch.device("cuda"):
            lengths = torch.linspace(shortest, longest, rows)[torch.randperm(rows)]
            self.positions = lengths.int() - 1
            width = math.ceil(longest / PAGE_SIZE)
            self.table = torch.randperm(rows * width).view(rows, width).int()
            self.slots = torch.arange(rows, dtype=torch.int32)
            dtype = small or torch.bfloat16
            token_bytes = shape.kv_heads * cached_bytes(2 * shape.dim, dtype)
            self.read_bytes = int((self.positions + 1).sum()) * token_bytes
            self.layers = min(shape.layers, math.ceil(READ_BYTES / self.read_bytes))
            page = (2, shape.kv_heads, PAGE_SIZE, shape.dim)
            size = 1.0 if small in (None, FP8) else 30.0
            self.cache = torch.randn(rows * width, self.layers, *page, dtype=torch.bfloat16)
            self.cache = (self.cache * size).to(dtype)
            self.scales = None
            if small is not None:
                self.scales = torch.rand(rows * width, self.layers, *page[:-1])
            stacked = torch.randn(
                rows, (shape.heads + 2 * shape.kv_heads) * shape.dim, dtype=torch.bfloat16
            )
            self.q, k, v = stacked.unflatten(1, (-1, shape.dim)).tensor_split(
                (-2 * shape.kv_heads, -shape.kv_heads), 1
            )
            cos, sin = torch.randn(2, longest, shape.dim, dtype=torch.bfloat16)
            self.fresh = Fresh(k, v, cos, sin, None, None, 0.0) if fresh else None
            self.out = torch.empty(rows, shape.heads, shape.dim, dtype=torch.bfloat16)

        self.workspace = split_workspace(rows, shape.heads, shape.dim, 64, "cuda")

    def attend(self, **settings: Any) -> None:
        """Compute all layers once."""
        for layer in range(self.layers):
            keys, values = self.cache[:, layer].unbind(1)
            key_scales = value_scales = None
            if self.scales is not None:
                key_scales, value_scales = self.scales[:, layer].unbind(1)
            decode_attention(
                self.q,
                keys,
                values,
                self.table,
                self.slots,
                self.positions,
                self.out,
                key_scales=key_scales,
                value_scales=value_scales,
                scale=self.shape.dim**-0.5,
                workspace=self.workspace,
                fresh=self.fresh,
                **settings,
            )

    def microseconds(self, **settings: Any) -> float:
        """Return the time of one layer; infinity where the launch does not fit on an SM."""
        try:
            return graph_seconds(lambda: self.attend(**settings)) / self.layers * 1e6
        except OutOfResources:
            return math.inf


def graph_seconds(work: Callable[[], None], repeats: int = 7) -> float:
    """Return the median of several replays of a CUDA graph."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    times = []

    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)

    return statistics.median(times)


def launch(config: DecodeConfig) -> str:
    return "/".join(str(number) for number in config if number is not None)


def speed(batch: Batch, us: float) -> str:
    gb_per_s = batch.read_bytes / us / 1e3
    return f"{us:8.1f} us {gb_per_s:6.0f} GB/s {gb_per_s / MEMORY_GB_PER_S:5.2f}"


def tokens_of(rows: int, tail: int | None, samples: int) -> tuple[int, int]:
    """Return the fewest and the most keys of rows; see the module's docstring."""
    if tail is None:
        return SHORTEST, LONGEST
    limits = sorted(draw_limits(f"tail:{tail}", max(samples, rows), seed=0), reverse=True)
    tokens = SHORTEST + int(limits[rows - 1])
    return tokens, tokens


def sweep(
    batch: Batch, launches: Sequence[DecodeConfig], num_sms: int, best: int
) -> dict[DecodeConfig, float]:
    """Print the best launches at one batch.

    Returns:
        The microseconds of each launch with its best number of splits.
    """
    programs = batch.rows * batch.shape.kv_heads
    tried = (1, 2, 3, 4, 6, 8, 12, 16, 32) if launches == LAUNCHES else range(1, 33)
    counts = [count for count in tried if count == 1 or programs * count <= 32 * num_sms]
    times = {
        (config, count): batch.microseconds(config=config, num_splits=count)
        for config in launches
        for count in counts
    }

    print(f"  b = {batch.rows}, {batch.read_bytes / 1e6:.1f} MB a layer, {batch.layers} layers")
    for config, count in sorted(times, key=times.__getitem__)[:best]:
        print(f"    {launch(config):>9} splits {count:2d} {speed(batch, times[config, count])}")
    count = choose_num_splits(
        batch.rows,
        batch.shape.kv_heads,
        num_sms,
        widest=batch.shape.dim,
        eight_bits=batch.scales is not None,
    )
    config = decode_config(
        batch.shape.dim,
        batch.shape.dim,
        torch.bfloat16,
        eight_bits=batch.scales is not None,
        programs=programs * count,
    )

    us = batch.microseconds(config=config, num_splits=count)
    print(f"    {launch(config):>9} splits {count:2d} {speed(batch, us)}  the default")
    shown = {"best launch": launches}
    if launches != LAUNCHES:
        shown = {launch(config): [config] for config in launches}
    for name, configs in shown.items():
        by_count = [f"{n}: {min(times[config, n] for config in configs):.1f}" for n in counts]
        print(f"    us by splits, {name}: {' '.join(by_count)}")

    for split_tokens in (256, 512):
        us = batch.microseconds(split_tokens=split_tokens)
        splits = fixed_num_splits(batch.table.shape[1], PAGE_SIZE, split_tokens)
        print(f"    fixed splits of {split_tokens} (up to {splits}): {speed(batch, us)}")

    return {config: min(times[config, count] for count in counts) for config in launches}


def rank(results: list[dict[DecodeConfig, float]], best: int) -> None:
    """Print launches by their mean slowdown against the best launch of each batch."""
    slowdowns = {
        config: [times[config] / min(times.values()) for times in results] for config in results[0]
    }
    print("  launches over all batches: mean slowdown, and at each batch")
    for config in sorted(slowdowns, key=lambda config: sum(slowdowns[config]))[:best]:
        each = " ".join(f"{slowdown:.2f}" for slowdown in slowdowns[config])
        print(f"    {launch(config):>9} {statistics.mean(slowdowns[config]):.3f}  ({each})")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument(
        "--fresh", action="store_true", help="rotate and store the newest tokens as well"
    )

    parser.add_argument("--small", choices=DTYPES, help="keys and values in eight bits")
    parser.add_argument("--tail", type=int, metavar="L", help="rows of a rollout with tail:L")
    parser.add_argument("--samples", type=int, default=1024, help="samples of that rollout [1024]")
    parser.add_argument("--launches", help="launches to try, with commas [a sweep]")
    parser.add_argument("--best", type=int, default=4, help="launches to print at each batch")
    args = parser.parse_args()
    launches = LAUNCHES
    if args.launches is not None:
        launches = [DecodeConfig(*map(int, one.split("/"))) for one in args.launches.split(",")]
    torch.manual_seed(0)
    device = torch.cuda.get_device_properties(0)
    print(
        f"{device.name}, torch {torch.__version__}; launch = tokens of a block / warps / stages, "
        "and registers; fraction of 4.3 TB/s"
    )

    for name in args.shapes:
        print(name)
        results = []
        for rows in args.batches:
            tokens = tokens_of(rows, args.tail, args.samples)
            batch = Batch(
                SHAPES[name], rows, tokens, fresh=args.fresh, small=DTYPES.get(args.small)
            )
            results.append(sweep(batch, launches, device.multi_processor_count, args.best))
        rank(results, args.best)


if __name__ == "__main__":
    main()
