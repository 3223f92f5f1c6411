"""Trackers: output, resume after a kill, and rejected settings."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.tracking import Tracker, TrackerBackend, TrackerSettings, tracker_backends, write_samples
from verl.tracking.json_lines import plain, to_json_line
from verl.utils.errors import ConfigError, MissingDependencyError, TrackerError

STEP = {"actor/pg_loss": 0.01234, "critic/score/mean": 1 / 3, "actor/ppo_kl": 0.00119}


def make_tracker(folder, backends, **settings):
    run = TrackerSettings(
        project_name="p", experiment_name="e", config={"a": {"b": 1}}, folder=folder, **settings
    )
    return Tracker(backends, run)


def read_lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_console_line(tmp_path, capsys):
    tracker = make_tracker(tmp_path, ["console"], total_steps=10)
    tracker.log(STEP, 1)
    rest = {"critic/vf_loss": 0.5, "response_length/mean": 12.34, "timing_s/step": 1.234}
    tracker.log({**STEP, "actor/kl_loss": 0.2, "critic/rewards/mean": 9, **rest}, 2)
    speed = {"perf/total_num_tokens": 300, "perf/time_per_step": 1.5}
    tracker.log({"train/loss": 2.5, "train/lr": 1e-5, "train/grad_norm": 0.25, **speed}, 3)

    assert capsys.readouterr().out.splitlines() == [
        "[Step 1/10] Actor loss: 0.0123 | Reward: 0.3333",  # no KL without a reference
        "[Step 2/10] Actor loss: 0.0123 | Reward: 0.3333 | KL: 0.2000 | Critic loss: 0.5000 | "
        "Response length: 12.3 | 1.23 s/step",
        (
            "[Step 3/10] Loss: 2.5000 | Learning rate: 1e-05 | Gradient norm: 0.250 | 200 tokens/s "
            "| 1.50 s/step"
        ),
    ]


def test_the_console_during_critic_warm_up_and_with_numbers_at_the_edge(tmp_path, capsys):
    tracker = make_tracker(tmp_path, ["console"])
    tracker.log({"critic/score/mean": -0.00001, "actor/reward_kl_penalty": math.nan}, 3)
    assert capsys.readouterr().out == "[Step 3] Actor loss: n/a | Reward: 0.0000 | KL: nan\n"


def test_the_console_shows_a_loss_of_a_program_that_measures_nothing_else(tmp_path, capsys):
    make_tracker(tmp_path, ["console"]).log({"train/loss": 2.5, "perf/time_per_step": 0.0}, 1)
    assert capsys.readouterr().out == "[Step 1] Loss: 2.5000 | 0.00 s/step\n"


def test_the_console_shows_metrics_of_a_users_own_names(tmp_path, capsys):
    tracker = make_tracker(tmp_path, ["console"])
    tracker.log({**STEP, "mine/spread": 2.0, "policy_judge/actor/pg_loss": 1.0, "perf/x": 1}, 1)
    tracker.log({"loss": 1234.5678, "steps": 123456, "val-core/x/reward/mean@1": 0.5}, 2)
    tracker.log({f"mine/{number}": -0.0 for number in range(9)}, 3)

    assert capsys.readouterr().out.splitlines() == [
        "[Step 1] Actor loss: 0.0123 | Reward: 0.3333 | mine/spread: 2",
        "[Step 2] loss: 1235 | steps: 123456",
        "Validation after step 2: x/reward/mean@1: 0.5000",
        f"[Step 3] {' | '.join(f'mine/{number}: 0' for number in range(6))} | 3 more",
    ]


def test_the_console_follows_its_interval_but_always_shows_both_ends_and_validation(
    tmp_path, capsys
):
    tracker = make_tracker(tmp_path, ["console"], total_steps=8, log_interval=3)
    tracker.log({"val-core/gsm8k/reward/mean@1": 0.25}, 0)
    for step in range(1, 9):
        tracker.log(STEP | ({"val-core/x/reward/mean@1": 0.5} if step == 5 else {}), step)
    lines = capsys.readouterr().out.splitlines()
    steps = [line.split("]")[0] + "]" for line in lines if not line.startswith("Validation")]
    assert steps == [f"[Step {i}/8]" for i in (1, 3, 6, 8)]
    assert lines[0] == "Validation after step 0: gsm8k/reward/mean@1: 0.2500"
    assert lines[3] == "Validation after step 5: x/reward/mean@1: 0.5000"


def test_the_console_prints_a_few_generations(tmp_path, capsys):
    make_tracker(tmp_path, ["console"]).log_generations(
        [{"input": "q", "output": "x" * 9999}] * 9, 2
    )
    out = capsys.readouterr().out
    assert out.count("input: q") == 3
    assert len(out) < 2000


def test_the_console_prints_generations_of_different_prompts(tmp_path, capsys):
    rows = [{"uid": f"0-{prompt}", "output": str(n)} for prompt in range(5) for n in range(4)]
    make_tracker(tmp_path, ["console"]).log_generations(rows, 2)
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if "uid" in line] == [
        f"  uid: 0-{prompt}" for prompt in range(3)
    ]
    assert out.count("output: 0") == 3


@given(st.lists(st.dictionaries(st.text(max_size=5), st.floats(), max_size=4), max_size=4))
def test_floats_round_trip_bit_for_bit_and_the_json_is_always_valid(rows):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    for row in rows:
        back = json.loads(to_json_line(row), parse_constant=refuse)
        assert back == {
            name: value if math.isfinite(value) else None for name, value in row.items()
        }


def test_metrics_accept_every_numeric_type(tmp_path):
    tracker = make_tracker(tmp_path, ["file"])
    tracker.log(
        {"a": np.float32(0.1), "b": torch.tensor(2), "c": True, "d": math.inf, "e": np.array(1.5)},
        1,
    )
    expected = {"step": 1, "a": float(np.float32(0.1)), "b": 2, "c": 1, "d": None, "e": 1.5}
    assert read_lines(tmp_path / "metrics.jsonl") == [expected]
    for wrong in ("text", torch.ones(2), None, [1.0]):
        with pytest.raises(TypeError, match="Metric 'loss'"):
            tracker.log({"loss": wrong}, 2)


def test_a_resumed_run_has_every_line_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tracker = make_tracker(tmp_path, ["file"])
    for step in range(6):
        tracker.log({"x": step / 7}, step)
    undisturbed = path.read_bytes()
    del tracker
    with path.open("ab") as file:
        file.write(b'{"step": 6, "x": 0.85')  # cut off in the middle of a line

    resumed = make_tracker(tmp_path, ["file"])
    resumed.rewind(3)
    assert [row["step"] for row in read_lines(path)] == [0, 1, 2, 3]
    for step in (4, 5):
        resumed.log({"x": step / 7}, step)
    resumed.finish()
    assert path.read_bytes() == undisturbed


def test_half_a_character_in_a_name_is_an_escape(tmp_path):
    make_tracker(tmp_path, ["file"]).log({"reward/a\ud800": 1.0}, 1)
    assert read_lines(tmp_path / "metrics.jsonl") == [{"step": 1, "reward/a\ud800": 1.0}]


def test_a_folder_that_is_removed_during_a_run_gets_the_later_lines(tmp_path, caplog):
    folder = tmp_path / "run"
    tracker = make_tracker(folder, ["file"])
    tracker.log({"x": 1}, 1)
    assert not caplog.messages

    shutil.rmtree(folder)
    tracker.log({"x": 2}, 2)
    tracker.log({"x": 3}, 3)
    assert read_lines(folder / "metrics.jsonl") == [{"step": 2, "x": 2}, {"step": 3, "x": 3}]
    assert len(caplog.messages) == 1
    assert f"{folder / 'metrics.jsonl'} was removed while this run wrote" in caplog.messages[0]


def test_a_new_run_discards_old_lines_and_accepts_a_new_folder(tmp_path):
    tracker = make_tracker(tmp_path / "new" / "folder", ["file"])
    tracker.rewind(0)
    tracker.log({"x": 1}, 0)
    tracker.log({"x": 1}, 1)
    tracker.rewind(0)
    tracker.log({"x": 2}, 0)
    assert read_lines(tmp_path / "new" / "folder" / "metrics.jsonl") == [{"step": 0, "x": 2}]


def test_a_truncated_last_line_is_repaired_even_without_a_rewind(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"st')
    make_tracker(tmp_path, ["file"]).log({}, 2)
    assert read_lines(tmp_path / "metrics.jsonl") == [{"step": 1}, {"step": 2}]


@pytest.mark.parametrize(
    "garbage", [b"\x00\x00garbage", b'{"step": null}', b"[" * 10**5, b"9" * 5000, b"[1]"]
)
def test_rewind_drops_garbage_in_the_middle(tmp_path, garbage):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + garbage + b'\n{"step": 2}\n')
    make_tracker(tmp_path, ["file"]).rewind(2)
    assert read_lines(tmp_path / "metrics.jsonl") == [{"step": 1}, {"step": 2}]


def test_lines_survive_kill_9(tmp_path):
    code = textwrap.dedent(
        f"""
        import time
        from pathlib import Path
        from tests.tracking.test_tracking import make_tracker
        tracker = make_tracker(Path({str(tmp_path)!r}), ["file"])
        for step in range(3):
            tracker.log({{"x": step / 3}}, step)
        print("written", flush=True)
        time.sleep(60)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)

    assert process.stdout is not None
    assert process.stdout.readline() == "written\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert [row["x"] for row in read_lines(tmp_path / "metrics.jsonl")] == [0.0, 1 / 3, 2 / 3]


