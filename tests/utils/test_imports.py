"""A missing package is named, with the command that installs it."""

import subprocess
import sys
from pathlib import Path

import pytest

from verl.agents.entries import load_class
from verl.compat.registries import ADV_ESTIMATOR_REGISTRY
from verl.rewards.managers import reward_managers
from verl.utils.errors import ConfigError, MissingDependencyError
from verl.utils.imports import import_user_code, load_extern_type, load_module, require


@pytest.mark.parametrize(
    ("module", "command"),
    [("hydra", "pip install hydra-core"), ("tensordict", "pip install tensordict")],
)
def test_a_missing_dependency_is_one_line_with_its_install_command(module, command):
    script = (
        f"import sys; sys.modules[{module!r}] = None\n"
        "from verl.trainer.main_ppo import main\n"
        "sys.exit(main(['data.dataset_name=toy', 'data.train_batch_size=4']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert command in done.stderr
    assert "Traceback" not in done.stderr


def test_an_optional_package_is_requested_by_name():
    with pytest.raises(
        MissingDependencyError,
        match="The tracker needs the package 'no_such_package'.*pip install it",
    ):
        require("no_such_package", "The tracker", "pip install it")
    assert require("json", "Nothing", "nothing").dumps([]) == "[]"


def test_a_users_file_is_loaded_once_and_never_shadows_another(tmp_path):
    for folder, value in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "reward.py").write_text(f"value = {value}\nmade = object()\n")
    one = tmp_path / "a" / "reward.py"
    other = tmp_path / "b" / "reward.py"
    assert (load_extern_type(str(one), "value"), load_extern_type(str(other), "value")) == (1, 2)
    assert load_module(str(one)).made is load_module(str(one)).made


def test_the_schemes_of_verl_name_modules_and_files(tmp_path, monkeypatch):
    (tmp_path / "named_by_scheme.py").write_text("class Mine: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_extern_type("pkg://named_by_scheme", "Mine").__module__ == "named_by_scheme"
    assert load_class("pkg://named_by_scheme.Mine").__module__ == "named_by_scheme"

    file = str(tmp_path / "named_by_scheme.py")
    assert load_module(f"file://{file}") is load_module(file)
    with pytest.raises(ConfigError, match="Cannot import 'no_such_module'"):
        load_module("pkg://no_such_module")


@pytest.mark.parametrize("as_list", [True, False], ids=["list", "commas"])
def test_several_modules_of_users_are_loaded(tmp_path, capsys, as_list):
    names = [str(tmp_path / f"{name}.py") for name in ("first", "second")]
    for name in names:
        Path(name).write_text(f"print({name!r})\n")
    import_user_code(None, names if as_list else ", ".join(names))
    assert capsys.readouterr().out.splitlines() == names


def test_a_wrong_file_or_name_is_reported(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="found none"):
        load_module(str(tmp_path / "missing.py"))
    with pytest.raises(ConfigError, match="no_such_module"):
        load_module("no_such_module")
    (tmp_path / "mine.py").write_text("def compute_score(): ...\n")
    with pytest.raises(ConfigError, match="has no 'compute_scores'.*compute_score"):
        load_extern_type(str(tmp_path / "mine.py"), "compute_scores")
    (tmp_path / "folder_of_rewards").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "raises.py").write_text("1 / 0\n")
    with pytest.raises(
        ConfigError, match="'raises', which raised ZeroDivisionError: division by zero"
    ):
        load_module("raises")
    with pytest.raises(ConfigError, match=r"'verl\.nowhere'.*import_paths\.md lists the names"):
        load_module("verl.nowhere")
    with pytest.raises(ConfigError, match="is a folder without code"):
        load_module("folder_of_rewards")


