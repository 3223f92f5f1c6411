"""Turn one call on a group into one call on each rank, and join the answers.

A dispatch mode is a pair of pure functions: `split(num_shares, args, kwargs)` returns the arguments
of each share, `collect(outputs, undo)` joins the answers. `register_dispatch_mode` adds a pair.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np

from verl.protocol import DataProto
from verl.single_controller.dealing import (
    MASK,
    Dealt,
    Rows,
    balanced,
    contiguous,
    in_windows,
    token_counts,
    with_masked_rows,
)
from verl.utils.errors import ConfigError

# The attribute of a method that holds the arguments of `register`, as a dictionary.
CALL_PLAN = "_verl_call_plan"

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Arguments = tuple[Args, Kwargs]
Function = TypeVar("Function", bound=Callable[..., Any])
Split = Callable[[int, Args, Kwargs], tuple[list[Arguments], Any]]
Collect = Callable[[list[Any], Any], Any]
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
        return self.collect is _all


def each_argument(change: Callable[[Any], Any], args: Args, kwargs: Kwargs) -> Arguments:
    """Apply `change` to every argument."""
    return tuple(map(change, args)), {name: change(value) for name, value in kwargs.items()}


def same_for_all(num_shares: int, args: Args, kwargs: Kwargs) -> tuple[list[Arguments], None]:
    return [(args, kwargs)] * num_shares, None


def one_entry_each(num_shares: int, args: Args, kwargs: Kwargs) -> tuple[list[Arguments], None]:
    """Split arguments that are lists with one entry per rank."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise ValueError(
                f"Expected one entry per rank ({num_shares}), got {type(value).__name__}."
            )
        if len(value) != num_shares:
            raise ValueError(f"Expected one entry per rank ({num_shares}), got {len(value)}.")

    per_rank = []
    for rank in range(num_shares):
        per_rank.append(each_argument(operator.itemgetter(rank), args, kwargs))
    return per_rank, None


def lists_or_same(num_shares: int, args: Args, kwargs: Kwargs) -> tuple[list[Arguments], None]:
    """Split the arguments if all are lists, with one entry per rank; otherwise all go to all."""
    if all(isinstance(value, list | tuple) for value in (*args, *kwargs.values())):
        return one_entry_each(num_shares, args, kwargs)
    return same_for_all(num_shares, args, kwargs)


@dataclass(frozen=True)
class Order:
    """The share of every row of a batch.

    Rows from `rows_of_caller` on were added so that every share has some.
    """

    shares: Rows
    rows_of_caller: int


def _deal(batch: DataProto, num_shares: int) -> Rows:
    """Deal equally many tokens to each share, if a mask counts them; keep prompts together."""
    lengths = token_counts(batch)
    if lengths is None:
        return contiguous(len(batch), num_shares)
    uids = batch.non_tensor_batch.get("uid")
    groups = None if uids is None else uids.tolist()
    return balanced(lengths, num_shares, groups)


def _deal_windows(batch: DataProto, num_shares: int) -> Rows:
    """Deal equally many rows to each share, so that mini-batches are those of one process."""
    return in_windows(token_counts(batch) or [1] * len(batch), num_shares)


def _split_batches(
    num_shares: int,
    args: Args,
    kwargs: Kwargs,
    deal: Callable[[DataProto, int], Rows],
    pad: Callable[[DataProto, int], DataProto],
) -> tuple[list[Arguments], Order | None]:
    """Deal the rows of every batch alike; other arguments go to all."""
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, DataProto | Dealt)]
    if num_shares == 1 or not given:
        return [each_argument(_undealt, args, kwargs)] * num_shares, None

    sizes = {len(_undealt(value)) for value in given}
    if len(sizes) > 1:
        raise ValueError(
            f"All batches of one call must have the same number of rows, got {sorted(sizes)}."
        )
    rows = _rows_dealt_before(given, num_shares)

    batches: dict[int, DataProto] = {}
    for value in given:
        batch = _undealt(value)
        batches[id(value)] = pad(batch, num_shares) if rows is None else batch
    if rows is None:
        rows = deal(batches[id(given[0])], num_shares)

    chunks: dict[int, list[DataProto]] = {}
    for key, batch in batches.items():
        chunks[key] = [_rows(batch, share) for share in rows]
    return shares_of_each(args, kwargs, chunks), Order(rows, sizes.pop())


def _rows_dealt_before(values: Sequence[DataProto | Dealt], num_shares: int) -> Rows | None:
    """Return the rows of each share that the caller chose, the same for all; None if not any."""
    orders = [value.rows for value in values if isinstance(value, Dealt)]
    if not orders:
        return None

    first = orders[0]
    are_alike = all(order == first for order in orders)
    if len(first) != num_shares or not are_alike:
        raise ValueError(
            f"Rows must be dealt alike in all batches, to {num_shares} shares; got {orders}."
        )
    return first


def shares_of_each(
    args: Args, kwargs: Kwargs, split: Mapping[int, Sequence[Any]]
) -> list[Arguments]:
    """Return the arguments of every share.

    Args:
        split: the shares of some values, by the `id` of the value; other values go to all.
    """
    num_shares = len(next(iter(split.values())))

    def value_of(share: int, value: Any) -> Any:
        return split[id(value)][share] if id(value) in split else value

    arguments = []
    for share in range(num_shares):
        arguments.append(each_argument(functools.partial(value_of, share), args, kwargs))
    return arguments


