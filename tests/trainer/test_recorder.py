"""The record that a training run leaves."""

import multiprocessing
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import verl
from tests.launches import launch
from tests.trainer.runs import PPO, command_line, run, step_lines, weights
from verl.checkpoint.claim import Claim
from verl.data import RLDataLoader
from verl.trainer import RLTrainer, recorder
from verl.trainer.main_ppo import main
from verl.utils.errors import DataError, RewardError
from verl.weight_sync.fingerprint import fingerprints

SMALL_UPDATES = "actor_rollout_ref.actor.ppo_mini_batch_size=2"


def test_a_run_is_recorded_as_it_was(tmp_path: Path):
    assert run(tmp_path, *PPO, SMALL_UPDATES, "trainer.save_freq=1") == 0
    record = verl.load_run(tmp_path)
    logged = {line["step"]: line for line in step_lines(tmp_path)}
    assert record.steps[2].metrics["actor/pg_loss"] == logged[2]["actor/pg_loss"]
    assert record.config["data"]["train_batch_size"] == 4
    assert [event["event"] for event in record.events] == ["start", "end"]

    samples = record.samples(2)
    assert len(samples) == 16
    scores = [sample.score for sample in samples]
    assert np.mean(scores) == pytest.approx(logged[2]["critic/score/mean"])
    for sample in samples:
        text = "".join(samples.pieces[token] for token in sample.tokens["response_ids"].tolist())
        assert text == sample.response
        expected = {"old_log_probs", "values", "advantages", "returns", "rollout_log_probs"}
        assert sample.tokens.keys() >= expected
        gap = sample.tokens["old_log_probs"] - sample.tokens["rollout_log_probs"]
        assert np.abs(gap).max() < 1e-4
    names = {span[0] for lane in samples.lanes for span in lane["spans"]}
    assert names >= {"step", "gen", "update_actor", "update_critic"}
    assert len(samples.prompts) == 4
    assert samples.prompts[0][1].keys() >= {"raw_prompt_ids", "reward_model", "data_source"}

    # The digests are those of the weights in the checkpoint of the same step.
    for role in ("actor", "critic"):
        saved = weights(tmp_path, 2, role)
        names_of_role = record.tensor_names[role]
        whole = [saved["model." + name] for name in names_of_role]
        assert record.steps[2].weights[role] == fingerprints(whole).tolist()
        assert record.steps[2].weights[role] != record.steps[1].weights[role]


def test_a_dropped_sample_makes_no_group_differ(tmp_path: Path):
    """Score 1 for every answer that is scored: no group has anything to learn from."""
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, **_):\n"
        "    assert len(solution_str) != 2\n"
        "    return 1\n"
    )
    own = [f"custom_reward_function.path={reward}", "reward_model.on_error=drop"]
    assert run(tmp_path / "run", *own) == 0
    steps = step_lines(tmp_path / "run")
    assert any(line["reward/num_errors"] > 0 for line in steps), "nothing is dropped"

    record = verl.load_run(tmp_path / "run")
    for step in (1, 2):
        assert record.steps[step].metrics["groups/flat_share"] == 1.0


def test_two_ranks_record_the_digests_of_whole_tensors(tmp_path: Path):
    done = launch(2, main, command_line(tmp_path, "trainer.save_freq=2"))
    assert done.returncode == 0, done.stderr
    record = verl.load_run(tmp_path)
    saved = weights(tmp_path, 2)
    whole = [saved["model." + name] for name in record.tensor_names["actor"]]
    assert record.steps[2].weights["actor"] == fingerprints(whole).tolist()
    assert len(record.samples(2).lanes) == 2


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), ValueError("a column of a user's own")]
)
def test_an_error_ends_the_record_and_not_the_run(
    tmp_path: Path, monkeypatch, capfd, error: Exception
):
    def failing(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(pa.ipc, "new_file", failing)
    assert run(tmp_path) == 0
    out = capfd.readouterr().out
    assert f"({type(error).__name__}: {error})" in out
    assert out.count("The record of this run ends here") == 1
    assert len(step_lines(tmp_path)) == 2


def test_a_second_run_in_the_same_folder_is_not_recorded(tmp_path: Path):
    """Locks of one process do not exclude each other, so the holder is a child."""
    (tmp_path / "records").mkdir()
    child = launch_holder(tmp_path / "records")
    try:
        assert run(tmp_path) == 0
        assert not (tmp_path / "records" / "run.json").exists()
    finally:
        child.terminate()
        child.join()


def launch_holder(folder: Path) -> BaseProcess:
    """Start a process that holds the folder of records."""

    def hold(ready) -> None:
        claim = Claim(folder)
        claim.take()
        ready.set()
        time.sleep(60)

    context = multiprocessing.get_context("fork")
    ready = context.Event()
    child = context.Process(target=hold, args=(ready,), daemon=True)
    child.start()
    assert ready.wait(20)
    return child


def test_the_error_that_ends_a_run_is_recorded_with_its_prompts(tmp_path: Path, monkeypatch):
    write = recorder.StepRecorder.add_step

    def fail_at_two(self, trainer, batch):
        write(self, trainer, batch)
        if trainer.global_step == 2:
            raise RewardError("planted")

    monkeypatch.setattr(recorder.StepRecorder, "add_step", fail_at_two)
    assert run(tmp_path) == 1
    record = verl.load_run(tmp_path)
    assert record.events[-1]["event"] == "failed"
    assert "planted" in record.events[-1]["text"]


def test_an_error_between_two_steps_leaves_the_samples_of_the_last_one(
    tmp_path: Path, monkeypatch, capfd
):
    draw = RLDataLoader.__iter__

    def fail_at_the_second_batch(self):
        batches = draw(self)
        yield next(batches)
        next(batches)
        raise DataError("planted")

    monkeypatch.setattr(RLDataLoader, "__iter__", fail_at_the_second_batch)
    assert run(tmp_path) == 1
    record = verl.load_run(tmp_path)
    assert "planted" in record.events[-1]["text"]
    assert record.kept_steps == [1]
    assert len(record.samples(1)) == 16
    assert "capsule" not in capfd.readouterr().out


def test_a_notebook_shows_the_page_in_a_frame_without_access(tmp_path: Path):
    keys = {
        "data.dataset_name": "toy",
        "data.train_batch_size": 2,
        "trainer.max_steps": 1,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.default_local_dir": str(tmp_path),
    }
    trainer = verl.train(keys, rollout_config={"n": 2})
    cell = trainer.show(height=300)._repr_html_()
    assert cell.startswith('<iframe sandbox="allow-scripts" ')
    assert cell.count("<") == 2, "the page itself is escaped"
    assert "&quot;samples/0/1&quot;" in cell


def test_before_the_training_there_is_no_page(tmp_path: Path):
    keys = {"data.dataset_name": "toy", "trainer.default_local_dir": str(tmp_path)}
    with pytest.raises(DataError, match=r"Nothing is recorded in .* yet. Call train\(\) first"):
        RLTrainer(keys).show()


def test_records_can_be_left_out(tmp_path: Path):
    assert run(tmp_path, "trainer.record.enable=False") == 0
    assert not (tmp_path / "records").exists()