@pytest.mark.parametrize(
    ("name", "is_folder"), [(".", True), ("./parts", True), (".parts", False), ("", False)]
)
def test_a_folder_or_a_relative_name_is_no_module(tmp_path, monkeypatch, name, is_folder):
    (tmp_path / "parts").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match=r"key: expected a \.py file or the dotted name"
    ) as failure:
        load_module(name, "key")
    assert f"got '{name}'" in str(failure.value)
    assert ("Give the .py file in it" in str(failure.value)) == is_folder


def test_a_file_next_to_a_users_file_is_not_mistaken_for_a_package(tmp_path):
    (tmp_path / "helpers_of_mine.py").write_text("one = 1\n")
    (tmp_path / "reward.py").write_text("import math\nfrom helpers_of_mine import one\n")
    message = rf"reward\.py', line 2, imports 'helpers_of_mine', which is in the same.*PYTHONPATH={tmp_path}$"
    with pytest.raises(ConfigError, match=message):
        load_module(str(tmp_path / "reward.py"))
    (tmp_path / "reward.py").write_text("import a_package_that_nobody_has\n")

    with pytest.raises(
        MissingDependencyError,
        match=r"reward\.py', line 1: the package 'a_package_that_nobody_has' is",
    ):
        load_module(str(tmp_path / "reward.py"))

    (tmp_path / "reward.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(ConfigError, match=r"line 2, raised SystemExit: 0\. Fix the file"):
        load_module(str(tmp_path / "reward.py"))
    (tmp_path / "reward.py").write_text("import verl.nowhere\n")

    with pytest.raises(
        ConfigError, match=r"line 1, raised ModuleNotFoundError: No module named 'verl\.nowhere'"
    ):
        load_module(str(tmp_path / "reward.py"))


def test_a_users_file_that_fails_is_reloaded(tmp_path, monkeypatch):
    file = tmp_path / "broken.py"
    file.write_text("1 / 0\n")
    with pytest.raises(
        ConfigError, match=r"broken\.py', line 1, raised ZeroDivisionError: division by zero"
    ):
        load_module(str(file))
    for line in ("assert 1 > 2", "raise ValueError('assert 1 > 2.')"):
        file.write_text(f"{line}\n")
        with pytest.raises(ConfigError, match=r"line 1, raised \w+: assert 1 > 2\. Fix the file"):
            load_module(str(file))
    file.write_text("value = 3\ndef compute_score(:\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^'broken\.py', line 2, is not Python: invalid syntax"):
        load_module(file.name)
    file.write_text("value = 3\n")
    assert load_module(str(file)).value == 3


TWO_PARTS = """
from verl.trainer.ppo.core_algos import register_adv_est
from verl.workers.reward_manager import register

@register("loaded_twice")
class Manager:
    pass

@register_adv_est("loaded_twice")
def estimate(token_level_rewards, response_mask, **_):
    return token_level_rewards, token_level_rewards
"""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_file_may_be_loaded_by_its_path_and_by_its_name(tmp_path: Path, monkeypatch):
    for name in ("parts_of_mine", "other_parts"):
        (tmp_path / f"{name}.py").write_text(TWO_PARTS)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        module = load_module(str(tmp_path / "parts_of_mine.py"))
        assert load_module("parts_of_mine").Manager is not module.Manager
        assert reward_managers.get("loaded_twice") is module.Manager
        with pytest.raises(ConfigError, match="'loaded_twice' has already been registered"):
            load_module(str(tmp_path / "other_parts.py"))
    finally:
        reward_managers.remove("loaded_twice")
        ADV_ESTIMATOR_REGISTRY.pop("loaded_twice")


def test_a_relative_import_names_the_module_and_its_folder(tmp_path):
    package = tmp_path / "mine" / "rewards"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "helper.py").write_text("SCORE = 1.0")
    file = package / "exact.py"
    file.write_text("import math\nfrom .helper import SCORE\n")
    message = rf"exact\.py', line 2, .*Give 'mine\.rewards\.exact' .* PYTHONPATH={tmp_path}$"
    with pytest.raises(ConfigError, match=message):
        load_module(str(file))
