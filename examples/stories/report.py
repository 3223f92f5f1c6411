"""Report the reward of every seed of `run.sh`, and texts of the model from before and after.

Run `python examples/stories/report.py OUTPUT`, with the folder that `run.sh` wrote to. Prints
Markdown.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from verl.utils.entry import exit_code

WINDOW = 10  # most steps that the first and the last figure are means of
NUM_SAMPLES = 5


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def validation_score(lines: list[dict[str, Any]]) -> list[float]:
    """Return the mean reward on held-out pairs, of every validation in order."""
    scores = []
    for line in lines:
        for name, value in line.items():
            if name.startswith("val-core/") and "/mean@" in name:
                scores.append(value)
    return scores


def tenths(values: list[float]) -> list[float]:
    """Return the mean of each tenth of the values.

    It is the nearest value where there are fewer than ten.
    """
    means = []
    for tenth in range(10):
        start = len(values) * tenth // 10
        end = max(start + 1, len(values) * (tenth + 1) // 10)
        means.append(mean(values[start:end]))
    return means


def step_lines(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines of steps, without those of validations before and between them."""
    return [line for line in lines if "critic/score/mean" in line]


def window_of(num_steps: list[int]) -> int:
    """Return the steps that the first and the last figure of runs are means of: they share none."""
    return max(1, min(WINDOW, min(num_steps) // 2))


def curve_row(lines: list[dict[str, Any]], window: int) -> list[float]:
    """Return the figures of a run.

    They are first and last reward, validation before and after, KL, seconds a step, and the reward
    of each tenth of the run.
    """
    steps = step_lines(lines)
    rewards = [line["critic/score/mean"] for line in steps]
    validation = validation_score(lines)
    return [
        mean(rewards[:window]),
        mean(rewards[-window:]),
        validation[0],
        validation[-1],
        mean([line["actor/kl_loss"] for line in steps[-window:]]),
        mean([line["timing_s/step"] for line in steps]),
        *tenths(rewards),
    ]


def print_curves(folders: list[Path]) -> None:
    runs = [read_lines(folder / "metrics.jsonl") for folder in folders]
    window = window_of([len(step_lines(lines)) for lines in runs])
    rows = [curve_row(lines, window) for lines in runs]
    means = [mean([row[column] for row in rows]) for column in range(len(rows[0]))]
    print(
        f"| seed | first {window} steps | last {window} steps | held out, before | after | KL, "
        f"last {window} | s/step |"
    )
    print("|---|---|---|---|---|---|---|")
    names = [folder.name.removeprefix("seed_") for folder in folders]
    for name, row in zip([*names, "mean"], [*rows, means]):
        print(f"| {name} | " + " | ".join(f"{value:.3f}" for value in row[:6]) + " |")

    print("\nReward, mean over each tenth of the run:\n")
    numbers = " | ".join(str(number) for number in range(1, 11))
    print(f"| seed | {numbers} |\n" + "|---" * 11 + "|")
    for name, row in zip([*names, "mean"], [*rows, means]):
        print(f"| {name} | " + " | ".join(f"{value:.2f}" for value in row[6:]) + " |")


def print_samples(folder: Path) -> None:
    """Print the first sample of every few held-out prompts, before and after."""
    files = sorted((folder / "generations").glob("*.jsonl"), key=lambda path: int(path.stem))
    before = read_lines(files[0])
    after = read_lines(files[-1])
    every = len(before) // NUM_SAMPLES
    print(
        f"\nHeld-out prompts ({folder.name}), the same ones before and after, not picked by their "
        "reward:\n"
    )
    print("| prompt | reward | before | reward | after |\n|---|---|---|---|---|")

    for number in range(0, every * NUM_SAMPLES, every):
        prompt = before[number]["input"].removeprefix("<s>").strip()
        cells = [prompt]
        for row in (before[number], after[number]):
            text = row["output"].replace("|", "/").replace("<s>", "")
            cells += [f"{row['score']:.1f}", " ".join(text.split())]
        print("| " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    folders = sorted(
        arguments.output.glob("seed_*"), key=lambda folder: int(folder.name.removeprefix("seed_"))
    )

    if not folders:
        parser.error(
            f"'{arguments.output}' holds no seed_N folder. Run examples/stories/run.sh MODEL "
            "OUTPUT first."
        )

    print_curves(folders)
    print_samples(folders[0])


if __name__ == "__main__":
    sys.exit(exit_code(main))