def _undealt(value: Any) -> Any:
    return value.batch if isinstance(value, Dealt) else value


def _rows(batch: DataProto, rows: list[int]) -> DataProto:
    """Return a view if the rows are contiguous, else a copy of them."""
    if rows:
        start = rows[0]
        end = start + len(rows)
        if rows == list(range(start, end)):
            return batch.slice(start, end)
    return batch.select_idxs(np.asarray(rows, dtype=np.int64))


def _repeated(batch: DataProto, num_shares: int) -> DataProto:
    """Repeat rows until each share has one: every rank must join the collectives."""
    if len(batch) >= num_shares:
        return batch
    return batch.select_idxs(np.arange(num_shares) % _at_least_one(batch))


def _unpadded(batch: DataProto, _: int) -> DataProto:
    """Leave some shares without rows if there are fewer rows than shares."""
    _at_least_one(batch)
    return batch


def _masked(batch: DataProto, num_shares: int) -> DataProto:
    """Add masked rows until each share has equally many.

    Added rows must not count, so a batch without a mask is dealt unevenly.
    """
    missing = -_at_least_one(batch) % num_shares
    if batch.batch is not None and MASK in batch.batch.keys():
        return with_masked_rows(batch, missing) if missing else batch

    if len(batch) < num_shares:
        raise ValueError(
            f"A batch without '{MASK}' needs at least one row for each of {num_shares} shares, got "
            f"{len(batch)}: copies of rows would count."
        )
    return batch


def _at_least_one(batch: DataProto) -> int:
    if not len(batch):
        raise ValueError("A batch without rows cannot be dealt to several ranks.")
    return len(batch)


def _join_protos(outputs: list[Any], order: Order | None) -> Any:
    """Join all answers in the caller's order.

    A row may have several answers (n samples of a prompt).
    """
    joined = _concatenated(outputs, None)
    if order is None:
        return joined

    rows = list(itertools.chain(*order.shares))
    if rows == list(range(order.rows_of_caller)):
        return joined

    answers = len(joined) // len(rows)
    answers_of_shares = list(map(len, outputs))
    rows_of_shares = list(map(len, order.shares))
    expected = [count * answers for count in rows_of_shares]
    if answers_of_shares != expected:
        raise ValueError(
            "Answers come back in the order of the rows, so there must be equally many to each; "
            f"got {answers_of_shares} to {rows_of_shares} rows."
        )

    place = np.argsort(rows)[: order.rows_of_caller]
    first_answer = place[:, None] * answers
    answer_rows = first_answer + np.arange(answers)
    return joined.select_idxs(answer_rows.reshape(-1))


def _concatenated(outputs: list[Any], _: Any) -> Any:
    """Join answers that have rows of their own, in the order of the shares."""
    if len(outputs) == 1:
        return outputs[0]
    wrong = {type(output).__name__ for output in outputs if not isinstance(output, DataProto)}
    if wrong:
        raise TypeError(
            "A method whose answers are joined (Dispatch.DP_COMPUTE_PROTO) must return a DataProto "
            f"on every rank, got {', '.join(sorted(wrong))}. Return the batch, or register the "
            "method with Dispatch.ONE_TO_ALL or DP_COMPUTE, which give a list of all answers."
        )
    return DataProto.concat(outputs)


def _first(outputs: list[Any], _: Any) -> Any:
    return outputs[0]


def _all(outputs: list[Any], _: Any) -> Any:
    return outputs


def answered_by_one(mode: DispatchMode) -> DispatchMode:
    """Return the mode for a call on one rank: a list of all answers becomes the answer."""
    return replace(mode, collect=_first) if mode.collect is _all else mode


_split_protos = functools.partial(_split_batches, deal=_deal, pad=_repeated)
_split_any = functools.partial(_split_batches, deal=_deal, pad=_unpadded)
_split_for_metrics = functools.partial(_split_batches, deal=_deal_windows, pad=_masked)
_PROTOS = DispatchMode(_split_protos, _join_protos, by_data_rank=True, takes_any_deal=True)

MODES: dict[str, DispatchMode] = {
    Dispatch.RANK_ZERO: DispatchMode(same_for_all, _first),
    Dispatch.ONE_TO_ALL: DispatchMode(same_for_all, _all),
    Dispatch.ALL_TO_ALL: DispatchMode(lists_or_same, _all),
    Dispatch.DP_COMPUTE: DispatchMode(one_entry_each, _all, by_data_rank=True),
    Dispatch.DP_COMPUTE_PROTO: _PROTOS,
    # The function, the first argument, is no batch and therefore goes to all.
    Dispatch.DP_COMPUTE_PROTO_WITH_FUNC: _PROTOS,
    # Answers say by a column which row of the caller they belong to. No row is computed twice,
    # because the work may have effects outside (tools), so a rank may get none.
    Dispatch.DP_COMPUTE_ANY_ROWS: DispatchMode(_split_any, _concatenated, by_data_rank=True),
    # Workers reduce metrics over the ranks, so every rank returns the same ones.
    Dispatch.DP_COMPUTE_METRIC: DispatchMode(_split_for_metrics, _first, by_data_rank=True),
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
