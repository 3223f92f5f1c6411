"""Score gold and wrong answers of a few rows of a run's data, before anything is trained."""

import argparse
import sys

from verl.config.load import load_config
from verl.data.build import build_dataset
from verl.rewards.build import build_reward
from verl.rewards.manager import RewardManager
from verl.rewards.preflight import NUM_ROWS, Report, choose_rows, inspect_reward
from verl.trainer.setup import build_tokenizer, load_user_code
from verl.utils.errors import ConfigError


def main(argv: list[str] | None = None) -> int:
    """Print what each answer scores and what is odd about it. 1 where training on this reward makes
    no sense."""
    parser = argparse.ArgumentParser(
        prog="verl reward check",
        usage="verl reward check [--rows ROWS] [config.yaml] [key=value ...]",
        description=__doc__,
        epilog="Keys are those of the run: every key with its default is in `verl train --cfg job`.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--rows", type=int, default=NUM_ROWS, help=f"how many rows to try, by default {NUM_ROWS}"
    )
    arguments, rest = parser.parse_known_args(argv)
    report = check_reward(rest, arguments.rows)
    print(render(report))
    return 1 if report.faults else 0


def check_reward(overrides: list[str], num_rows: int) -> Report:
    """Try the reward that these keys configure on rows spread over the training data."""
    config = load_config(overrides)
    load_user_code(config)
    tokenizer = build_tokenizer(config)
    dataset = build_dataset(config, tokenizer, split="train")
    assert dataset is not None, "without training data build_dataset raises"
    manager = build_reward(config, tokenizer, num_examine=0)
    if not isinstance(manager, RewardManager):
        raise ConfigError(
            f"reward_model.reward_manager={config.reward_model.reward_manager} is no "
            "RewardManager: answers cannot be tried one by one. Derive it from "
            "verl.rewards.manager.RewardManager, or call it on a batch yourself."
        )
    return inspect_reward(choose_rows(dataset, num_rows), manager)


def render(report: Report) -> str:
    """One line an answer, then faults, suspicions and notes."""
    lines = []
    for probe in report.probes:
        answer = " ".join(probe.sample.solution_str.split())
        score = "failed" if probe.failure is not None else f"{probe.score:g}"
        lines.append(f"row {probe.row:<6} {probe.kind:<6} {score:>8}  {answer[:80]}")
    lines += ["", f"{report.seconds_a_call * 1000:.0f} ms a call"]
    lines += [f"FAULT: {text}" for text in report.faults]
    lines += [f"doubtful: {text}" for text in report.suspicions]
    lines += [f"note: {text}" for text in report.notes]
    if not report.faults and not report.suspicions:
        lines.append("The reward tells gold answers from wrong ones.")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
