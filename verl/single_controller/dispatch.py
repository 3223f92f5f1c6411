"""Turn one call on a group into one call on each rank, and join the answers.

A dispatch mode is a pair of pure functions: `split(num_shares, args, kwargs)` returns the arguments
of each share, `collect(outputs, undo)` joins the answers. `register_dispatch_mode` adds a pair.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from types import SimpleNamespace
from typing import Any, TypeVar

from verl.single_controller.shares import (
    Args,
    Arguments,
    Collect,
    Kwargs,
    Split,
    all_answers,
    concatenated,
    first_answer,
    join_protos,
    lists_or_same,
    one_entry_each,
    same_for_all,
    split_any_rows,
    split_for_metrics,
    split_protos,
)
from verl.utils.errors import ConfigError

# The attribute of a method that holds the arguments of `register`, as a dictionary.
CALL_PLAN = "_verl_call_plan"

Function = TypeVar("Function", bound=Callable[..., Any])
DispatchFunctions = Mapping[str, Callable[..., Any]]  # {"dispatch_fn": ..., "collect_fn": ...}


class Dispatch:
    """Names of dispatch modes. `register_dispatch_mode("my_mode", ...)` adds `Dispatch.MY_MODE`."""

    RANK_ZERO = "rank_zero"
    ONE_TO_ALL = "one_to_all"
    ALL_TO_ALL = "all_to_all"
    DP_COMPUTE = "dp_compute"
    DP_COMPUTE_PROTO = "dp_compute_proto"
    DP_COMPUTE_PROTO_WITH_FUNC = "dp_compute_proto_with_func"
    DP_COMPUTE_METRIC = "dp_compute_metric"
    DP_COMPUTE_ANY_ROWS = "dp_compute_any_rows"

    @classmethod
    def remove(cls, name: str) -> None:
        """Undo `register_dispatch_mode`."""
        delattr(cls, name.upper())
        MODES.pop(name, None)


class Execute(str, Enum):
    """The ranks that run a call. Under RANK_ZERO it returns the answer itself, not a list."""

    ALL = "all"
    RANK_ZERO = "rank_zero"


@dataclass(frozen=True)
class CallPlan:
    """The arguments of `@register` for one method. Without `blocking`, a call returns a future."""

    dispatch_mode: str | DispatchFunctions
    execute_mode: Execute = Execute.ALL
    blocking: bool = True
    materialize_futures: bool = True


@dataclass(frozen=True)
class DispatchMode:
    """A split/collect pair.

    `split` returns one (args, kwargs) per share, and the data that `collect` needs to undo it.

    Attributes:
        by_data_rank: ranks of the same `Worker.data_rank` get the same share, and the first of them
            answers for all. Otherwise every rank has a share of its own.
        takes_any_deal: whether batches may be dealt in any way, such as that of the answers of an
            earlier call.
        mesh: the mesh that numbers the shares; None: that of `Worker.data_rank`.
    """

    split: Split
    collect: Collect
    by_data_rank: bool = False
    takes_any_deal: bool = False
    mesh: str | None = None
    functions: tuple[Callable[..., Any], Callable[..., Any]] | None = None  # of verl's form

    @property
    def lists_answers(self) -> bool:
        """Return whether a call returns the list of all answers, as they are."""
        return self.collect is all_answers


def answered_by_one(mode: DispatchMode) -> DispatchMode:
    """Return the mode for a call on one rank: a list of all answers becomes the answer."""
    return replace(mode, collect=first_answer) if mode.lists_answers else mode


_PROTOS = DispatchMode(split_protos, join_protos, by_data_rank=True, takes_any_deal=True)

MODES: dict[str, DispatchMode] = {
    Dispatch.RANK_ZERO: DispatchMode(same_for_all, first_answer),
    Dispatch.ONE_TO_ALL: DispatchMode(same_for_all, all_answers),
    Dispatch.ALL_TO_ALL: DispatchMode(lists_or_same, all_answers),
    Dispatch.DP_COMPUTE: DispatchMode(one_entry_each, all_answers, by_data_rank=True),
    Dispatch.DP_COMPUTE_PROTO: _PROTOS,
    # The function, the first argument, is no batch and therefore goes to all.
    Dispatch.DP_COMPUTE_PROTO_WITH_FUNC: _PROTOS,
    # Answers say by a column which row of the caller they belong to. No row is computed twice,
    # because the work may have effects outside (tools), so a rank may get none.
    Dispatch.DP_COMPUTE_ANY_ROWS: DispatchMode(split_any_rows, concatenated, by_data_rank=True),
    # Workers reduce metrics over the ranks, so every rank returns the same ones.
    Dispatch.DP_COMPUTE_METRIC: DispatchMode(split_for_metrics, first_answer, by_data_rank=True),
}


def add_dispatch_mode(name: str, mode: DispatchMode) -> None:
    """Add a split/collect pair under a new name, also as `Dispatch.NAME`."""
    if name in MODES:
        raise ConfigError(
            f"Dispatch mode '{name}' exists already; give yours another name, or call "
            "update_dispatch_mode."
        )
    MODES[name] = mode
    setattr(Dispatch, name.upper(), name)


def register_dispatch_mode(
    dispatch_mode_name: str, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]
) -> None:
    """Add a pair in verl's form under a new name; also as `Dispatch.NAME`.

    `dispatch_fn(worker_group, *args, **kwargs)` returns (args, kwargs), each value a list of one
    entry per rank; `collect_fn(worker_group, outputs)` returns the answer. `worker_group` has only
    `world_size`.
    """
    add_dispatch_mode(dispatch_mode_name, mode_of_functions(dispatch_fn, collect_fn))


def update_dispatch_mode(
    dispatch_mode: str, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]
) -> None:
    """Replace the pair of a known mode, for groups that are made from now on."""
    known = find_dispatch_mode(dispatch_mode)
    MODES[dispatch_mode] = mode_of_functions(dispatch_fn, collect_fn, known.by_data_rank)


def get_predefined_dispatch_fn(dispatch_mode: str) -> dict[str, Callable[..., Any]]:
    """Return {"dispatch_fn": ..., "collect_fn": ...} of a mode; see `register_dispatch_mode`.

    Both must get the same group: it carries the order of the rows, which collecting undoes.
    """
    dispatch_fn, collect_fn = functions_of(find_dispatch_mode(dispatch_mode))
    return {"dispatch_fn": dispatch_fn, "collect_fn": collect_fn}


class MeshFunctions(dict[str, Callable[..., Any]]):
    """Functions in verl's form, for the shares of a mesh."""

    def __init__(self, mesh_name: str) -> None:
        super().__init__(get_predefined_dispatch_fn(Dispatch.DP_COMPUTE_PROTO))
        self.mesh_name = mesh_name

    def __reduce__(self) -> Any:
        return MeshFunctions, (self.mesh_name,)


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> MeshFunctions:
    """Return the dispatch mode for batches that are dealt to the shares of a mesh.

    `Dispatch.DP_COMPUTE_PROTO` deals to those of `Worker.data_rank`. Here each rank registers its
    share with `self._register_dispatch_collect_info(mesh_name, dp_rank, is_collect)`, so that
    methods of one worker may have different ones, such as training and generation.
    """
    return MeshFunctions(mesh_name)


