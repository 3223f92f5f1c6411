"""verl 0.5's table of dispatch modes, and the checks of `register` (`base.decorator`)."""

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from verl.single_controller.dispatch import (
    CALL_PLAN,
    MODES,
    DispatchMode,
    Execute,
    functions_of,
    mode_of_functions,
)
from verl.utils.errors import ConfigError

MAGIC_ATTR = CALL_PLAN  # where `register` notes its arguments on a method
_KEYS = ("dispatch_fn", "collect_fn")

Functions = dict[str, Callable[..., Any]]


class WrongModeError(ConfigError, AssertionError):
    """Something is no dispatch mode or execute mode. verl 0.5 asserts it."""


class _DispatchModes(MutableMapping[str, Functions]):
    """{name: {"dispatch_fn": ..., "collect_fn": ...}} over the dispatch modes. What was taken out
    can be put back."""

    def __init__(self) -> None:
        self._shown: dict[tuple[Callable[..., Any], ...], DispatchMode] = {}

    def __getitem__(self, name: str) -> Functions:
        mode = MODES[name]
        pair = functions_of(mode)
        self._shown[pair] = mode
        return dict(zip(_KEYS, pair))

    def __setitem__(self, name: str, functions: Functions) -> None:
        pair = (functions["dispatch_fn"], functions["collect_fn"])
        MODES[name] = self._shown.get(pair) or mode_of_functions(*pair)

    def __delitem__(self, name: str) -> None:
        del MODES[name]

    def __iter__(self) -> Iterator[str]:
        return iter(list(MODES))

    def __len__(self) -> int:
        return len(MODES)

    def copy(self) -> dict[str, Functions]:
        """A plain dictionary with the same values."""
        return dict(self)


DISPATCH_MODE_FN_REGISTRY = _DispatchModes()


def _check_dispatch_mode(dispatch_mode: Any) -> None:
    """Raise WrongModeError unless it is a known mode, or a mapping with a pair of functions."""
    if isinstance(dispatch_mode, dict):
        missing = [key for key in _KEYS if key not in dispatch_mode]
        if missing:
            raise WrongModeError(f"A dispatch mode needs the functions {_KEYS}, without {missing}.")
    elif dispatch_mode not in MODES:
        known = ", ".join(MODES)
        raise WrongModeError(f"Expected a dispatch mode ({known}), got {dispatch_mode!r}.")


def _check_execute_mode(execute_mode: Any) -> None:
    """Raise WrongModeError unless it is a member of Execute."""
    if not isinstance(execute_mode, Execute):
        raise WrongModeError(f"Expected a member of Execute, got {execute_mode!r}.")


def get_predefined_execute_fn(execute_mode: Execute) -> dict[str, str]:
    """The method of a worker group that runs a call: {"execute_fn_name": ...}."""
    _check_execute_mode(execute_mode)
    return {"execute_fn_name": f"execute_{execute_mode.value}"}
