"""How a command ends that a user has given something wrong."""

import os
import subprocess
import sys

import pytest

from verl.utils.entry import exit_code
from verl.utils.errors import DataError

FAILS = """
import sys
from verl.utils.entry import exit_code
from verl.utils.errors import DataError
def job():
    raise DataError("no rows")
sys.exit(exit_code(job))
"""


@pytest.mark.parametrize(("traceback", "tracebacks"), [("", 0), ("1", 1)])
def test_message_and_traceback_are_told_once(traceback: str, tracebacks: int):
    environment = {**os.environ, "VERL_TRACEBACK": traceback}
    done = subprocess.run(
        [sys.executable, "-c", FAILS], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == tracebacks
    assert done.stderr.count("DataError: no rows") == 1


def test_a_file_that_may_not_be_written_is_one_line(capfd):
    def job() -> None:
        # as pyarrow has it
        raise PermissionError(13, "Failed to open local file '/x/train.parquet'")

    assert exit_code(job) == 1
    assert "train.parquet'. Make room, or name another folder" in (told := capfd.readouterr().err)
    assert len(told.splitlines()) == 1


def test_a_long_message_keeps_its_begin_and_its_end(capfd):
    def job() -> None:
        raise DataError(f"Row 3 is {'x' * 10**6}. Write it again.")

    assert exit_code(job) == 1
    told = capfd.readouterr().err
    assert len(told) < 10_000
    assert told.startswith("DataError: Row 3 is xxx")
    assert told.endswith("xxx. Write it again.\n")


def test_any_other_error_is_ours():
    def job() -> None:
        raise BrokenPipeError(32, "Broken pipe")

    with pytest.raises(BrokenPipeError):
        exit_code(job)
