"""Hostile programs in every isolation, against a trainer that is root, has no capabilities, is an
ordinary user, or has its Python in the temporary folder."""

import ctypes
import functools
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest

from tests.rewards import hostile_programs
from tests.rewards.hostile_programs import ENDLESS, OF_FILES, PROGRAMS, READS, SECRET
from verl.config.reward import SandboxConfig
from verl.rewards.sandbox import landlock, seccomp
from verl.rewards.sandbox.runner import choose_isolation
from verl.utils.errors import ConfigError

pytestmark = pytest.mark.skipif(
    not seccomp.is_supported(), reason="needs Linux on x86-64 or AArch64"
)

# The programs of each trainer.
OF_USERS = {
    "this user": list(PROGRAMS),
    "no capabilities": list(PROGRAMS),
    "an ordinary user": list(PROGRAMS),
    "Python in /tmp": [name for name in PROGRAMS if name in OF_FILES],
}
# Each user needs a trainer of its own, which takes seconds to start.
CASES = [
    pytest.param(user, isolation, name, marks=() if user == "this user" else pytest.mark.slow)
    for user, names in OF_USERS.items()
    for isolation in ("namespaces", "seccomp")
    for name in names
]
_ORDINARY_UID = 54321
_PR_CAPBSET_DROP = 24
_CAPABILITIES = 64


def drop_bounding_set() -> None:
    """Start root's next program without capabilities."""
    libc = ctypes.CDLL(None)
    for capability in range(_CAPABILITIES):
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)


def become_ordinary() -> None:
    os.setgroups([])
    os.setgid(_ORDINARY_UID)
    os.setuid(_ORDINARY_UID)


def run_trainer(user: str, isolation: str, folder: str) -> dict:
    """Run its programs from a trainer of this kind; return its findings."""
    python = sys.executable
    before = None
    if user in ("no capabilities", "an ordinary user") and os.getuid() != 0:
        return {"unavailable": "only root can become someone else"}
    if user == "no capabilities":
        before = drop_bounding_set
    elif user == "an ordinary user":
        python = ordinary_python()
        before = become_ordinary
        if python is None:
            return {"unavailable": "an ordinary user can run no Python of this version"}
    elif user == "Python in /tmp":
        venv = [sys.executable, "-m", "venv", "--without-pip", f"{folder}/venv"]
        subprocess.run(venv, check=True)
        python = f"{folder}/venv/bin/python"

    packages = [str(Path(__file__).parents[2]), sysconfig.get_path("purelib")]
    environment = {
        "PATH": os.defpath,
        "PYTHONPATH": os.pathsep.join(packages),
        "PYTHONDONTWRITEBYTECODE": "1",
        "SECRET": SECRET,
    }
    command = [python, hostile_programs.__file__, isolation, *OF_USERS[user]]
    done = subprocess.run(
        command,
        preexec_fn=before,
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return json.loads(done.stdout) if done.returncode == 0 else {"failed": done.stderr}


def ordinary_python() -> str | None:
    """Find a Python of our version that any user may run: ours may be in a home folder."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    for python in (sys.executable, f"/usr/bin/python{version}", f"/usr/local/bin/python{version}"):
        probe = [python, "-c", "import json"]
        try:
            if subprocess.run(probe, preexec_fn=become_ordinary, cwd="/").returncode == 0:
                return python
        except OSError:
            continue
    return None


@functools.cache
def answer_of(user: str, isolation: str) -> dict:
    """Run the trainer, once for all tests of its programs."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        return run_trainer(user, isolation, folder)


def findings(user: str, isolation: str) -> dict:
    """Return the actions of each program. Skip if this trainer or isolation is unavailable."""
    answer = answer_of(user, isolation)
    assert "failed" not in answer, answer["failed"]
    if "unavailable" in answer:
        if user == "Python in /tmp":
            try:
                choose_isolation(SandboxConfig(isolation=isolation))
            except ConfigError:
                pytest.skip("not even with Python elsewhere")
            pytest.fail(answer["unavailable"])
        pytest.skip(answer["unavailable"])
    return answer["results"]


@pytest.mark.parametrize(("user", "isolation", "name"), CASES)
def test_a_hostile_program_is_contained(user, isolation, name):
    results = findings(user, isolation)
    if isolation == "seccomp" and name in READS and not landlock.version():
        pytest.skip("this kernel has no Landlock")
    result = results[name]
    assert not result["escaped"], result["output"]
    assert not result["harm"]
    assert result["size"] <= 16 * 2**20
    assert result["honest"], f"an honest program failed: {result['complaint']}"
    if name in ENDLESS:
        assert result["status"] == "timeout"
    if name.startswith("forged"):
        assert result["passed"] == []
