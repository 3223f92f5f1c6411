"""Countdown: reach a target with the given numbers and + - * /, as train.parquet and test.parquet.

    python examples/data_preprocess/countdown.py --train_size 20000 --num_numbers 3

Problems are drawn here, each with a known solution. The same seed makes the same files; no problem
of the test set is in the training set.
"""

import argparse
import operator
import random
import sys
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import pyarrow as pa

from verl.data.raw_files import write_tables
from verl.utils.entry import exit_code

DATA_SOURCE = "countdown"
MAX_MISSES = 20_000  # draws in a row without a new problem after which there is taken to be none
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
INSTRUCTION = (
    "Reach {target} with the numbers {numbers}: use each number exactly once, and only + - * / and "
    "brackets. Think step by step, then write the equation between <answer> and </answer>, for "
    "example <answer>(1 + 2) * 3</answer>."
)


class Problem(NamedTuple):
    """Numbers in the order shown, the target, and an equation that reaches it."""

    numbers: tuple[int, ...]
    target: int
    solution: str


def join_randomly(numbers: list[int], draw: random.Random) -> tuple[Fraction, str] | None:
    """Return value and text of a random equation over all numbers; None if it divides by zero."""
    parts = [(Fraction(number), str(number)) for number in numbers]
    while len(parts) > 1:
        a, left = parts.pop(draw.randrange(len(parts)))
        b, right = parts.pop(draw.randrange(len(parts)))
        sign = draw.choice("+-*/")
        if sign == "/" and b == 0:
            return None
        value = OPERATIONS[sign](a, b)
        parts.append((value, f"({left} {sign} {right})"))

    value, text = parts[0]
    if len(numbers) > 1:
        text = text[1:-1]  # without the outer brackets
    return value, text


def problems(
    draw: random.Random, *, num_numbers: int, max_number: int, max_target: int
) -> Iterator[Problem]:
    """Yield different problems until no more are found.

    A target is a whole number up to `max_target`, none of the numbers.
    """
    seen: set[tuple[tuple[int, ...], int]] = set()
    misses = 0
    while misses < MAX_MISSES:
        misses += 1
        numbers = [draw.randint(1, max_number) for _ in range(num_numbers)]
        joined = join_randomly(numbers, draw)
        if joined is None:
            continue

        value, text = joined
        is_whole = value.denominator == 1
        if not is_whole or not 1 <= value <= max_target or value in numbers:
            continue

        key = (tuple(sorted(numbers)), int(value))
        if key not in seen:
            seen.add(key)
            misses = 0
            yield Problem(tuple(numbers), int(value), text)


def make_row(problem: Problem, split: str, index: int) -> dict[str, Any]:
    """Return one row as the trainer reads it."""
    numbers = list(problem.numbers)
    return {
        "data_source": DATA_SOURCE,
        "prompt": [
            {"role": "user", "content": INSTRUCTION.format(target=problem.target, numbers=numbers)}
        ],
        "ability": "math",
        "reward_model": {
            "style": "rule",
            "ground_truth": {"target": problem.target, "numbers": numbers},
        },
        "extra_info": {"split": split, "index": index, "solution": problem.solution},
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "default: %(default)s"
    parser.add_argument(
        "--local_save_dir",
        "--local_dir",
        default="~/data/countdown",
        help=f"folder to write to; {default}",
    )
    for name, value, meaning in (
        ("train_size", 20_000, "problems to train on"),
        ("test_size", 512, "problems to test on"),
        ("num_numbers", 3, "numbers of a problem"),
        ("max_number", 50, "largest number"),
        ("max_target", 100, "largest target"),
        ("seed", 1, "seed of the draws"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{meaning}; {default}")

    options = parser.parse_args(arguments)
    for name in ("train_size", "test_size", "num_numbers", "max_number", "max_target"):
        least = 2 if name == "num_numbers" else 1
        number = getattr(options, name)
        if number < least:
            parser.error(f"--{name} must be at least {least}, got {number}")

    endless = problems(
        random.Random(options.seed),
        num_numbers=options.num_numbers,
        max_number=options.max_number,
        max_target=options.max_target,
    )

    tables = {}
    for split, size in (("test", options.test_size), ("train", options.train_size)):
        rows = [make_row(problem, split, index) for index, problem in zip(range(size), endless)]
        if len(rows) < size:
            parser.error(
                f"only {len(rows)} of {size} different {split} problems exist or were found; raise "
                "the limits"
            )
        tables[split] = pa.Table.from_pylist(rows)
    write_tables(options.local_save_dir, tables)


if __name__ == "__main__":
    sys.exit(exit_code(main))
