"""Find the origin of a reward function's code, which determines how it may be called."""

import ast
import inspect
import sys
from pathlib import Path
from typing import Any

from verl.rewards.outcome import RewardFunction
from verl.rewards.registry import Rule, reward_rules

# Modules that limit time by signals and therefore work only in the main thread.
_SIGNAL_USERS = {"signal", "math_verify", "timeout_decorator"}


def runs_here(function: RewardFunction) -> bool:
    """Return whether code of a user runs in this process: a function, or a registered rule."""
    return any(not _is_ours(module) for module in modules_of(function))


def uses_signals(function: RewardFunction) -> bool:
    """Return whether the file of `function`, or of a user's rule, imports a module of signals."""
    return any(_imports_signals(module) for module in modules_of(function))


def modules_of(function: RewardFunction) -> list[str]:
    """Return the names of the modules with the code of a function, or with the users' rules."""
    functions = rules_of_users() if calls_rules(function) else [function]
    return list(dict.fromkeys(map(module_name, functions)))


def rules_of_users() -> list[Rule]:
    """Return the registered rules that do not come with this package."""
    rules = [reward_rules.get(source) for source in reward_rules]
    return [rule for rule in rules if not _is_ours(module_name(rule))]


def is_coroutine_function(function: RewardFunction) -> bool:
    """Return whether the calls of a function, or of a callable object, must be awaited."""
    method = getattr(function, "__call__", None)  # noqa: B004  (not a test for callability)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(method)


def module_name(function: Any) -> str:
    """Return the name of the module that defines a function, or the class of a callable object."""
    target = inspect.unwrap(getattr(function, "func", function))
    return getattr(target, "__module__", None) or type(target).__module__


def calls_rules(function: RewardFunction) -> bool:
    """Return whether a function is `rules.default_compute_score`, with or without options."""
    return module_name(function) == "verl.rewards.rules"


def _is_ours(module: str) -> bool:
    return module.startswith("verl.")


def _imports_signals(module_name: str) -> bool:
    module = sys.modules.get(module_name)
    path = getattr(module, "__file__", None)
    if path is None or not path.endswith(".py") or _is_ours(module_name):
        return False

    imported: set[str] = set()
    for node in ast.walk(ast.parse(Path(path).read_bytes())):
        if isinstance(node, ast.Import):
            imported |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            imported.add(node.module.split(".")[0])
    return not imported.isdisjoint(_SIGNAL_USERS)
