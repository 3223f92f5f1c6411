"""How one call on a group becomes one call on each rank, and how the answers come together.

A dispatch mode is a pair of pure functions: `split(world_size, args, kwargs)` gives each rank its arguments,
`collect(outputs)` joins what the ranks returned. The table is open: `register_dispatch_mode` adds a pair.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from verl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from verl.utils.errors import ConfigError

CALL_PLAN = "_verl_call_plan"

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Function = TypeVar("Function", bound=Callable[..., Any])


class Dispatch(str, Enum):
    """The modes known from the start."""

    RANK_ZERO = "rank_zero"
    ONE_TO_ALL = "one_to_all"
    ALL_TO_ALL = "all_to_all"
    DP_COMPUTE = "dp_compute"
    DP_COMPUTE_PROTO = "dp_compute_proto"
    DP_COMPUTE_METRIC = "dp_compute_metric"


class Execute(str, Enum):
    """Which ranks run the call."""

    ALL = "all"
    RANK_ZERO = "rank_zero"


@dataclass(frozen=True)
class CallPlan:
    """What `@register` notes on a method."""

    dispatch_mode: str
    execute_mode: Execute = Execute.ALL
    blocking: bool = True


@dataclass(frozen=True)
class DispatchMode:
    """A split/collect pair. `split` gives one (args, kwargs) per rank, and what `collect` needs to undo padding."""

    split: Callable[[int, tuple[Any, ...], dict[str, Any]], tuple[list[Arguments], Any]]
    collect: Callable[[list[Any], Any], Any]


def _same_for_all(world_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Arguments], None]:
    return [(args, kwargs)] * world_size, None


def _one_entry_each(world_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Arguments], None]:
    """Every argument is a list with one entry per rank."""
    for value in (*args, *kwargs.values()):
        if len(value) != world_size:
            raise ValueError(f"Expected one entry per rank ({world_size}), got {len(value)}.")
    per_rank = [
        (tuple(value[rank] for value in args), {name: value[rank] for name, value in kwargs.items()})
        for rank in range(world_size)
    ]
    return per_rank, None


@dataclass(frozen=True)
class Padding:
    """How many of the rows that went to the ranks were added to make equal chunks; they are the last ones."""

    added: int = 0
    rows: int = 1


def _split_protos(world_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Arguments], Padding]:
    """Chunk every DataProto over the ranks, padded to equal size; other arguments go to all."""
    padding = Padding()
    chunks: dict[int | str, list[DataProto]] = {}
    lengths = {len(value) for value in (*args, *kwargs.values()) if isinstance(value, DataProto)}
    if len(lengths) > 1:
        raise ValueError(f"All batches of one call must have as many rows, got {sorted(lengths)}.")
    for key, value in [*enumerate(args), *kwargs.items()]:
        if isinstance(value, DataProto):
            padded, added = pad_dataproto_to_divisor(value, world_size)
            padding = Padding(added, len(padded))
            chunks[key] = padded.chunk(world_size)
    per_rank = [
        (
            tuple(chunks[i][rank] if i in chunks else value for i, value in enumerate(args)),
            {name: chunks[name][rank] if name in chunks else value for name, value in kwargs.items()},
        )
        for rank in range(world_size)
    ]
    return per_rank, padding


def _join_protos(outputs: list[Any], padding: Padding) -> DataProto:
    """One batch of all answers, less those to added rows; a row may have several answers (n samples of a prompt)."""
    joined = DataProto.concat(outputs)
    answers_per_row = len(joined) // max(padding.rows, 1)
    return unpad_dataproto(joined, padding.added * answers_per_row)


_MODES: dict[str, DispatchMode] = {
    Dispatch.RANK_ZERO.value: DispatchMode(_same_for_all, lambda outputs, _: outputs[0]),
    Dispatch.ONE_TO_ALL.value: DispatchMode(_same_for_all, lambda outputs, _: outputs),
    Dispatch.ALL_TO_ALL.value: DispatchMode(_one_entry_each, lambda outputs, _: outputs),
    Dispatch.DP_COMPUTE.value: DispatchMode(_one_entry_each, lambda outputs, _: outputs),
    Dispatch.DP_COMPUTE_PROTO.value: DispatchMode(_split_protos, _join_protos),
    # Metrics are reduced over the ranks where they arise, so every rank returns the same ones.
    Dispatch.DP_COMPUTE_METRIC.value: DispatchMode(_split_protos, lambda outputs, _: outputs[0]),
}


def register_dispatch_mode(name: str, mode: DispatchMode) -> None:
    """Add a user's split/collect pair under a new name."""
    if name in _MODES:
        raise ConfigError(f"Dispatch mode '{name}' exists already; give yours another name.")
    _MODES[name] = mode


def dispatch_mode(name: str) -> DispatchMode:
    """The pair registered under `name`."""
    if name not in _MODES:
        raise ConfigError(f"Unknown dispatch mode '{name}'. Known: {', '.join(_MODES)}.")
    return _MODES[name]


def register(
    dispatch_mode: str = Dispatch.ALL_TO_ALL, execute_mode: Execute = Execute.ALL, blocking: bool = True
) -> Callable[[Function], Function]:
    """Mark a worker's method as callable on a whole group."""
    plan = CallPlan(str(getattr(dispatch_mode, "value", dispatch_mode)), execute_mode, blocking)

    def mark(method: Function) -> Function:
        setattr(method, CALL_PLAN, plan)
        return method

    return mark


def registered_methods(worker_class: type) -> dict[str, CallPlan]:
    """The methods of a class that a group offers, with their plans."""
    names = [name for name in dir(worker_class) if not name.startswith("__")]
    plans = {name: getattr(getattr(worker_class, name), CALL_PLAN, None) for name in names}
    return {name: plan for name, plan in plans.items() if plan is not None}


def bind(call_ranks: Callable[[str, list[Arguments]], list[Any]], world_size: int, method: Any, name: str) -> Any:
    """A function that splits its arguments, runs `call_ranks` and joins the outputs; keeps signature and docstring."""
    plan: CallPlan = getattr(method, CALL_PLAN)
    mode = dispatch_mode(plan.dispatch_mode)

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        per_rank, undo = mode.split(world_size, args, kwargs)
        if plan.execute_mode is Execute.RANK_ZERO or plan.dispatch_mode == Dispatch.RANK_ZERO.value:
            per_rank = per_rank[:1]
        return mode.collect(call_ranks(name, per_rank), undo)

    return call
