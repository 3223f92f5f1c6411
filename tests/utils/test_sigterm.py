"""SIGTERM ends a run at any point."""

import os
import signal

import pytest

from verl.utils.sigterm import TERMINATED, sigterm_as_exit


def test_a_signal_while_a_class_is_created_ends_the_program():
    class Slow:
        def __set_name__(self, owner, name):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as end, sigterm_as_exit():
        type("Owner", (), {"attribute": Slow()})
    assert end.value.code == TERMINATED


def test_an_error_of_the_program_is_unchanged():
    with pytest.raises(RuntimeError, match="of the program"), sigterm_as_exit():
        raise RuntimeError("of the program")
