"""The task of `grpo_cpu.py` and `async_cpu.py`: prompts, reward, and arguments of both sides."""

import argparse
import json
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WARMUP_STEPS = 2  # left out of every median: first touch of memory, lazy set-up


def make_prompts(count: int, seed: int = 0) -> list[str]:
    """Return prompts `Compute a + b =` for random a and b."""
    draw = random.Random(seed)
    return [f"Compute {draw.randint(0, 99)} + {draw.randint(0, 99)} =" for _ in range(count)]


def write_prompts(path: Path, count: int, seed: int = 0) -> None:
    """Write the prompts as rows of our data sets."""
    lines = []
    for text in make_prompts(count, seed):
        row = {
            "data_source": "digits",
            "prompt": [{"role": "user", "content": text}],
            "reward_model": {"style": "rule", "ground_truth": ""},
        }
        lines.append(json.dumps(row) + "\n")
    path.write_text("".join(lines), encoding="utf-8")


def digit_share(text: str) -> float:
    """Return the share of the characters that are digits.

    It is near 0 for an untrained model's prose, and 1 for digits alone.
    """
    return sum(character.isdigit() for character in text) / max(1, len(text))


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> float:
    """Return `digit_share`, as a reward function of ours."""
    return digit_share(solution_str)


def add_task_arguments(parser: argparse.ArgumentParser, *, needs_model: bool) -> None:
    """Add the arguments of both sides. `needs_model`: the script cannot make one."""
    parser.add_argument(
        "--model", type=Path, required=needs_model, help="folder of make_tiny_model.py"
    )
    parser.add_argument(
        "--steps", type=int, default=20, help=f"the first {WARMUP_STEPS} are not counted"
    )
    parser.add_argument("--prompts", type=int, default=16, help="prompts a step")
    parser.add_argument("--samples", type=int, default=8, help="responses a prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens of a response, forced")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="file for the result")


def medians(steps: Sequence[dict[str, float]], phases: Sequence[str]) -> dict[str, float]:
    """Return median seconds of `step`, of each phase and of the `rest`, over the counted steps.

    A phase that a step did not have took no time there.
    """
    rows = []
    for step in steps[WARMUP_STEPS:]:
        row = {name: step.get(name, 0.0) for name in ("step", *phases)}
        row["rest"] = row["step"] - sum(row[name] for name in phases)
        rows.append(row)
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def write_result(path: Path | None, result: dict[str, Any]) -> None:
    text = json.dumps(result)
    if path is None:
        print(text)
    else:
        path.write_text(text, encoding="utf-8")
