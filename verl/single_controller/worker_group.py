"""The front of a group: every `@register`ed method of the worker, callable on all ranks at once."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl.single_controller.calls import GroupFuture, Lost, Ranks
from verl.single_controller.dispatch import (
    Arguments,
    CallPlan,
    Dispatch,
    DispatchMode,
    Execute,
    find_dispatch_mode,
    registered_methods,
)
from verl.single_controller.host import BUILD, Raised
from verl.single_controller.worker import Worker
from verl.utils.errors import ConfigError

# Of a call that names none. Generous: a rollout of long responses may take an hour.
DEADLINE_S = 7200.0
_DEADLINE = "deadline_s"


class InProcess:
    """Ranks that are workers of this process; a call runs at once, and its errors come as they are."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.workers = workers
        self.size = len(workers)

    def submit(self, role: str, method: str, arguments: Mapping[int, Arguments]) -> dict[int, Any]:
        return {
            rank: getattr(self.workers[rank], method)(*args, **kwargs) for rank, (args, kwargs) in arguments.items()
        }

    def wait(self, replies: Mapping[int, Any], timeout_s: float) -> dict[int, Raised | Lost | None]:
        return dict.fromkeys(replies)

    def values(self, replies: Sequence[Any]) -> list[Any]:
        return list(replies)

    def describe(self, rank: int) -> str:
        return "this process"

    def stacks(self, timeout_s: float) -> dict[int, str]:
        return {}

    def breadcrumbs(self) -> dict[int, str]:
        return {}

    def abort(self, reason: str) -> None:
        raise AssertionError(f"nobody but this process could end: {reason}")


class WorkerGroup:
    """One role on all ranks of a pool. Every `@register`ed method of the worker can be called on the group.

    A call takes the method's arguments, split as its dispatch mode says, and `deadline_s`: the seconds after which it
    is a DeadlineError that tells where every rank is, instead of a silent wait. `WorkerGroup(worker)` is the group of
    one worker in this process, which waits for nobody; `start` of a resource pool makes groups of several ranks.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._bind(type(worker), InProcess([worker]), type(worker).__name__, [0])

    @classmethod
    def over(cls, ranks: Ranks, role: str, worker_class: type[Worker], shares: Sequence[int] | None = None) -> Any:
        """The group of the workers of `role`; `shares` tells which share of a batch each rank works on."""
        group = cls.__new__(cls)
        group._bind(worker_class, ranks, role, list(range(ranks.size)) if shares is None else list(shares))
        return group

    def _bind(self, worker_class: type[Worker], ranks: Ranks, role: str, shares: list[int]) -> None:
        self.worker_class, self.role = worker_class, role
        self.world_size = ranks.size
        self._ranks, self.shares = ranks, shares
        for name, plan in registered_methods(worker_class).items():
            setattr(self, name, bound(functools.partial(self._call, name, plan), plan, getattr(worker_class, name)))

    @property
    def num_shares(self) -> int:
        """Into how many shares the rows of a batch are dealt."""
        return max(self.shares) + 1

    def _call(self, name: str, plan: CallPlan, args: tuple[Any, ...], kwargs: dict[str, Any], deadline_s: float) -> Any:
        if plan.materialize_futures:
            args = tuple(_resolved(value) for value in args)
            kwargs = {key: _resolved(value) for key, value in kwargs.items()}
        mode = find_dispatch_mode(plan.dispatch_mode)
        if plan.execute_mode is Execute.RANK_ZERO or plan.dispatch_mode == Dispatch.RANK_ZERO:
            share_of, answering = {0: 0}, [0]
        elif mode.by_share:
            share_of = dict(enumerate(self.shares))
            answering = [self.shares.index(share) for share in range(self.num_shares)]
        else:
            share_of = {rank: rank for rank in range(self.world_size)}
            answering = list(share_of)
        per_share, undo = mode.split(len(answering), args, kwargs)
        replies = self._ranks.submit(self.role, name, {rank: per_share[share] for rank, share in share_of.items()})
        collect = functools.partial(_collect, mode, undo)
        future = GroupFuture(self._ranks, f"{self.role}.{name}", replies, answering, collect, deadline_s)
        return future.result() if plan.blocking else future

    def __getattr__(self, name: str) -> Any:
        # Reached only for names that no bound method has: name the nearest fact instead of a bare AttributeError.
        worker_class = self.__dict__.get("worker_class", type(self))
        raise AttributeError(
            f"{worker_class.__name__} has no registered method '{name}'. "
            "Decorate it with @register(dispatch_mode=...) to call it on the group."
        )


def bound(call: Callable[..., Any], plan: CallPlan, method: Any) -> Callable[..., Any]:
    """A function with the signature of `method`, less `self` and with `deadline_s`, and its docstring."""
    find_dispatch_mode(plan.dispatch_mode)  # an unknown mode is told when the group is made
    signature = inspect.signature(method)
    if _DEADLINE in signature.parameters:
        raise ConfigError(
            f"{method.__qualname__} has a parameter '{_DEADLINE}', which a call on a group takes for itself. Rename it."
        )

    @functools.wraps(method)
    def call_ranks(*args: Any, deadline_s: float = DEADLINE_S, **kwargs: Any) -> Any:
        return call(args, kwargs, deadline_s)

    parameters = [*signature.parameters.values()][1:]
    ours = inspect.Parameter(_DEADLINE, inspect.Parameter.KEYWORD_ONLY, default=DEADLINE_S, annotation=float)
    place = len(parameters) - any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    parameters.insert(place, ours)
    vars(call_ranks)["__signature__"] = signature.replace(parameters=parameters)
    return call_ranks


def _collect(mode: DispatchMode, undo: Any, outputs: list[Any]) -> Any:
    return mode.collect(outputs, undo)


def _resolved(value: Any) -> Any:
    return value.result() if isinstance(value, GroupFuture) else value


def start_role(
    ranks: Ranks,
    role: str,
    worker_class: type[Worker],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    deadline_s: float,
) -> WorkerGroup:
    """Build a worker with the same arguments on every rank at once, and give the group of them."""
    building = (worker_class, *args), kwargs
    replies = ranks.submit(role, BUILD, dict.fromkeys(range(ranks.size), building))
    label = f"{role}: {worker_class.__name__}()"
    layout = GroupFuture(ranks, label, replies, range(ranks.size), list, deadline_s).result()
    shares, sizes = [share for share, _ in layout], {size for _, size in layout}
    assert sizes == {len(set(shares))}, f"{worker_class.__name__}: shares {shares} of {sizes}"
    return WorkerGroup.over(ranks, role, worker_class, shares)
