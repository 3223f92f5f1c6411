"""The hand-over benchmark runs on the CPU, alone and on two ranks."""

import sys
from pathlib import Path
from typing import Any

from tests.distributed.ranks import Ranks

BENCH = str(Path(__file__).resolve().parents[2] / "bench")


def run_tiny() -> list[Any]:
    sys.path.insert(0, BENCH)
    import importlib

    bench = importlib.import_module("weight_sync")
    results = bench.main(["--tiny", "--repeats", "1"])
    return [tuple(result) for result in results] + [result.row() for result in results]


def check(answer: list[Any], ranks: int) -> None:
    (name, size, num_bytes, bound_s, hand_over_s, proved_s, _), row = answer
    # 2 layers of 64 x (64 + 2 x 32) + 64 x 64 + 3 x 64 x 128 and their vectors, 2048 x 64 tied
    # embeddings, in bf16
    vectors = 2 * (2 * 64 + 64 + 2 * 32) + 64
    assert (name, size) == ("tiny", ranks)
    assert num_bytes == 2 * (2 * (64 * 128 + 64 * 64 + 3 * 64 * 128) + vectors + 2048 * 64)
    assert min(bound_s, hand_over_s, proved_s) > 0
    assert f"| {bound_s / hand_over_s:.2f} |" in row


def test_the_benchmark_runs_alone():
    check(run_tiny(), 1)


def test_the_benchmark_runs_on_two_ranks(two_ranks: Ranks):
    for answer in two_ranks.call(run_tiny):
        check(answer, 2)
