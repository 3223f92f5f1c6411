"""The doctor runs without any of the packages, and gives one command that installs them."""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases import cases
from verl.diagnostics.requirements import read_requirement
from verl.diagnostics.world import CORE_MODULES, canonical
from verl.utils.imports import distribution_of, missing_package

ROOT = Path(__file__).parents[2]
# Python loads this file at startup, also in the process of the probe.
BLOCKER = """
import importlib.abc, os, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if fullname.split(".")[0] in os.environ["BLOCKED"].split(","):
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)

sys.meta_path.insert(0, Blocker())
"""
# Importing torch takes seconds, so the real probe runs only where torch is missing.
DOCTOR = """
import os, sys
from verl.cli.main import main
from verl.diagnostics import world
from verl.diagnostics.probing import Probed

if "torch" not in os.environ["BLOCKED"]:
    world.probe = lambda packages: Probed()
sys.exit(main(["doctor", "--json"]))
"""
INSTALLED_BY = {
    "torch": "'torch>=2.11'",
    "transformers": "'transformers<6,>=5'",
    "numpy": "'numpy>=2'",
    "omegaconf": "'omegaconf<2.4,>=2.3'",
    "hydra": "'hydra-core<1.4,>=1.3'",
    "yaml": "PyYAML",
    "psutil": "psutil",
    "packaging": "packaging",
}


ALONE = [[module] for module in INSTALLED_BY]


@pytest.mark.parametrize(
    "modules",
    cases([*ALONE, [*INSTALLED_BY]], quick=lambda modules: modules not in ALONE[3:]),
    ids=",".join,
)
def test_doctor_runs_without_each_package(modules: list[str], tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    done = subprocess.run(
        [sys.executable, "-c", DOCTOR],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "BLOCKED": ",".join(modules)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    findings = json.loads(done.stdout)["findings"]
    broken = [finding for finding in findings if finding["verdict"] == "broken"]

    assert broken[0]["name"] == "missing packages"
    command = broken[0]["fix"].split()
    assert command[:2] == ["pip", "install"]
    # Without installed metadata of verl the version ranges are unknown.
    names = {INSTALLED_BY[module] for module in modules}
    if not is_installed():
        names = {distribution_of(module) for module in modules}
    assert set(command[2:]) == names
    assert not [finding for finding in broken if "No module named" in finding["evidence"]]
    assert modules != ["packaging"] or "within their ranges" not in done.stdout


def is_installed() -> bool:
    return bool(list(importlib.metadata.distributions(name="verl")))


@pytest.mark.skipif(not is_installed(), reason="verl has no metadata here")
def test_core_modules_cover_the_requirements():
    core = {canonical(distribution_of(module)) for module in CORE_MODULES}
    required = [read_requirement(text) for text in importlib.metadata.requires("verl") or ()]
    assert {needed.name for needed in required if needed and needed.extra is None} <= core


@pytest.mark.parametrize(
    ("module", "distribution"),
    [("yaml", "PyYAML"), ("hydra", "hydra-core"), ("PIL.Image", "pillow"), ("numpy", "numpy")],
)
def test_install_command_uses_the_distribution_name(module: str, distribution: str):
    text = missing_package(ModuleNotFoundError(f"No module named '{module}'", name=module))
    assert text is not None
    assert f"pip install {distribution} (" in text