def test_generations_are_written_to_one_file_a_step(tmp_path):
    rows = [
        {
            "input": "q\n",
            "output": "é\ud83d",
            "score": np.float32(0.5),
            "pred": math.nan,
            "ids": torch.tensor([1]),
        }
    ]
    make_tracker(tmp_path, ["file"]).log_generations(rows, 4)

    expected = {
        "step": 4,
        "input": "q\n",
        "output": "é\ud83d",
        "score": 0.5,
        "pred": None,
        "ids": [1],
    }
    assert read_lines(tmp_path / "generations" / "4.jsonl") == [expected]


def test_samples_are_written_atomically(tmp_path):
    write_samples(tmp_path / "deep", 1, [{"x": 1}])

    def rows():
        yield {"x": 2}
        raise RuntimeError("killed midway")

    with pytest.raises(RuntimeError, match="midway"):
        write_samples(tmp_path / "deep", 1, rows())
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["1.jsonl"]
    assert read_lines(tmp_path / "deep" / "1.jsonl") == [{"step": 1, "x": 1}]
    assert write_samples(tmp_path / "deep", 1, [{"x": 3}]).name == "1.jsonl"
    assert read_lines(tmp_path / "deep" / "1.jsonl") == [{"step": 1, "x": 3}]


def test_plain_turns_values_that_json_lacks_into_text(tmp_path):
    assert plain({1: tmp_path, "a": (1, {2.5}), "b": np.array(["x"], dtype=object)}) == {
        "1": str(tmp_path),
        "a": [1, [2.5]],
        "b": ["x"],
    }