@functools.cache
def functions_of(mode: DispatchMode) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return a mode in verl's form: the registered pair, or an equivalent one."""
    if mode.functions is not None:
        return mode.functions

    def dispatch_fn(worker_group: Any, *args: Any, **kwargs: Any) -> Arguments:
        per_rank, worker_group.undo_of_dispatch = mode.split(worker_group.world_size, args, kwargs)
        columns = map(list, zip(*(own_args for own_args, _ in per_rank)))
        named: Kwargs = {}
        for name in kwargs:
            named[name] = [own_kwargs[name] for _, own_kwargs in per_rank]
        return tuple(columns), named

    def collect_fn(worker_group: Any, output: list[Any]) -> Any:
        # None: another function has split the arguments, so answers are in the order of the ranks.
        return mode.collect(output, getattr(worker_group, "undo_of_dispatch", None))

    return dispatch_fn, collect_fn


def mode_of_functions(
    dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any], by_data_rank: bool = False
) -> DispatchMode:
    """Return the mode of a pair in verl's form; see `register_dispatch_mode`."""

    def split(num_shares: int, args: Args, kwargs: Kwargs) -> tuple[list[Arguments], Any]:
        group = SimpleNamespace(world_size=num_shares)
        columns, named = dispatch_fn(group, *args, **kwargs)
        if not columns and not named:
            return [((), {})] * num_shares, group
        return one_entry_each(num_shares, tuple(columns), named)[0], group

    def collect(outputs: list[Any], group: Any) -> Any:
        return collect_fn(group, outputs)

    return DispatchMode(split, collect, by_data_rank, functions=(dispatch_fn, collect_fn))


def find_dispatch_mode(mode: str | DispatchFunctions) -> DispatchMode:
    """Return the pair registered under a name, or the pair made of verl's two functions."""
    if isinstance(mode, MeshFunctions):
        return replace(_PROTOS, mesh=mode.mesh_name)
    if isinstance(mode, Mapping):
        missing = [key for key in ("dispatch_fn", "collect_fn") if key not in mode]
        if missing:
            raise ConfigError(
                f"A dispatch mode needs the functions 'dispatch_fn' and 'collect_fn', got "
                f"{list(mode)}. Add {missing}."
            )
        return mode_of_functions(mode["dispatch_fn"], mode["collect_fn"])
    if mode not in MODES:
        raise ConfigError(f"Unknown dispatch mode '{mode}'. Known: {', '.join(MODES)}.")
    return MODES[mode]


def register(
    dispatch_mode: str | DispatchFunctions = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
) -> Callable[[Function], Function]:
    """Mark a worker's method as callable on a whole group.

    Args:
        dispatch_mode: how arguments are split and answers collected: a mode's name, or a pair
            {"dispatch_fn": ..., "collect_fn": ...} in the form of `register_dispatch_mode`.
        execute_mode: on which ranks it runs.
        blocking: whether a call on the group waits; if not, it returns a future with `result()`.
        materialize_futures: whether futures among the arguments are waited for before the call.
    """
    if execute_mode not in list(Execute):
        raise ConfigError(
            f"execute_mode must be one of {', '.join(map(str, Execute))}, got {execute_mode!r}."
        )
    execute_mode = Execute(execute_mode)  # its text is equal to a member, but is none
    # A plain dictionary with verl's keys: recipes read it, and copy it to their own wrappers.
    given: dict[str, Any] = {
        "dispatch_mode": dispatch_mode,
        "execute_mode": execute_mode,
        "blocking": blocking,
    }
    if not materialize_futures:
        given["materialize_futures"] = False

    def mark(method: Function) -> Function:
        setattr(method, CALL_PLAN, given)
        return method

    return mark


@functools.cache
def registered_methods(worker_class: type) -> dict[str, CallPlan]:
    """Return the methods of a class that a group offers, with their plans."""
    plans = {}
    for name in dir(worker_class):
        if name.startswith("__"):
            continue
        given = getattr(getattr(worker_class, name), CALL_PLAN, None)
        if given is not None:
            plans[name] = CallPlan(**given)
    return plans
