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


def watcher() -> FlatRewards:
    return FlatRewards(
        config_from_dict(
            {"data": {"dataset_name": "toy"}, "actor_rollout_ref": {"model": {"path": "toy"}}}
        )
    )


def scored(*scores: float) -> DataProto:
    """Return responses of two tokens, the first one from a tool; two to a prompt."""
    size = len(scores)
    columns = {
        "token_level_scores": torch.tensor(scores)[:, None],
        "responses": torch.ones(size, 2, dtype=torch.int64),
        "attention_mask": torch.ones(size, 3, dtype=torch.int64),
        "response_mask": torch.tensor([[0, 1]] * size),
    }
    uids = torch.arange(size) // 2
    return DataProto.from_dict(columns, {"uid": uids.numpy().astype(object)})


def test_responses_of_agents_that_were_cut_are_named_as_a_cause(caplog):
    watching = watcher()
    for step in range(3):
        watching.watch(scored(1.0, 1.0), step)
    assert "responses are cut (100% fill data.max_response_length" in caplog.text


def test_lucky_steps_between_flat_ones_bring_no_further_warnings(caplog):
    watching = watcher()
    for step in range(400):
        lucky = step % 5 == 4
        watching.watch(scored(1.0, 0.0 if lucky else 1.0), step)
    warnings = [each for each in caplog.records if "Nothing to learn" in each.message]
    assert len(warnings) == 1
