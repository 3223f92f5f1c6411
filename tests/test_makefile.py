"""Every test that runs here belongs to one of `make test` and `make test-slow`."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_two_commands_divide_the_tests_of_plain_pytest():
    tomllib = pytest.importorskip("tomllib", reason="comes with Python 3.11")
    makefile = (ROOT / "Makefile").read_text()
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    options = settings["tool"]["pytest"]["ini_options"]["addopts"]

    (plain,) = re.findall(r"-m '(.*)'", options)
    (here,) = re.findall(r"^HERE := (.*)$", makefile, re.MULTILINE)
    chosen = dict(re.findall(r"^(test\S*):.*\n\t\$\(TEST\) -m '(.*?)'", makefile, re.MULTILINE))

    assert here == plain
    assert chosen == {"test": "$(HERE) and not slow", "test-slow": "$(HERE) and slow"}


def test_ci_runs_every_test_command():
    makefile = (ROOT / "Makefile").read_text()
    commands = re.findall(r"^(test\S*):", makefile, re.MULTILINE)
    ci = (ROOT / ".ci" / "run").read_text().splitlines()
    assert [line for line in ci if line.startswith("make ")] == [
        f"make {name}" for name in commands
    ]
