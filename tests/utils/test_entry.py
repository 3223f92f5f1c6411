"""The exit of a command after invalid input from a user."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.readers import run_without_reader
from verl.utils.entry import exit_code
from verl.utils.errors import DataError, describe_error

FAILS = """
import sys
from verl.utils.entry import exit_code
from verl.utils.errors import DataError
def job():
    raise DataError("no rows")
sys.exit(exit_code(job))
"""


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    environment = os.environ | variables
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_an_error_is_described_by_its_class_and_any_text():
    assert describe_error(DataError("no rows")) == "DataError: no rows"
    assert describe_error(EOFError()) == "EOFError"


@pytest.mark.parametrize(("traceback", "tracebacks"), [("", 0), ("1", 1)])
def test_message_and_traceback_are_printed_once(traceback: str, tracebacks: int):
    done = run(FAILS, VERL_TRACEBACK=traceback)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == tracebacks
    assert done.stderr.count("DataError: no rows") == 1


@pytest.mark.parametrize(
    ("error", "way_out"),
    [
        # the message of pyarrow
        (PermissionError(13, "Failed to open local file '/x/a.parquet'"), "Free some space, or"),
        (FileExistsError(17, "File exists", "/x/a.parquet"), "Correct the path."),
        (OSError(27, "File too large", "/x/a.parquet"), "Raise the limit on the size of a file"),
        (OSError(24, "Too many open files", "/x/a.parquet"), "Raise the limit on open files"),
    ],
)
def test_a_file_that_cannot_be_written_is_reported_in_one_line(capfd, error, way_out):
    def job() -> None:
        raise error

    assert exit_code(job) == 1
    message = capfd.readouterr().err
    assert f"/x/a.parquet'. {way_out}" in message
    assert len(message.splitlines()) == 1


def test_a_removed_working_directory_is_reported_in_one_line(tmp_path, capfd, monkeypatch):
    removed = tmp_path / "removed"
    removed.mkdir()
    monkeypatch.chdir(removed)
    removed.rmdir()

    # Not even a job without files begins: MKL would end the process.
    assert exit_code(lambda: print("begun")) == 1
    out, message = capfd.readouterr()
    assert out == ""
    assert "The working directory was removed; change to one that exists." in message
    assert len(message.splitlines()) == 1


CLOSES = """
import sys
from verl.utils.entry import exit_code
from verl.utils.errors import DataError
from verl.utils.logging import configure_logging, logger
from verl.utils.streams import show
def job():
    configure_logging()
    sys.stdout.close()
    logger.info("of the log")
    sys.stdout.close()
    show("of a tracker")
    sys.stdout.close()
    sys.stderr.close()
    {end}
sys.exit(exit_code(job))
"""


@pytest.mark.parametrize(
    ("end", "last", "code"),
    [("pass", "W A part of this run", 0), ("raise DataError('no rows')", "DataError: no rows", 1)],
)
def test_streams_that_a_users_code_has_closed_are_open_again(end: str, last: str, code: int):
    done = run(CLOSES.format(end=end))
    assert done.stdout == "I of the log\nof a tracker\n"
    lines = done.stderr.splitlines()
    assert "closed sys.stdout, which" in lines[0]
    assert "closed sys.stderr, which" in lines[1], "each is reported once"
    assert len(lines) == 2 + code
    assert lines[-1].startswith(last)
    assert done.returncode == code


def test_a_long_message_keeps_its_beginning_and_its_end(capfd):
    def job() -> None:
        raise DataError(f"Row 3 is {'x' * 10**6}. Write it again.")

    assert exit_code(job) == 1
    output = capfd.readouterr().err
    assert len(output) < 10_000
    assert output.startswith("DataError: Row 3 is xxx")
    assert output.endswith("xxx. Write it again.\n")


def test_any_other_error_keeps_its_traceback():
    def job() -> None:
        raise BrokenPipeError(32, "Broken pipe")

    with pytest.raises(BrokenPipeError):
        exit_code(job)


CRASHES = """
import os, sys
from verl.utils.entry import exit_code
def update_actor():
    os.abort()
sys.exit(exit_code(update_actor))
"""


def test_a_crash_in_compiled_code_prints_the_python_stack():
    done = run(CRASHES)
    assert done.returncode == -signal.SIGABRT
    assert done.stderr.startswith("Fatal Python error: Aborted")
    assert "in update_actor" in done.stderr


def test_a_command_without_standard_error_crashes_alike(tmp_path: Path):
    (tmp_path / "crashes.py").write_text(CRASHES)
    shell = f"exec {sys.executable} {tmp_path}/crashes.py 2>&-"
    assert subprocess.run(shell, shell=True, check=False).returncode == -signal.SIGABRT


PRINTS = """
import sys
from verl.utils.entry import exit_code
def job():
    for number in range(1_000_000):
        print(number)
sys.exit(exit_code(job))
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_stops_reading_ends_a_command_silently(unbuffered: str):
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    command = subprocess.Popen(
        [sys.executable, "-c", PRINTS],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert command.stdout is not None
    assert command.stderr is not None
    assert command.stdout.readline() == "0\n"
    command.stdout.close()  # like `head -1`
    assert command.stderr.read() == ""
    assert command.wait(60) == 141


def test_a_short_output_that_is_not_read_ends_silently_too():
    code = PRINTS.replace("1_000_000", "3").replace(
        "for number", "sys.stdin.read()\n    for number"
    )
    command = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )

    assert command.stdin is not None
    assert command.stdout is not None
    assert command.stderr is not None
    command.stdout.close()
    command.stdin.close()
    assert command.stderr.read() == b""
    assert command.wait(60) == 141


def test_an_error_is_reported_once_when_the_reader_of_the_output_has_exited():
    code = FAILS.replace("raise", "print(1)\n    raise")
    done = run_without_reader([sys.executable, "-c", code])
    assert (done.returncode, done.stderr) == (1, "DataError: no rows\n")


def test_a_closed_stdout_is_no_error():
    code = PRINTS.replace("1_000_000", "3").replace("import sys", "import sys\nsys.stdout = None")
    done = run(code)
    assert (done.returncode, done.stderr) == (0, "")


# One job, one old name of a program, and one command that reads its arguments by argparse. Each
# takes seconds to import.
MODULES = ("verl.jobs.main_view", "verl.model_merger", "verl.diagnostics.doctor")


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_help_of_a_module_ends_silently_when_its_reader_has_exited(module: str):
    done = run_without_reader([sys.executable, "-m", module, "--help"])
    assert (done.returncode, done.stderr) == (141, "")
