"""The package as a whole: the cost of importing it, and the locations of the public names."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import verl
from verl.utils.errors import MissingDependencyError

ROOT = Path(__file__).parents[1]


def python(code: str) -> str:
    """Return the output of a new interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


HEAVY = ("torch", "transformers", "numpy", "hydra", "omegaconf", "ray", "tensordict", "datasets")


@pytest.mark.parametrize(
    "module", ["verl", "verl.config", "verl.utils.errors", "verl.utils.registry", "verl.trainer"]
)
def test_importing_it_loads_nothing_heavy(module):
    assert (
        python(f"import sys, {module}; print([name for name in {HEAVY} if name in sys.modules])")
        == "[]"
    )


def test_importing_it_is_instant():
    timed = (
        "import time; start = time.process_time(); import verl; verl.__version__; "
        "print(time.process_time() - start)"
    )
    assert min(float(python(timed)) for _ in range(3)) < 0.3


def test_arguments_are_checked_before_torch_is_loaded():
    code = (
        "import sys; import verl.jobs.main_merge; from verl.trainer.main_ppo import main; "
        "status = main(['no.such.key=1']); print(status, 'torch' in sys.modules)"
    )
    assert python(code) == "1 False"


def test_it_is_packaged_as_typed():
    """Require the py.typed file: without it, type checkers ignore the annotations of a package."""
    packaged = re.search(r"^verl = \[(.*)\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert packaged is not None
    assert '"py.typed"' in packaged[1]
    assert (ROOT / "verl/py.typed").is_file()


def test_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", verl.__version__)


def test_public_names_are_where_users_import_them():
    from verl import DataProto
    from verl.data import RLDataLoader
    from verl.trainer import PPOTrainer, RayPPOTrainer, RLTrainer

    assert DataProto.__module__ == "verl.protocol.data_proto"
    assert RLDataLoader.__module__ == "verl.data.loader"
    assert RayPPOTrainer is PPOTrainer
    assert RLTrainer.__module__ == verl.train.__module__ == "verl.trainer.api"
    assert {"init_workers", "fit", "step"} <= set(dir(PPOTrainer))
    for package in (
        "verl",
        "verl.agents",
        "verl.config",
        "verl.data",
        "verl.trainer",
        "verl.utils",
    ):
        module = importlib.import_module(package)
        assert set(module.__all__) <= set(dir(module))


def test_a_missing_package_is_named_with_its_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "verl.trainer.api", None)  # not found, and ours
    with pytest.raises(ModuleNotFoundError, match="verl.trainer.api"):
        verl.train  # noqa: B018

    monkeypatch.delitem(sys.modules, "verl.trainer.api")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingDependencyError, match="verl.train: .*'torch' .* pip install"):
        verl.train  # noqa: B018


def test_an_unknown_name_is_an_attribute_error():
    for module in ("verl", "verl.trainer", "verl.config"):
        with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'nothing'"):
            importlib.import_module(module).nothing  # noqa: B018


ALONE = """
import importlib, json, os, sys
import verl.trainer.ppo_trainer  # what others made is loaded once, for all children
loaded = [name for name in sys.modules if name.split('.')[0] == 'verl']
for name in loaded:
    del sys.modules[name]
failed = []
for name in {names!r}:
    child = os.fork()
    if child == 0:
        importlib.import_module(name)
        os._exit(0)
    if os.waitpid(child, 0)[1] != 0:
        failed.append(name)
print(json.dumps([loaded, failed]))
"""


@pytest.fixture(scope="module")
def imported() -> tuple[list[str], list[str]]:
    """Return the modules that the trainer loads, and the rooms that cannot be imported alone.

    One process answers both: to import torch and transformers takes seconds.
    """
    rooms = [
        path
        for path in (ROOT / "verl").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    ]
    names = [f"verl.{path.stem}" for path in sorted(rooms) if path.stem != "__init__"]
    assert "verl.trainer" in names
    loaded, failed = json.loads(python(ALONE.format(names=names)))
    return loaded, failed


@pytest.mark.slow
def test_the_trainer_loads_agents_only_where_a_run_has_them(imported):
    loaded, _ = imported
    assert "verl.trainer.ppo_trainer" in loaded
    assert [name for name in loaded if name.startswith("verl.agents.")] == []


@pytest.mark.slow
def test_every_room_can_be_imported_alone(imported):
    """Import each room first: an import cycle may work only if another module came before."""
    _, failed = imported
    assert failed == []
