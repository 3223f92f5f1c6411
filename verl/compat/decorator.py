"""The dispatch modes of verl 0.5, its checks of `register`, and its splits of arguments."""

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from verl.protocol import DataProto, pad_dataproto_to_divisor
from verl.single_controller.data_future import DataProtoFuture
from verl.single_controller.dispatch import (
    CALL_PLAN,
    MODES,
    Dispatch,
    DispatchMode,
    Execute,
    functions_of,
    mode_of_functions,
)
from verl.utils.errors import BatchError, ConfigError

# The attribute of a method with the arguments of `register`: a dictionary with the keys
# dispatch_mode, execute_mode and blocking.
MAGIC_ATTR = CALL_PLAN
_padding_size_key = "_verl_padding_size"  # in the arguments of every chunk: rows that were added
_KEYS = ("dispatch_fn", "collect_fn")

Functions = dict[str, Callable[..., Any]]


class WrongModeError(ConfigError, AssertionError):
    """A value is no dispatch mode or execute mode. verl 0.5 raises AssertionError for it."""


class _DispatchModes(MutableMapping[str, Functions]):
    """{name: {"dispatch_fn": ..., "collect_fn": ...}} of the dispatch modes.

    A mode that was deleted can be set again.
    """

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
        """Return a plain dictionary with the same values."""
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
    """Return the method of a worker group that runs a call: {"execute_fn_name": ...}."""
    _check_execute_mode(execute_mode)
    return {"execute_fn_name": f"execute_{execute_mode.value}"}


def _split_args_kwargs_data_proto(
    chunks: int, *args: Any, **kwargs: Any
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments with every batch cut into a list of `chunks` batches.

    Raises BatchError for an argument that is neither a DataProto nor a DataProtoFuture, and for a
    number of rows that `chunks` does not divide.
    """
    for value in (*args, *kwargs.values()):
        _require_batch(value)
    columns = [value.chunk(chunks) for value in args]
    named = {name: value.chunk(chunks) for name, value in kwargs.items()}
    return columns, named


def _split_args_kwargs_data_proto_with_auto_padding(
    chunks: int, *args: Any, **kwargs: Any
) -> tuple[list[Any], dict[str, Any]]:
    """Pad the batches that allow it, then cut every batch into a list of `chunks` batches.

    If a batch has padding enabled, the keywords get `_padding_size_key`: the number of rows that
    were added to it. All such batches must have the same number of rows.
    """
    added: int | None = None
    num_rows = 0

    def pad(value: Any) -> Any:
        nonlocal added, num_rows
        if not isinstance(value, DataProto) or not value.is_padding_enabled():
            return value
        if added is not None and len(value) != num_rows:
            raise BatchError(
                f"Batches that are padded together need equally many rows, got {num_rows} and "
                f"{len(value)}. Split them in separate calls."
            )
        num_rows = len(value)
        padded, added = pad_dataproto_to_divisor(value, chunks)
        return padded

    padded_args = [pad(value) for value in args]
    padded_kwargs = {name: pad(value) for name, value in kwargs.items()}
    columns, named = _split_args_kwargs_data_proto(chunks, *padded_args, **padded_kwargs)

    if added is not None:
        named[_padding_size_key] = added
    return columns, named


def _require_batch(value: Any) -> None:
    if not isinstance(value, DataProto | DataProtoFuture):
        raise BatchError(
            f"Only a DataProto or a DataProtoFuture can be split, got {type(value).__name__}. "
            "Register the method with Dispatch.ONE_TO_ALL to pass other values."
        )


def _materialize_futures(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with every DataProtoFuture replaced by its batch."""
    columns = tuple(_batch_of(value) for value in args)
    named = {name: _batch_of(value) for name, value in kwargs.items()}
    return columns, named


def _batch_of(value: Any) -> Any:
    return value.get() if isinstance(value, DataProtoFuture) else value


def dispatch_one_to_all(worker_group: Any, *args: Any, **kwargs: Any) -> Any:
    """Give every rank all arguments, in the form of `register_dispatch_mode`."""
    size = worker_group.world_size
    return tuple([value] * size for value in args), {
        name: [value] * size for name, value in kwargs.items()
    }


def dispatch_all_to_all(worker_group: Any, *args: Any, **kwargs: Any) -> Any:
    """Return arguments that are lists of one entry for each rank."""
    return args, kwargs


# Pairs for a group of one share a rank. Joining puts the rows back into the caller's order.
dispatch_dp_compute, collect_dp_compute = functions_of(MODES[Dispatch.DP_COMPUTE])
dispatch_dp_compute_data_proto, collect_dp_compute_data_proto = functions_of(
    MODES[Dispatch.DP_COMPUTE_PROTO]
)
dispatch_dp_compute_data_proto_with_func = dispatch_dp_compute_data_proto


def collect_all_to_all(worker_group: Any, output: list[Any]) -> list[Any]:
    """Return the answers of all ranks as a list."""
    return output
