import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from verl.utils.errors import ConfigError
from verl.utils.scratch import hold_scratch, make_scratch, remove_scratch, scratch_path

_HOLDER = """
import sys
from verl.utils.scratch import hold_scratch, make_scratch, scratch_path
made = make_scratch()
hold_scratch(scratch_path("shared"))
print(made, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files of this test and its processes."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_the_folders_of_a_killed_process_are_removed_at_the_next_start(folder: Path):
    stranger = folder / "verl-of-an-older-version"
    stranger.mkdir()
    other = subprocess.Popen(
        [sys.executable, "-c", _HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    made = Path(other.stdout.readline().strip())
    shared = scratch_path("shared")
    assert {made, shared, stranger} == set(folder.iterdir())
    assert made.stat().st_mode & 0o777 == 0o700

    hold_scratch(shared)
    own = make_scratch()
    assert {made, shared, stranger, own} == set(folder.iterdir()), "all are in use"

    other.send_signal(signal.SIGKILL)
    other.wait()
    remove_scratch(own)
    own = make_scratch()
    assert {shared, stranger, own} == set(folder.iterdir())

    remove_scratch(shared)
    remove_scratch(own)
    assert [stranger] == list(folder.iterdir())


def test_neither_a_link_nor_another_users_folder_is_removed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    theirs = folder / "verl-theirs.tmp"
    theirs.mkdir()
    (folder / "verl-link.tmp").symlink_to(theirs)
    uid = os.getuid()
    monkeypatch.setattr("os.getuid", lambda: uid + 1)
    remove_scratch(make_scratch())
    assert len(list(folder.iterdir())) == 2

    monkeypatch.undo()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    remove_scratch(make_scratch())
    assert [path.name for path in folder.iterdir()] == ["verl-link.tmp"]


def test_a_folder_whose_sockets_would_have_too_long_a_path_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 20)))
    with pytest.raises(ConfigError, match=r"bytes too long\. Set TMPDIR to a shorter one"):
        make_scratch()


def test_a_folder_that_python_passes_over_is_named(folder, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr("verl.utils.scratch.say_once", lambda text, level: said.append(text))
    make_scratch()
    assert said == []

    monkeypatch.setenv("TMPDIR", "/missing")
    make_scratch()
    assert said == [
        f"TMPDIR=/missing takes no file, so sockets and logs of this run lie in {folder}. Make "
        "the folder, or unset TMPDIR."
    ]
