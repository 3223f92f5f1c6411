"""The files that a run writes, and the data that it sends to its trackers."""

import json
import re
from collections import Counter, defaultdict
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.trainer.bad_inputs import reward_file
from tests.trainer.runs import metric_lines, run, step_lines


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def truth_of(prompt):
    one, other = re.findall(r"\d+", prompt)
    return str(int(one) + int(other))


def test_samples_of_training_and_validation_are_written(tmp_path):
    reward = reward_file(
        tmp_path,
        (
            "return {'score': len(solution_str), 'pred': solution_str, 'even': len(solution_str) % "
            "2 == 0}"
        ),
    )
    folders = [
        f"trainer.rollout_data_dir={tmp_path / 'rollouts'}",
        f"trainer.validation_data_dir={tmp_path / 'validation'}",
    ]
    sampled = ["n=4", "do_sample=True", "temperature=1.0"]
    validated = [
        "trainer.val_before_train=True",
        "trainer.test_freq=2",
        "trainer.log_val_generations=3",
    ]
    validated += [f"actor_rollout_ref.rollout.val_kwargs.{setting}" for setting in sampled]
    assert run(tmp_path, *reward, *folders, *validated) == 0

    for step, line in enumerate(step_lines(tmp_path), start=1):
        rows = rows_of(tmp_path / "rollouts" / f"{step}.jsonl")
        assert len(rows) == 16
        assert sum(row["score"] for row in rows) / 16 == pytest.approx(line["critic/score/mean"])
        assert sum(row["even"] for row in rows) / 16 == pytest.approx(line["reward/even/mean"])
        assert all(row["step"] == step and "= ?" in row["input"] for row in rows)
        assert all(row["output"].startswith(row["pred"]) for row in rows)
        assert all(row["gts"] == truth_of(row["input"]) for row in rows)

    assert sorted(path.name for path in (tmp_path / "validation").iterdir()) == [
        "0.jsonl",
        "2.jsonl",
    ]
    for line in (metric_lines(tmp_path)[0], metric_lines(tmp_path)[2]):
        scores = defaultdict(list)
        answers = defaultdict(list)
        for row in rows_of(tmp_path / "validation" / f"{line['step']}.jsonl"):
            scores[row["uid"]].append(row["score"])
            answers[row["uid"]].append(row["pred"])
        assert [len(group) for group in scores.values()] == [4] * 10
        best = sum(max(group) for group in scores.values()) / 10
        mean = sum(sum(group) for group in scores.values()) / 40
        assert line["val-core/toy/reward/best@4"] == pytest.approx(best)
        assert line["val-core/toy/reward/mean@4"] == pytest.approx(mean)
        majority = sum(len(Counter(group).most_common(1)[0][0]) for group in answers.values()) / 10
        assert line["val-core/toy/reward/maj@4"] == pytest.approx(majority)
    assert [len(rows_of(tmp_path / "generations" / f"{step}.jsonl")) for step in (0, 2)] == [3, 3]


def test_validation_does_not_change_the_numbers_of_the_step(tmp_path):
    assert run(tmp_path / "with", "trainer.test_freq=1") == 0
    assert run(tmp_path / "without") == 0
    with_it, without = (
        [line["rollout/generated_tokens"] for line in step_lines(tmp_path / name)]
        for name in ("with", "without")
    )
    assert with_it == without
    assert all("timing_per_token_ms/testing" not in line for line in step_lines(tmp_path / "with"))


def test_a_checkpoint_is_a_hugging_face_folder_on_request(tmp_path):
    contents = "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]"
    assert run(tmp_path, "trainer.save_freq=2", contents) == 0
    folder = tmp_path / "global_step_2" / "actor" / "huggingface"
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "2 + 5 = ?"}], add_generation_prompt=True, return_tensors="pt"
    )
    assert model.generate(**text, max_new_tokens=4, do_sample=False).shape[0] == 1
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text().strip() == "2"
    # It is an ordinary model: training can start from it.
    assert (
        run(tmp_path / "next", f"actor_rollout_ref.model.path={folder}", "trainer.max_steps=1") == 0
    )


def test_tensorboard_and_wandb_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    assert (
        run(
            tmp_path,
            'trainer.logger=["tensorboard","wandb"]',
            "trainer.test_freq=2",
            "trainer.log_val_generations=2",
        )
        == 0
    )

    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    assert {"actor/pg_loss", "critic/score/mean", "val-core/toy/reward/mean@8"} <= set(
        events.Tags()["scalars"]
    )
    assert [event.step for event in events.Scalars("actor/lr")] == [1, 2]
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


TRACKER = """
from pathlib import Path
from verl.tracking import TrackerBackend, tracker_backends


@tracker_backends.register("diary")
class Diary(TrackerBackend):
    def log(self, metrics, step):
        with open(self.settings.folder / "diary", "a") as file:
            file.write(f"{step} ")

    def finish(self):
        with open(self.settings.folder / "diary", "a") as file:
            file.write("end")
"""


def test_a_custom_tracker_is_finished_even_if_the_run_fails(tmp_path):
    """Raise from the reward function at the second step."""
    library = tmp_path / "diary_tracker.py"
    library.write_text(TRACKER)
    calls = "compute_score.calls = getattr(compute_score, 'calls', 0) + 1"
    breaks = reward_file(tmp_path, f"{calls}; return {{17: None}}.get(compute_score.calls, 1.0)")
    own = [
        f"actor_rollout_ref.model.external_lib={library}",
        "trainer.logger=[diary]",
        "reward_model.preflight=False",
    ]
    assert run(tmp_path, *breaks, *own) == 1
    assert (tmp_path / "diary").read_text() == "1 end"


def test_a_dropped_sample_has_no_score(tmp_path):
    reward = reward_file(tmp_path, "return None if '1' in solution_str else 1.0")
    folder = tmp_path / "rollouts"
    changes = [*reward, "reward_model.on_error=drop", f"trainer.rollout_data_dir={folder}"]
    assert run(tmp_path, *changes) == 0

    scores = set()
    for path in folder.iterdir():
        for row in rows_of(path):
            assert row["score"] == (None if "1" in row["output"] else 1.0)
            scores.add(row["score"])
    assert scores == {None, 1.0}
