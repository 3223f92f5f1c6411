"""The peer verl of `bench/step.py`: reading its console, its keys, and its process."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import step
import step_verl
from step_work import StepJob

LINE = (
    "\x1b[36m(TaskRunner pid=4242)\x1b[0m step:2 - global_seqlen/mean:1310720.0 - "
    "actor/pg_loss:-1.5e-05 - actor/grad_norm:np.float64(0.25) - actor/lr:1e-06 - "
    "prompt_length/mean:256.0 - response_length/mean:1024.0 - response_length/clip_ratio:1.0 - "
    "timing_s/gen:21.5 - timing_s/update_actor:np.float64(30.25) - timing_s/update_weights:1.5 - "
    "timing_s/step:55.0 - timing_per_token_ms/gen:0.0205\n"
)


def make_job(folder: Path) -> StepJob:
    return StepJob(
        folder=str(folder),
        device="cuda",
        vocabulary=1024,
        prompts=64,
        samples=16,
        prompt_tokens=256,
        lengths="fixed:1024",
        steps=3,
        micro_tokens=16_384,
        checkpointing=True,
        old_log_probs=False,
        vllm_memory=0.6,
        backend="inductor",
        seed=0,
        verl_set=("trainer.use_v1=False",),
    )


def test_a_console_line_becomes_the_rows_of_the_table():
    metrics = step_verl.parse_metrics(LINE)

    assert metrics is not None
    assert metrics["step"] == 2
    assert metrics["actor/pg_loss"] == -1.5e-05
    assert metrics["actor/grad_norm"] == 0.25
    rows = step_verl.to_rows(metrics)
    named = {row: rows.get(row) for row in step_verl.ROWS}
    assert named == {
        "generate": 21.5,
        "old log-probs": None,
        "update": 30.25,
        "weights": 1.5,
        "step": 55.0,
    }
    assert rows["timing_s/update_weights"] == 1.5


@pytest.mark.parametrize(
    "line", ["Training Progress: 33%|# | 1/3", "global_step:2 - a:1", "step 2", ""]
)
def test_other_lines_are_no_metrics(line):
    assert step_verl.parse_metrics(line) is None


def test_a_missing_timing_is_an_error_that_lists_those_there_are():
    with pytest.raises(RuntimeError, match=r"no timing_s/gen; its timings: \['timing_s/step'\]"):
        step_verl.to_rows({"timing_s/step": 1.0})


def test_other_lengths_than_the_forced_ones_are_an_error(tmp_path):
    job = make_job(tmp_path)
    metrics = step_verl.parse_metrics(LINE)
    assert metrics is not None

    step_verl.check_lengths(metrics, job)
    with pytest.raises(RuntimeError, match="response_length/mean must be 512, got 1024"):
        step_verl.check_lengths(metrics, replace(job, lengths="fixed:512"))


def test_own_keys_come_last_and_graphs_reach_all_rows(tmp_path):
    keys = step_verl.make_keys(make_job(tmp_path), tmp_path)

    assert keys[-1] == "trainer.use_v1=False"
    graphs = next(key for key in keys if "cudagraph_capture_sizes" in key)
    assert graphs.endswith(",1024]")
    assert step_verl.capture_sizes(6) == [1, 2, 4, 6]


def test_the_peer_cannot_see_this_repository(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{step_verl.REPOSITORY}:/elsewhere")
    job = replace(make_job(tmp_path), verl_site="/site")

    environment = step_verl.make_environment(job, tmp_path, "mark")

    assert environment["PYTHONPATH"] == "/site:/elsewhere"


@pytest.mark.slow
def test_a_hung_peer_ends_at_its_limit_with_all_that_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr(step_verl, "END_S", 0.2)
    code = (
        "import subprocess, time\n"
        "child = subprocess.Popen(['sleep', '100'], start_new_session=True)\n"
        "print('last words of', child.pid, flush=True)\n"
        "time.sleep(100)\n"
    )
    environment = step_verl.make_environment(make_job(tmp_path), tmp_path, "a-test-of-ours")

    with pytest.raises(RuntimeError, match="not done after 2 s") as caught:
        step_verl.run_peer([sys.executable, "-c", code], environment, tmp_path, 2.0)

    words = str(caught.value).split("last words of ")
    status = Path(f"/proc/{int(words[1])}/status")
    assert not status.exists() or "zombie" in status.read_text()


def test_a_failed_peer_gives_its_last_lines(tmp_path):
    environment = step_verl.make_environment(make_job(tmp_path), tmp_path, "another-test")
    with pytest.raises(RuntimeError, match=r"(?s)exit code 3.*no flash_attn here"):
        step_verl.run_peer(
            [sys.executable, "-c", "print('no flash_attn here'); raise SystemExit(3)"],
            environment,
            tmp_path,
            60.0,
        )


def test_the_peer_needs_a_place_of_its_own(tmp_path, capsys):
    with pytest.raises(SystemExit):
        step.parse_arguments(["--engines", "verl"])
    assert "--verl-site FOLDER" in capsys.readouterr().err

    (tmp_path / "verl").mkdir()
    words = ["--engines", "verl", "--verl-site", str(tmp_path), "--verl-set", "a.b=1"]
    job = step.make_job(step.parse_arguments(words), "verl")
    assert job.verl_site == str(tmp_path)
    assert (job.steps, job.verl_set) == (3, ("a.b=1",))
