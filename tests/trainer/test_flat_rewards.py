"""Steps without a difference between scores are reported occasionally."""

from pathlib import Path

import pytest
import torch

from tests.trainer.runs import run
from verl.config import config_from_dict
from verl.protocol import DataProto
from verl.trainer.flat_rewards import FlatRewards, is_flat


@pytest.mark.parametrize(
    ("scores", "groups", "flat"),
    [
        ([0.0, 0.0, 0.0, 0.0], [0, 0, 1, 1], True),
        ([1.0, 1.0, 0.0, 0.0], [0, 0, 1, 1], True),
        ([1.0, 0.0, 0.0, 0.0], [0, 0, 1, 1], False),
        ([1.0, 0.0, 0.0], [0, 1, 2], False),
        ([0.5, 0.5, 0.5], [0, 1, 2], True),
        ([], [], False),
    ],
)
def test_flat_means_no_difference_within_any_group(scores, groups, flat):
    assert is_flat(torch.tensor(scores), torch.tensor(groups)) is flat


@pytest.mark.parametrize(
    ("score", "steps"), [("0.0", ["3", "6"]), ("float(len(solution_str) % 2)", [])]
)
def test_a_run_with_nothing_to_learn_reports_it(tmp_path: Path, capfd, score, steps):
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        f"    return {score}\n"
    )
    own = [f"custom_reward_function.path={reward}", "reward_model.preflight=false"]
    assert run(tmp_path / "run", *own, "trainer.max_steps=7", "trainer.test_freq=-1") == 0
    lines = [
        line for line in capfd.readouterr().out.splitlines() if "Nothing to learn from" in line
    ]
    assert len(lines) == len(steps)
    for line, step in zip(lines, steps):
        assert f"in the last {step} steps, to step {step}: all responses score 0." in line
        assert "rollout.n is too small" in line


def test_lucky_steps_between_flat_ones_bring_no_further_warnings(caplog):
    config = config_from_dict(
        {"data": {"dataset_name": "toy"}, "actor_rollout_ref": {"model": {"path": "toy"}}}
    )
    watcher = FlatRewards(config)

    def scored(*scores: float) -> DataProto:
        columns = {
            "token_level_scores": torch.tensor(scores)[:, None],
            "response_mask": torch.ones(len(scores), 1),
        }
        uids = torch.arange(len(scores)) // 2
        return DataProto.from_dict(columns, {"uid": uids.numpy().astype(object)})

    for step in range(400):
        lucky = step % 5 == 4
        watcher.watch(scored(1.0, 0.0 if lucky else 1.0), step)
    warnings = [each for each in caplog.records if "Nothing to learn" in each.message]
    assert len(warnings) == 1
