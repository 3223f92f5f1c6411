"""The fused draw of the embedded engine against eager PyTorch, on one CUDA device.

Eager is `verl.rollout.sampling.sample`. Logits have Qwen2.5's vocabulary; ours is replayed as a
CUDA graph, as the engine does. GB/s counts one read of the logits, which is the floor of a draw
without filters. `--tune` adds the times of other ways to cut a row.
"""

import argparse
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# the package of this repository, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import triton

from verl.rollout.embedded.kernels.sampling import DrawState, Tuning, Workspace, draw
from verl.rollout.sampling import row_keys, sample, sample_keys
from verl.rollout.types import SamplingParams

VOCABULARY = 151_936
MODES = {
    "greedy": SamplingParams(max_new_tokens=1, temperature=0),
    "plain": SamplingParams(max_new_tokens=1),
    "top_p 0.95": SamplingParams(max_new_tokens=1, top_p=0.95),
    "top_k 50": SamplingParams(max_new_tokens=1, top_k=50),
    "both, min_p": SamplingParams(max_new_tokens=1, top_k=50, top_p=0.95, min_p=0.01),
}


def milliseconds(work: Callable[[], object]) -> float:
    """Return the median time of `work` with a cold cache."""
    median: Any = triton.testing.do_bench(work, warmup=10, rep=60, return_mode="median")
    return median


def replay(
    logits: torch.Tensor, params: SamplingParams, tuning: Tuning | None = None
) -> Callable[[], None]:
    """Capture the draw as a graph. Return its replay."""
    rows = logits.shape[0]
    device = logits.device
    state = DrawState(
        slots=torch.arange(rows, dtype=torch.int32, device=device),
        keys=torch.from_numpy(sample_keys(0, 0, np.arange(rows)).view(np.int64)).to(device),
        drawn=torch.zeros(rows, dtype=torch.int32, device=device),
        settings=torch.tensor(
            [params.temperature, params.top_p, params.min_p, float(params.top_k)], device=device
        ),
        tokens=torch.empty(rows, dtype=torch.int64, device=device),
        log_probs=torch.empty(rows, device=device),
    )
    workspace = Workspace(rows, logits.shape[1], device, tuning)
    filtered = params.top_k > 0 or params.top_p < 1 or params.min_p > 0

    def work() -> None:
        draw(logits, state, workspace, filtered=filtered, greedy=params.temperature == 0)

    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def compare(all_logits: dict[int, torch.Tensor]) -> None:
    print(f"{'rows':>5} {'':12} {'ours us':>8} {'eager us':>9} {'ratio':>6} {'GB/s':>6}")
    for (rows, logits), (name, params) in itertools.product(all_logits.items(), MODES.items()):
        keys = torch.from_numpy(
            row_keys(sample_keys(0, 0, np.arange(rows)), np.zeros(rows, np.int64))
        ).cuda()
        ours = milliseconds(replay(logits, params))
        eager = milliseconds(lambda: sample(logits, params, keys))  # noqa: B023
        speed = logits.nbytes / ours / 1e6
        print(
            f"{rows:>5} {name:12} {ours * 1e3:8.1f} {eager * 1e3:9.1f} {eager / ours:6.1f} "
            f"{speed:6.0f}"
        )


def tune(all_logits: dict[int, torch.Tensor]) -> None:
    cuts = [
        *(
            (name, Tuning(chunk=chunk, block=block))
            for name in ("plain", "greedy", "top_p 0.95")
            for chunk in (4096, 8192, 16384)
            for block in (256, 512, 1024)
        ),
        *(
            (name, Tuning(search_block=block, search_warps=warps))
            for name in ("top_p 0.95", "top_k 50")
            for block, warps in (
                (2048, 8),
                (4096, 8),
                (4096, 16),
                (8192, 8),
                (8192, 16),
                (16384, 16),
                (16384, 32),
            )
        ),
    ]
    print(f"\n{'microseconds at rows':60} " + " ".join(f"{rows:>7}" for rows in all_logits))

    for name, tuning in cuts:
        times = [
            milliseconds(replay(logits, MODES[name], tuning)) for logits in all_logits.values()
        ]
        cut = f"chunk {tuning.chunk} block {tuning.block}"
        if name not in ("plain", "greedy"):
            cut += f" search {tuning.search_block} warps {tuning.search_warps}"
        print(f"{name:12} {cut:47} " + " ".join(f"{time * 1e3:7.1f}" for time in times))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 256, 1024])
    parser.add_argument(
        "--spread", type=float, default=2.5, help="standard deviation of the logits"
    )
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--tune", action="store_true")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    dtype = getattr(torch, arguments.dtype)
    all_logits = {
        rows: torch.empty(rows, VOCABULARY, device="cuda", dtype=dtype) for rows in arguments.rows
    }
    for logits in all_logits.values():
        logits.normal_(std=arguments.spread)
    versions = f"torch {torch.__version__}, triton {triton.__version__}"

    print(f"{torch.cuda.get_device_name()}, {versions}, {arguments.dtype}, V {VOCABULARY}")
    compare(all_logits)
    if arguments.tune:
        tune(all_logits)


if __name__ == "__main__":
    main()
