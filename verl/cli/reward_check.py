"""Score gold and wrong answers of a few rows of a run's data, before anything is trained."""

import argparse
import sys
from collections.abc import Mapping
from typing import Any

from verl.config.command_line import names_a_file
from verl.config.load import load_config
from verl.config.train import TrainConfig
from verl.data.build import build_dataset, data_files
from verl.data.files import as_file_list, open_rows
from verl.diagnostics.parts import load_user_code
from verl.rewards.build import build_reward
from verl.rewards.manager import RewardManager
from verl.rewards.preflight import NUM_ROWS, Report, choose_rows, inspect_reward
from verl.trainer.setup import build_tokenizer, picture_reader
from verl.utils.entry import exit_code
from verl.utils.errors import ConfigError


def main(argv: list[str] | None = None) -> int:
    """Print the score of each answer and the suspicions about it.

    Returns 1 if training on this reward makes no sense.
    """
    parser = argparse.ArgumentParser(
        prog="verl reward check",
        usage="verl reward check [--rows ROWS] [config.yaml] [key=value ...]",
        description=__doc__,
        epilog="Keys are those of the run. `verl train --cfg job` prints each with its default.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--rows", type=int, default=NUM_ROWS, help=f"how many rows to try, by default {NUM_ROWS}"
    )
    arguments, rest = parser.parse_known_args(argv)
    if arguments.rows < 1:
        parser.error(f"--rows must be at least 1, got {arguments.rows}")

    report = check_reward(rest, arguments.rows)
    print(render(report))
    return 1 if report.faults else 0


def check_reward(overrides: list[str], num_rows: int) -> Report:
    """Try the reward that these keys configure on rows spread over the training data.

    No prompt is tokenized, unless the rows come from a dataset class of the user's, which takes the
    tokenizer, or the reward gets their images, which the model's processor reads.
    """
    config = load_config(_with_a_model(overrides))
    load_user_code(config)
    tokenizer: Any = None
    if config.data.custom_cls.path is not None or config.reward_model.images:
        tokenizer = build_tokenizer(config)
        pictures = picture_reader(config, tokenizer)
        dataset = build_dataset(config, tokenizer, split="train", pictures=pictures)
    else:
        dataset = FileRows(config)
    assert dataset is not None, "without training data build_dataset raises"

    manager = build_reward(config, tokenizer, num_examine=0)
    if not isinstance(manager, RewardManager):
        raise ConfigError(
            f"reward_model.reward_manager={config.reward_model.reward_manager} is no "
            "RewardManager: answers cannot be tried one by one. Derive it from "
            "verl.rewards.manager.RewardManager, or call it on a batch yourself."
        )
    return inspect_reward(
        choose_rows(dataset, num_rows),
        manager,
        plays_episodes=config.actor_rollout_ref.rollout.uses_agents,
    )


class FileRows:
    """Rows of the training files, in order, with the columns of each file."""

    def __init__(self, config: TrainConfig) -> None:
        self._sources = [open_rows(file) for file in as_file_list(data_files(config.data, "train"))]

    def __len__(self) -> int:
        return sum(len(rows) for rows in self._sources)

    def __getitem__(self, item: int) -> Mapping[str, Any]:
        for rows in self._sources:
            if item < len(rows):
                return rows.row(item)
            item -= len(rows)
        raise IndexError(item)


def _with_a_model(overrides: list[str]) -> list[str]:
    """Add the packaged model if none is named, because a configuration must have one."""
    is_named = any("actor_rollout_ref.model.path=" in override for override in overrides)
    has_file = any(
        override.startswith(("--config", "-c")) or names_a_file(override) for override in overrides
    )
    return overrides if is_named or has_file else ["actor_rollout_ref.model.path=toy", *overrides]


def render(report: Report) -> str:
    """Return one line for each answer, then faults, suspicions and notes."""
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
        lines.append(_verdict(report))
    return "\n".join(lines)


def _verdict(report: Report) -> str:
    """Return the last line of a report without faults and suspicions."""
    if any(probe.kind == "gold" for probe in report.sound):
        return "Gold answers score above wrong ones."
    return (
        "No row has a gold answer to try, so this does not show whether right answers score above "
        "wrong ones. Gold answers come from reward_model.ground_truth, or from extra_info.answer "
        "or extra_info.solution."
    )


if __name__ == "__main__":
    sys.exit(exit_code(main))
