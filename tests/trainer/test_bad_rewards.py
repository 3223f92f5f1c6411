"""A reward that fails ends in one clear message and exit code 1, or its samples are dropped."""

import json

import pytest

from tests.trainer.bad_inputs import message, reward_file
from tests.trainer.runs import metric_lines, run, step_lines
from verl.tracking.backends import FileBackend
from verl.trainer.ppo_trainer import PPOTrainer
from verl.utils.errors import RewardError


def test_a_reward_that_is_not_a_number(tmp_path, capfd):
    text = message(capfd, run(tmp_path, *reward_file(tmp_path, "return math.nan")))
    assert "row 0" in text
    assert "nan, not a finite" in text


def test_a_reward_function_that_raises(tmp_path, capfd):
    text = message(capfd, run(tmp_path, *reward_file(tmp_path, "raise KeyError('no such answer')")))
    assert "KeyError: 'no such answer'" in text.splitlines()[0]
    assert 'reward.py", line 4' in text, "where in the user's file"


def test_a_reward_function_with_a_missing_package(tmp_path, capfd):
    path = tmp_path / "reward.py"
    path.write_text("import math\nimport not_there.part\n", encoding="utf-8")
    expected = (
        f"'{path}', line 2: the package 'not_there' is not installed. Install it: pip install "
        "not_there"
    )
    assert message(capfd, run(tmp_path, f"custom_reward_function.path={path}")).startswith(expected)


def test_a_reward_function_that_sleeps(tmp_path, capfd):
    slow = reward_file(tmp_path, "time.sleep(600)")
    text = message(capfd, run(tmp_path, *slow, "reward_model.timeout_s=0.2"))
    assert "no answer within 0.2 s" in text
    assert "reward_model.timeout_s" in text


def test_a_failing_reward_may_count_as_zero(tmp_path):
    fails = reward_file(tmp_path, "raise KeyError('no such answer')")
    assert run(tmp_path, *fails, "reward_model.on_error=zero") == 0
    for line in step_lines(tmp_path):
        assert line["reward/num_errors"] == 16
        assert line["critic/score/mean"] == 0


def test_dropped_samples_count_nowhere(tmp_path):
    """Raise for samples of two characters, and give 1 to the others.

    If the dropped samples counted as 0, the others would get an advantage above it.
    """
    some = reward_file(tmp_path, "return 1 if len(solution_str) != 2 else {}['odd']")
    assert run(tmp_path, *some, "reward_model.on_error=drop", "actor_rollout_ref.rollout.n=8") == 0
    for line in step_lines(tmp_path):
        assert 0 < line["reward/num_errors"] < 32
        assert line["critic/score/min"] == line["critic/score/max"] == 1
        highest = line["critic/advantages/max"]
        assert highest < 1e-3 or highest == pytest.approx(1, abs=1e-3), (
            "0, or the plain reward of one left alone"
        )


def test_samples_with_dropped_rewards_count_in_no_validation(tmp_path):
    """Raise for short answers, and give 1 to the others.

    Dropped rewards are neither in the scores nor among the samples.
    """
    body = "return {'score': 1, 'pred': solution_str} if len(solution_str) != 2 else {}['odd']"
    sampled = [
        f"actor_rollout_ref.rollout.val_kwargs.{name}"
        for name in ("n=4", "do_sample=True", "temperature=1.0")
    ]
    folder = tmp_path / "validation"
    asked = [
        "trainer.val_only=True",
        "trainer.val_before_train=True",
        f"trainer.validation_data_dir={folder}",
    ]

    assert (
        run(tmp_path, *reward_file(tmp_path, body), "reward_model.on_error=drop", *sampled, *asked)
        == 0
    )
    rows = [json.loads(line) for line in (folder / "0.jsonl").read_text().splitlines()]
    assert 0 < len(rows) < 40
    assert all(row["score"] == 1 and len(row["pred"]) != 2 for row in rows)
    (line,) = metric_lines(tmp_path)

    scores = {value for name, value in line.items() if name.startswith("val-") and "/mean@" in name}
    assert scores == {1.0}


def test_a_tracker_does_not_hide_the_error_of_a_validation(tmp_path, capfd, monkeypatch):
    def fails(self):
        raise RewardError("the first error")

    def fails_later(self):
        raise ValueError("the second error")

    monkeypatch.setattr(PPOTrainer, "validate", fails)
    monkeypatch.setattr(FileBackend, "finish", fails_later)
    assert run(tmp_path, "trainer.val_only=True") == 1
    captured = capfd.readouterr()
    assert captured.err.startswith("RewardError: the first error")
    assert "A tracker may have lost its latest records" in captured.out


@pytest.mark.parametrize(
    ("settings", "phase"),
    [([], "this step"), (["trainer.val_before_train=True"], "the validation")],
)
def test_samples_that_are_all_dropped(tmp_path, capfd, settings, phase):
    fails = reward_file(tmp_path, "raise KeyError('no such answer')")
    text = message(capfd, run(tmp_path, *fails, "reward_model.on_error=drop", *settings))
    assert f"All samples of {phase} were dropped" in text


def test_a_reward_file_with_a_syntax_error(tmp_path, capfd):
    text = message(capfd, run(tmp_path, *reward_file(tmp_path, "return len(solution_str")))
    assert "reward.py', line 4, is not Python" in text
    assert len(text.splitlines()) == 1