def test_an_unknown_tracker_is_rejected_with_the_nearest_name(tmp_path):
    with pytest.raises(ConfigError, match=r"tensorbord.*tensorboard"):
        make_tracker(tmp_path, ["console", "tensorbord"])


@pytest.mark.parametrize("name", ["mlflow", "swanlab", "wandb", "tensorboard"])
def test_a_missing_package_is_reported_at_the_start_with_the_command(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)  # Python raises ModuleNotFoundError for it
    with pytest.raises(MissingDependencyError, match=f"pip install {name}"):
        make_tracker(tmp_path, [name])


def test_a_custom_tracker(tmp_path):
    seen = []

    @tracker_backends.register("test-memory")
    class Memory(TrackerBackend):
        def log(self, metrics, step):
            seen.append((step, metrics, self.settings.config["a"]["b"]))

    tracker = make_tracker(tmp_path, ["test-memory"])
    tracker.log({"x": 1.0}, 2)
    tracker.log_generations([{"a": 1}], 2)
    tracker.rewind(1)
    tracker.finish()
    assert seen == [(2, {"x": 1.0}, 1)]


def test_tensorboard_events_can_be_read_back_and_are_purged_on_rewind(tmp_path):
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )

    def steps():
        reader = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
        reader.Reload()
        return {event.step: event.value for event in reader.Scalars("actor/pg_loss")}

    tracker = make_tracker(tmp_path, ["tensorboard"])
    for step in (1, 2, 3):
        tracker.log({"actor/pg_loss": step / 4}, step)
    tracker.log_generations([{"output": "text"}], 3)
    tracker.finish()
    assert steps() == {1: 0.25, 2: 0.5, 3: 0.75}
    time.sleep(1.1)  # event files of the same second would be read in any order
    resumed = make_tracker(tmp_path, ["tensorboard"])
    resumed.rewind(2)
    resumed.log({"actor/pg_loss": 9.0}, 3)
    resumed.finish()
    assert steps() == {1: 0.25, 2: 0.5, 3: 9.0}


