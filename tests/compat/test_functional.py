"""Small tools of verl 0.5: dictionaries, enumerations, time limits, imports."""

import os
import pickle
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from omegaconf import OmegaConf

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from verl.utils.import_utils import (  # pyright: ignore[reportMissingImports]
        deprecated,
        load_extern_type,
    )
    from verl.utils.py_functional import (  # pyright: ignore[reportMissingImports]
        DynamicEnum,
        NestedNamespace,
        append_to_dict,
        convert_to_regular_types,
        list_of_dict_to_dict_of_list,
        rename_dict,
        temp_env_var,
        timeout_limit,
        union_two_dict,
    )


def test_dictionaries():
    lists = {"a": [1]}
    append_to_dict(lists, {"a": 2, "b": 3})
    assert lists == {"a": [1, 2], "b": [3]}
    assert union_two_dict({"a": 1}, {"a": 1, "b": 2}) == {"a": 1, "b": 2}
    with pytest.raises(AssertionError, match=r"\['a'\]"):
        union_two_dict({"a": 1}, {"a": 2})
    assert rename_dict({"loss": 1}, "actor") == {"actor/loss": 1}
    assert list_of_dict_to_dict_of_list([{"a": 1}, {"a": 2}]) == {"a": [1, 2]}
    with pytest.raises(AssertionError, match="same keys"):
        list_of_dict_to_dict_of_list([{"a": 1}, {"b": 2}])

    tree = OmegaConf.create({"a": [1, {"b": 2}]})
    plain = convert_to_regular_types({"tree": tree, "n": np.float32(0.5)})
    assert plain == {"tree": {"a": [1, {"b": 2}]}, "n": 0.5}
    assert type(plain["tree"]) is dict
    assert NestedNamespace({"a": {"b": 1}}).a.b == 1


class Colors(DynamicEnum):
    _registry: ClassVar[dict] = {}  # as in verl's own enumerations
    _next_value: ClassVar[int] = 0


def test_enumeration_accepts_new_members():
    red = Colors.register("red")
    blue = Colors.register("BLUE")
    try:
        assert Colors.RED is red
        assert [red.value, blue.value] == [0, 1]
        assert Colors.names() == ["RED", "BLUE"]
        assert list(Colors) == [red, blue]
        assert "RED" in Colors
        assert red in Colors
        assert Colors["RED"] is Colors.from_name("Red") is red
        assert pickle.loads(pickle.dumps(red)) is red
        with pytest.raises(ValueError, match="already registered"):
            Colors.register("red")
    finally:
        Colors.remove("red")
        Colors.remove("blue")

    assert not hasattr(Colors, "RED")
    assert "RED" not in Colors
    assert Colors.from_name("red") is None


def test_variable_is_restored_after_an_error(monkeypatch):
    monkeypatch.setenv("VERL_TEST_OLD", "old")
    monkeypatch.delenv("VERL_TEST_NEW", raising=False)
    with temp_env_var("VERL_TEST_OLD", "new"), temp_env_var("VERL_TEST_NEW", "1"):
        assert os.environ["VERL_TEST_OLD"] == "new"
        assert os.environ["VERL_TEST_NEW"] == "1"
    with pytest.raises(KeyError), temp_env_var("VERL_TEST_NEW", "2"):
        raise KeyError
    assert os.environ["VERL_TEST_OLD"] == "old"
    assert "VERL_TEST_NEW" not in os.environ


@pytest.mark.parametrize("use_signals", [False, True])
def test_time_limit(use_signals):
    @timeout_limit(seconds=0.2, use_signals=use_signals)
    def slow():
        time.sleep(600)

    @timeout_limit(seconds=60, use_signals=use_signals)
    def quick(x, plus=0):
        if x < 0:
            raise ValueError("below 0")
        return x + plus

    with pytest.raises(TimeoutError, match="Function slow timed out after 0.2 seconds"):
        slow()
    assert quick(1, plus=2) == 3
    with pytest.raises(ValueError, match="below 0"):
        quick(-1)
    assert quick.__name__ == "quick"


def test_time_limit_in_a_thread():
    @timeout_limit(seconds=60)
    def quick():
        return "done"

    @timeout_limit(seconds=60, use_signals=True)
    def by_signal():
        return "done"

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(quick).result() == "done"
        with pytest.raises(ValueError, match="main thread"):
            thread.submit(by_signal).result()


def test_dead_process_is_not_a_timeout():
    @timeout_limit(seconds=60)
    def dies():
        os._exit(7)

    with pytest.raises(RuntimeError, match="exit code 7"):
        dies()


def test_user_file_errors_have_the_types_of_verl(tmp_path: Path):
    file = tmp_path / "own.py"
    file.write_text("ANSWER = 42\nclass Own:\n    pass\n")
    broken = tmp_path / "broken.py"
    broken.write_text("def (:\n")
    assert load_extern_type(str(file), "ANSWER") == 42
    assert load_extern_type(str(file), "Own").__name__ == "Own"
    assert load_extern_type(None, "Own") is None
    with pytest.raises(FileNotFoundError, match="found none"):
        load_extern_type(str(tmp_path / "none.py"), "Own")
    with pytest.raises(AttributeError, match="'Owm'. Nearest names in it: Own"):
        load_extern_type(str(file), "Owm")
    with pytest.raises(RuntimeError, match="line 1, is not Python"):
        load_extern_type(str(broken), "Own")


def test_deprecated_names_warn():
    @deprecated("new_name")
    def old_name(x):
        return x + 1

    @deprecated()
    class OldClass:
        def __init__(self, x):
            self.x = x

    with pytest.warns(FutureWarning, match="old_name is deprecated.*new_name"):
        assert old_name(1) == 2
    with pytest.warns(FutureWarning, match="OldClass is deprecated"):
        assert OldClass(3).x == 3


@pytest.mark.parametrize("seconds", [0, -1.0])
def test_a_limit_that_is_none_is_an_error(seconds: float):
    with pytest.raises(ValueError, match=f"needs seconds above 0, got {seconds}"):
        timeout_limit(seconds, use_signals=True)
