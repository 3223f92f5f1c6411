"""The container files agree with the Makefile, pyproject.toml and the doctor. Nothing is built
here."""

import re
import shlex
from pathlib import Path

import pytest

from verl.diagnostics.host_checks import OPEN_FILES, SHM
from verl.utils.units import GIB

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "docker").glob("Dockerfile.*"))
MAKEFILE = (ROOT / "Makefile").read_text()
PYPROJECT = (ROOT / "pyproject.toml").read_text()
PAGE = (ROOT / "docker" / "README.md").read_text()


def instructions(path: Path) -> list[tuple[str, str]]:
    """Return (word, rest) of each instruction, with continued lines joined."""
    lines = [
        line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")
    ]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in joined]


def runs(path: Path) -> list[str]:
    """Return every command of the RUN and CMD lines."""
    found = [rest for word, rest in instructions(path) if word in ("RUN", "CMD")]
    return [command for rest in found for command in re.sub(r'[\[\]",]+', " ", rest).split(" && ")]


def test_there_is_a_file_for_each_kind_of_machine():
    assert [path.name for path in FILES] == ["Dockerfile.cpu", "Dockerfile.cuda"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_package_supports_the_python_version(path: Path):
    [image] = [rest for word, rest in instructions(path) if word == "FROM"]
    minor = int(re.fullmatch(r"python:3\.(\d+)-slim", image)[1])  # pyright: ignore[reportOptionalSubscript]
    least = int(re.findall(r'requires-python = ">=3\.(\d+)"', PYPROJECT)[0])
    first, last = re.findall(r"Python 3\.(\d+) to 3\.(\d+)", (ROOT / "README.md").read_text())[0]
    assert least == int(first) <= minor <= int(last)


def test_the_cpu_image_follows_ci():
    path = ROOT / "docker" / "Dockerfile.cpu"
    targets = [
        shlex.split(command)[1] for command in runs(path) if command.strip().startswith("make")
    ]
    assert targets == ["install", "test"]
    assert all(re.search(rf"^{target}:", MAKEFILE, re.MULTILINE) for target in targets)
    # CI goes on with the slow tests, and with a vLLM in an environment of its own.
    steps = (ROOT / ".ci" / "run").read_text().splitlines()[-3:]
    assert steps == [f"make {targets[-1]}", "make test-slow", "make test-vllm"]


def test_the_cuda_image_has_the_makefiles_torch_and_extras_that_exist():
    path = ROOT / "docker" / "Dockerfile.cuda"
    pinned = [
        name for command in runs(path) for name in re.findall(r"pip install torch==(\S+)", command)
    ]
    assert pinned == re.findall(r"torch==(\S+)\+cpu", MAKEFILE)
    known = re.findall(
        r"^(\w+) = \[",
        PYPROJECT.split("[project.optional-dependencies]")[1].split("\n[")[0],
        re.MULTILINE,
    )
    [default] = [rest.removeprefix("EXTRAS=") for word, rest in instructions(path) if word == "ARG"]
    [shown] = re.findall(r"--build-arg EXTRAS=(\S+)", PAGE)
    assert {*default.split(","), *shown.split(",")} <= {*known}
    assert 'pip install -e ".[$EXTRAS]"' in path.read_text()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_inputs_of_an_installation_are_copied_before_it(path: Path):
    there: set[str] = set()
    installed = False
    for word, rest in instructions(path):
        if word == "COPY":
            there |= {source.rstrip("/") for source in rest.split()[:-1]}
        elif word == "RUN" and re.search(r"make install|pip install -e", rest):
            read = {
                "pyproject.toml",
                re.findall(r'readme = "(.*)"', PYPROJECT)[0],
                "verl/__init__.py",
            }
            assert read <= there
            assert "make" not in rest or "Makefile" in there
            installed = True

    assert installed
    assert there >= {"."}
    assert all((ROOT / source).exists() for source in there)


def test_files_ignored_by_git_stay_out_of_the_image():
    ignored = {
        line.strip("/").removeprefix("**/") for line in (ROOT / ".dockerignore").read_text().split()
    }
    assert {line.strip("/") for line in (ROOT / ".gitignore").read_text().split()} | {
        ".git"
    } <= ignored
    needed = {
        "Makefile",
        "README.md",
        "pyproject.toml",
        "verl",
        "tests",
        "examples",
        "recipe",
        "bench",
        "docs",
    }

    assert not ignored & needed


def test_the_page_names_the_files_and_the_requirements_of_the_doctor():
    assert set(re.findall(r"-f (docker/\S+)", PAGE)) == {f"docker/{path.name}" for path in FILES}
    for name, least in (("shm-size=(\\d+)g", SHM / GIB), ("ulimit nofile=(\\d+):", OPEN_FILES)):
        given = [int(number) for number in re.findall(f"--{name}", PAGE)]
        assert given
        assert min(given) >= least
    assert all((ROOT / script).exists() for script in re.findall(r"bash (examples/\S+)", PAGE))
