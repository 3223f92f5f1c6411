"""Commands that the log suggests."""

import sys
from pathlib import Path

import pytest

from verl.utils.commands import verl_command


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an environment with the program, in which this process seems to run."""
    programs = tmp_path / "my project" / ".venv" / "bin"
    programs.mkdir(parents=True)
    program = programs / "verl"
    program.touch()
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    monkeypatch.setenv("PATH", "/usr/bin")
    return programs


def test_a_command_can_be_typed_where_the_environment_is_not_active(
    environment: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(environment.parents[1])
    assert verl_command("view", "a run") == ".venv/bin/verl view 'a run'"
    monkeypatch.chdir("/")
    assert verl_command("view", 7).endswith("project/.venv/bin/verl' view 7")

    removed = environment / "removed"
    removed.mkdir()
    monkeypatch.chdir(removed)
    removed.rmdir()
    assert verl_command("view", 7).endswith("project/.venv/bin/verl' view 7")
    monkeypatch.chdir("/")

    monkeypatch.setenv("PATH", f"/usr/bin:{environment}")
    assert verl_command("view", Path("run")) == "verl view run"

    (environment / "verl").unlink()
    monkeypatch.setenv("PATH", "/usr/bin")
    assert verl_command("view", "run") == "verl view run"
