"""A part of a user that ends the process is reported; a signal still ends it."""

import os
import signal
import sys

import pytest

from tests.launches import run_file
from verl.utils.errors import AlgorithmError
from verl.utils.sigterm import TERMINATED, raised_by_signal, sigterm_as_exit
from verl.utils.user_parts import NamedPart


def leave(code=None):
    sys.exit(code)


PART = NamedPart("advantage estimator", "mine", leave)


@pytest.mark.parametrize(("code", "call"), [(None, "()"), (0, "(0)"), ("full", "('full')")])
def test_an_exit_is_an_error_of_the_part(code, call):
    line = leave.__code__.co_firstlineno + 1
    with pytest.raises(AlgorithmError) as error, PART.naming_errors():
        leave(code)
    assert str(error.value) == (
        f"The advantage estimator 'mine' ({__file__}) called sys.exit{call} in line {line}. Raise "
        "an error instead. VERL_TRACEBACK=1 shows where."
    )


class Handler:
    """A handler of a program, as an object."""

    def __call__(self, number, frame):
        sys.exit(7)

    def method(self, number, frame):
        sys.exit(7)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
@pytest.mark.parametrize(
    "handler", [lambda *_: sys.exit(7), Handler(), Handler().method], ids=lambda kind: str(kind)[:9]
)
def test_an_exit_by_the_handler_of_a_signal_ends_the_process(number, handler):
    before = signal.signal(number, handler)
    try:
        with pytest.raises(SystemExit) as ended, PART.naming_errors():
            os.kill(os.getpid(), number)
        assert ended.value.code == 7
        assert raised_by_signal(ended.value)
    finally:
        signal.signal(number, before)


def test_sigterm_within_a_part_ends_the_process():
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as ended, sigterm_as_exit(), PART.naming_errors():
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == TERMINATED


RUN_WITH_EXIT = """
import sys
from verl.algorithms.advantages import advantage_estimators
from verl.trainer.main_ppo import main

@advantage_estimators.register("leaves")
def leaves(inputs):
    sys.exit(0)

keys = ["data.dataset_name=toy", "algorithm.adv_estimator=leaves", "trainer.max_steps=1"]
sys.exit(main([*keys, "trainer.val_before_train=False", f"trainer.default_local_dir={sys.argv[1]}"]))
"""


def test_a_run_with_an_exit_in_an_estimator_fails(tmp_path):
    """An exit code of 0 would let a script take the run for a finished one."""
    program = tmp_path / "program.py"
    program.write_text(RUN_WITH_EXIT)
    done = run_file(program, [str(tmp_path / "run")])
    assert done.returncode == 1
    assert f"'leaves' ({program}) called sys.exit(0) in line 8. Raise" in done.stderr
    assert "Interrupted" not in done.stdout + done.stderr
