"""How a command ends that a user has given something wrong."""

import gc
import os
import subprocess
import sys

import pytest

from verl.utils.entry import exit_code
from verl.utils.garbage import loading_packages

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
    done = subprocess.run([sys.executable, "-c", FAILS], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == tracebacks
    assert done.stderr.count("DataError: no rows") == 1


def test_a_file_that_may_not_be_written_is_one_line(capfd):
    def job() -> None:
        raise PermissionError(13, "Failed to open local file '/x/train.parquet'")  # as pyarrow has it

    assert exit_code(job) == 1
    assert "train.parquet'. Make room, or name another folder" in (told := capfd.readouterr().err)
    assert len(told.splitlines()) == 1


def test_any_other_error_is_ours():
    def job() -> None:
        raise BrokenPipeError(32, "Broken pipe")

    with pytest.raises(BrokenPipeError):
        exit_code(job)


def test_the_collector_waits_while_packages_load_and_passes_over_them_later():
    before = gc.get_freeze_count()
    try:
        with pytest.raises(ImportError), loading_packages():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled()
        assert gc.get_freeze_count() == before
        with loading_packages():
            made = [[]]
        assert gc.isenabled()
        assert gc.get_freeze_count() > before
        assert all(found is not made for found in gc.get_objects())
    finally:
        gc.unfreeze()