@pytest.mark.slow
def test_wandb_offline_writes_a_run_and_a_resumed_one_keeps_its_id(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    tracker = make_tracker(tmp_path, ["wandb"])
    tracker.log({"x": 1.0, "nan": math.nan}, 1)
    tracker.log_generations([{"input": "q", "score": 1.0}, {"input": "r", "pred": "3"}], 1)
    tracker.finish()
    run_id = (tmp_path / "wandb_run_id").read_text()

    files = list((tmp_path / "wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"))
    assert len(files) == 1
    # The process of wandb may still write after `finish`; it ends before ours does.
    deadline = time.monotonic() + 20
    while b"val/generations" not in files[0].read_bytes() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert b"val/generations" in files[0].read_bytes()
    resumed = make_tracker(tmp_path, ["wandb"])
    assert (tmp_path / "wandb_run_id").read_text() == run_id

    resumed.rewind(0)
    assert (tmp_path / "wandb_run_id").read_text() != run_id
    resumed.finish()


def test_wandb_without_a_login_is_reported_with_the_alternatives(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")

    def refuse(**_):
        raise wandb.errors.UsageError("No API key configured.")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(
        ConfigError, match="trainer.logger=wandb cannot be used: No API key.*WANDB_MODE=offline"
    ):
        make_tracker(tmp_path, ["wandb"])


def test_mlflow_gets_names_that_it_accepts(tmp_path, monkeypatch):
    logged = {}

    class Mlflow:
        def __getattr__(self, name):
            return lambda *args, **kwargs: None

        def log_metrics(self, metrics, step):
            logged[step] = metrics

    monkeypatch.setitem(sys.modules, "mlflow", Mlflow())
    names = ["actor/lr", "val-core/a b.c/mean@8", "val-aux/math (hard)/acc:%"]
    make_tracker(tmp_path, ["mlflow"]).log(dict.fromkeys(names, 1.0), 3)
    expected = ["actor/lr", "val-core/a b.c/mean_at_8", "val-aux/math _hard_/acc__"]
    assert logged == {3: dict.fromkeys(expected, 1.0)}


def test_a_tracker_that_raises_is_named(tmp_path):
    class Raises(TrackerBackend):
        def log(self, metrics, step):
            raise ValueError("no such project.")

    tracker_backends.register("raises")(Raises)
    try:
        tracker = make_tracker(tmp_path, ["file", "raises"])
        with pytest.raises(
            TrackerError,
            match=r"'raises' \(.*\) raised ValueError in line \d+: no such project\. VERL",
        ):
            tracker.log(STEP, 1)
        tracker.finish()
    finally:
        tracker_backends.remove("raises")


def test_a_tracker_that_fails_does_not_stop_the_others(tmp_path):
    class Raises(TrackerBackend):
        def __init__(self, settings, text):
            super().__init__(settings)
            self.text = text

        def log(self, metrics, step):
            raise ValueError(self.text)

    names = ["raises-one", "file", "raises-two"]
    tracker_backends.register(names[0])(lambda settings: Raises(settings, "no project"))
    tracker_backends.register(names[2])(lambda settings: Raises(settings, "no network"))
    try:
        with pytest.raises(TrackerError, match=r"'raises-one'.*no project"):
            make_tracker(tmp_path, names[:2]).log(STEP, 1)
        with pytest.raises(TrackerError) as caught:
            make_tracker(tmp_path, names).log(STEP, 2)
    finally:
        tracker_backends.remove(names[0])
        tracker_backends.remove(names[2])

    text = str(caught.value)
    assert text.startswith("2 trackers failed. ")
    assert all(word in text for word in ("'raises-one'", "project", "'raises-two'", "network"))
    assert [row["step"] for row in read_lines(tmp_path / "metrics.jsonl")] == [1, 2]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux")
def test_a_full_disk_is_reported_with_the_file(tmp_path):
    tracker = make_tracker(tmp_path, ["file"])
    (backend,) = tracker.backends
    with open("/dev/full", "ab") as full:
        backend._file = full
        with pytest.raises(OSError, match=r"No space left.*metrics\.jsonl"):
            tracker.log(STEP, 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # what is left goes there


@pytest.mark.parametrize("error", [ValueError("no login"), KeyboardInterrupt()])
def test_a_tracker_that_does_not_start_closes_those_before_it(tmp_path, error):
    closed = []

    class Closes(TrackerBackend):
        def finish(self):
            closed.append(self)

    def start(settings):
        raise error

    tracker_backends.register("closes")(Closes)
    tracker_backends.register("never-starts")(start)
    try:
        with pytest.raises((TrackerError, KeyboardInterrupt)):
            make_tracker(tmp_path, ["closes", "never-starts"])
    finally:
        tracker_backends.remove("closes")
        tracker_backends.remove("never-starts")
    assert len(closed) == 1


def test_errors_about_files_stay_those_of_the_system(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        make_tracker(tmp_path / "file" / "below", ["file"])
