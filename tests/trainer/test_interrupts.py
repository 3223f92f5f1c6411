"""Ctrl-C and SIGTERM end a run in one line."""

import signal
from collections.abc import Iterator

import pytest

from tests.trainer.bad_inputs import reward_file
from tests.trainer.runs import run
from verl.utils.entry import INTERRUPTED
from verl.utils.logging import logger
from verl.utils.sigterm import TERMINATED


@pytest.fixture
def hears_ctrl_c() -> Iterator[None]:
    """Handle SIGINT again: shells start background jobs, such as tests, with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


ENDS = {"SIGINT": (INTERRUPTED, "Interrupted.\n"), "SIGTERM": (TERMINATED, "Ended by SIGTERM.\n")}


@pytest.mark.usefixtures("hears_ctrl_c")
@pytest.mark.parametrize("name", ENDS)
def test_ctrl_c_and_sigterm_end_a_start_in_one_line(tmp_path, capfd, monkeypatch, name):
    (tmp_path / f"told_by_{name}.py").write_text(
        f"import os, signal\nos.kill(os.getpid(), signal.{name})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    code = run(tmp_path, f"actor_rollout_ref.model.external_lib=told_by_{name}")
    assert (code, capfd.readouterr().err) == ENDS[name]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.usefixtures("hears_ctrl_c")
@pytest.mark.parametrize("name", ENDS)
def test_ctrl_c_and_sigterm_end_a_run_in_one_line(tmp_path, capfd, monkeypatch, name):
    said: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda text, *values: said.append(text % values))
    # Its process is a child of the run's. Only one call sends the signal: a signal of a later call
    # would reach the tests after the run has ended.
    first = tmp_path / "first"
    reward = reward_file(
        tmp_path,
        f"import os, pathlib, signal\n"
        f"    try:\n"
        f"        pathlib.Path({str(first)!r}).touch(exist_ok=False)\n"
        f"    except FileExistsError:\n"
        f"        return time.sleep(5)\n"
        f"    os.kill(os.getppid(), signal.{name})\n"
        f"    time.sleep(5)",
    )
    assert run(tmp_path, "trainer.save_freq=1", "trainer.max_steps=1") == 0
    again = ["trainer.save_freq=1", "reward_model.preflight=False", *reward]
    before = signal.getsignal(
        signal.SIGTERM
    )  # the handler of Ray, if a test of this process has started it

    code = run(tmp_path, *again)
    assert (code, capfd.readouterr().err) == ENDS[name]
    assert signal.getsignal(signal.SIGTERM) is before
    assert said[-1:] == [
        f"Interrupted in step 2 of 2. Newest checkpoint in {tmp_path}: global_step_1. Started "
        "again, the run goes on from there."
    ]
