"""SIGTERM and Ctrl-C end a run at any point, but not in the middle of a checkpoint."""

import os
import signal
import subprocess
import sys
import time

import pytest

import verl.utils.sigterm
from verl.utils.entry import INTERRUPTED, exit_code
from verl.utils.sigterm import TERMINATED, interrupts_wait, raise_swallowed, sigterm_as_exit


def test_a_signal_while_a_class_is_created_ends_the_program():
    class Slow:
        def __set_name__(self, owner, name):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as end, sigterm_as_exit():
        type("Owner", (), {"attribute": Slow()})
    assert end.value.code == TERMINATED


@pytest.mark.parametrize(
    ("name", "code"), [("SIGINT", INTERRUPTED), ("SIGTERM", TERMINATED)], ids=["SIGINT", "SIGTERM"]
)
def test_a_job_within_a_job_ends_with_the_code_of_the_signal(name, code, capfd):
    """`verl train` runs the program `main_ppo`, and each of them returns an exit code."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def job():
        os.kill(os.getpid(), getattr(signal, name))
        time.sleep(5)

    ended = exit_code(lambda: exit_code(job))
    signal.signal(signal.SIGINT, before)

    said = "Interrupted.\n" if name == "SIGINT" else "Ended by SIGTERM.\n"
    assert (ended, capfd.readouterr().err) == (code, said)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_repeated_signal_does_not_disturb_the_cleaning_up(name):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    cleaned = []
    with pytest.raises((KeyboardInterrupt, SystemExit)), sigterm_as_exit():
        try:
            os.kill(os.getpid(), getattr(signal, name))
            time.sleep(5)
        finally:
            os.kill(os.getpid(), getattr(signal, name))
            cleaned.append("up")
    assert cleaned == ["up"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def test_an_error_of_the_program_is_unchanged():
    with pytest.raises(RuntimeError, match="of the program"), sigterm_as_exit():
        raise RuntimeError("of the program")


@pytest.fixture
def signals_raise():
    """Let both signals raise: shells start background jobs, such as tests, without SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with sigterm_as_exit():
        yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("signals_raise")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_waits_for_the_end_of_work_and_is_reported_at_once(capfd, name):
    seen = []
    with pytest.raises(KeyboardInterrupt), interrupts_wait("the work"):
        os.kill(os.getpid(), getattr(signal, name))
        seen.append(capfd.readouterr().err)
        os.kill(os.getpid(), signal.SIGINT)  # as torchrun repeats it at once
        seen.append("end")
    assert ": the work is finished first." in seen[0]
    assert seen[1:] == ["end"]


@pytest.mark.usefixtures("signals_raise")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_an_interrupt_that_an_import_has_swallowed_is_raised_again(name):
    raise_swallowed()
    try:
        os.kill(os.getpid(), getattr(signal, name))
        time.sleep(5)
    except:  # noqa: E722 - as packages have it
        pass
    with pytest.raises(KeyboardInterrupt):
        raise_swallowed()


@pytest.mark.usefixtures("signals_raise")
def test_a_second_signal_does_not_wait(monkeypatch):
    monkeypatch.setattr(verl.utils.sigterm, "_SAME_S", -1.0)
    with pytest.raises(KeyboardInterrupt), interrupts_wait("the work"):
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interrupts_wait("the work"):
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        os.kill(os.getpid(), signal.SIGINT)
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_during_the_exit_leaves_no_traceback():
    program = (
        "import atexit, os, signal\n"
        "from verl.utils.entry import exit_code\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))\n"
        "raise SystemExit(exit_code(lambda: os.kill(os.getpid(), signal.SIGINT)))\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (INTERRUPTED, "Interrupted.\n")
