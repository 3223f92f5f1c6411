"""The front of a group: every `@register`ed method of the worker, callable on all ranks at once."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch

from verl.protocol import DataProto
from verl.single_controller.breadcrumbs import Progress, own_progress
from verl.single_controller.calls import GroupFuture, Lost, Ranks
from verl.single_controller.data_future import DataProtoFuture
from verl.single_controller.dealing import Dealt
from verl.single_controller.dispatch import (
    Arguments,
    CallPlan,
    Dispatch,
    DispatchMode,
    Execute,
    each_argument,
    find_dispatch_mode,
    registered_methods,
    shares_of_each,
)
from verl.single_controller.host import BUILD, RECENT_SPANS, OnTold, Raised, call_method
from verl.single_controller.worker import Worker
from verl.utils.errors import ConfigError
from verl.utils.timeline import Recorded

# Of a call that names none. Generous: a rollout of long responses may take an hour.
DEADLINE_S = 7200.0
_DEADLINE, _BLOCKING, _ON_TOLD = "deadline_s", "blocking", "on_told"


class Background:
    """A thread of this process, in which calls run one by one that the driver does not wait for at
    once."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._latest: Future | None = None

    def start(self, call: Callable[..., Any], *args: Any) -> Future:
        if self._executor is None:
            device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
            self._executor = ThreadPoolExecutor(
                1, "verl-background", functools.partial(_use_device, device)
            )
        self._latest = self._executor.submit(call, *args)
        return self._latest

    def finish(self) -> None:
        """Wait until everything that was started has ended."""
        if self._latest is not None:
            wait([self._latest])
            self._latest = None


def _use_device(number: int | None) -> None:
    """The current device belongs to a thread."""
    if number is not None:
        torch.cuda.set_device(number)


class InProcess:
    """Ranks that are workers of this process; their errors come as they are. A call that blocks
    runs in the caller's thread, after all that did not and that share its `background`."""

    hands_on_unfinished = True

    def __init__(self, workers: Sequence[Worker], background: Background | None = None) -> None:
        self.workers = workers
        self.size = len(workers)
        self._background = background or Background()

    def submit(
        self,
        role: str,
        method: str,
        arguments: Mapping[int, Arguments],
        blocking: bool = True,
        on_told: OnTold = None,
    ) -> dict[int, Future]:
        if not blocking:
            return {
                rank: self._background.start(self._run, rank, role, method, given, on_told)
                for rank, given in arguments.items()
            }
        self._background.finish()
        replies = {rank: Future() for rank in arguments}
        for rank, reply in replies.items():
            reply.set_result(self._run(rank, role, method, arguments[rank], on_told))
        return replies

    def _run(self, rank: int, role: str, method: str, arguments: Arguments, on_told: OnTold) -> Any:
        args, kwargs = arguments
        return call_method(self.workers[rank], role, method, args, kwargs, on_told)

    def wait(
        self, replies: Mapping[int, Future], timeout_s: float
    ) -> dict[int, Raised | Lost | None]:
        """However long it takes: nobody could end what runs in this process. Without time, what has
        ended."""
        if timeout_s:
            wait(replies.values())
        return {rank: None for rank, reply in replies.items() if reply.done()}

    def values(self, replies: Sequence[Future]) -> list[Any]:
        return [reply.result() for reply in replies]

    def hand_on(self, replies: Sequence[Future], receiver: Ranks) -> None:
        """There is nothing to save."""

    def describe(self, rank: int) -> str:
        return "this process"

    def stacks(self, timeout_s: float) -> dict[int, str]:
        return {}

    def breadcrumbs(self) -> dict[int, str]:
        return {}

    def progress(self) -> list[Progress]:
        return [own_progress()]

    def abort(self, reason: str) -> None:
        raise AssertionError(f"nobody but this process could end: {reason}")


class WorkerGroup:
    """One role on all ranks of a pool. Every `@register`ed method of the worker can be called on
    the group.

    A call takes the method's arguments, split as its dispatch mode says, and some of its own.
    `deadline_s`: the seconds after which it is a DeadlineError that tells where every rank is,
    instead of a silent wait; if not given, those that the group was started with. `blocking`:
    whether it waits for the answer, or gives a future with `result()`; if not given, as the method
    was registered. `on_told`: called with what the method says by `tell` while it runs, in any
    thread, also in two at once, so it must be quick and not raise. From a call that goes through
    Ray, with rows or not blocking, it comes tenths of a second later, and what is told last may not
    come. `WorkerGroup(worker)` is the group of one worker in this process; `start` of a resource
    pool makes groups of several ranks.
    """

    def __init__(
        self, worker: Worker, role: str | None = None, background: Background | None = None
    ) -> None:
        self.worker = worker
        ranks = InProcess([worker], background)
        self._bind(type(worker), ranks, role or type(worker).__name__, [0], [0])

    @classmethod
    def over(
        cls,
        ranks: Ranks,
        role: str,
        worker_class: type[Worker],
        data_ranks: Sequence[int],
        members: Sequence[int] | None = None,
    ) -> Any:
        """Return the group of the workers of `role`.

        Args:
            data_ranks: `Worker.data_rank` of each worker.
            members: the ranks where they live; None stands for all.
        """
        group = cls.__new__(cls)
        members = range(ranks.size) if members is None else members
        group._bind(worker_class, ranks, role, data_ranks, members)
        return group

    def _bind(
        self,
        worker_class: type[Worker],
        ranks: Ranks,
        role: str,
        data_ranks: Sequence[int],
        members: Sequence[int],
    ) -> None:
        self.worker_class = worker_class
        self.role = role
        self.world_size = len(members)
        self._ranks = ranks
        self._members = members
        self._data_ranks = data_ranks
        self.deadline_s = DEADLINE_S
        for name, plan in registered_methods(worker_class).items():
            setattr(
                self,
                name,
                bound(functools.partial(self._call, name, plan), plan, getattr(worker_class, name)),
            )

    @property
    def num_shares(self) -> int:
        """Number of shares that the rows of a batch are dealt to."""
        return max(self._data_ranks) + 1

    def _call(
        self,
        name: str,
        plan: CallPlan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        deadline_s: float | None,
        blocking: bool,
        on_told: OnTold,
    ) -> Any:
        deadline_s = self.deadline_s if deadline_s is None else deadline_s
        mode = find_dispatch_mode(plan.dispatch_mode)
        if plan.execute_mode is Execute.RANK_ZERO or plan.dispatch_mode == Dispatch.RANK_ZERO:
            share_of, answering = {0: 0}, [0]
        elif mode.by_data_rank:
            share_of = dict(enumerate(self._data_ranks))
            answering = [self._data_ranks.index(share) for share in range(self.num_shares)]
        else:
            share_of = {rank: rank for rank in range(self.world_size)}
            answering = list(share_of)
        per_share, undo = self._split(mode, plan, len(answering), args, kwargs)
        arguments = {self._members[place]: per_share[share] for place, share in share_of.items()}
        answering = [self._members[place] for place in answering]
        replies = self._ranks.submit(self.role, name, arguments, blocking, on_told)
        dealt = (undo,) if mode.takes_any_deal else None
        label, collect = f"{self.role}.{name}", lambda outputs: mode.collect(outputs, undo)
        future = GroupFuture(self._ranks, label, replies, answering, collect, deadline_s, dealt)
        return future.result() if blocking else future

    def _split(
        self,
        mode: DispatchMode,
        plan: CallPlan,
        num_shares: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[list[Arguments], Any]:
        """`mode.split`. Where all batches are answers of calls that were dealt alike, each share
        goes as it is from the rank that has it to those that take it; otherwise futures are read,
        joined and dealt again."""
        values = (*args, *kwargs.values())
        futures = {id(value): value for value in values if isinstance(value, GroupFuture)}
        others = [value for value in values if id(value) not in futures]
        read_here = any(isinstance(value, DataProto | Dealt | DataProtoFuture) for value in others)
        if not plan.materialize_futures:
            return mode.split(num_shares, args, kwargs)
        if futures and mode.takes_any_deal and not read_here:
            found = {key: future.handed_on(self._ranks) for key, future in futures.items()}
            handed_on = {
                key: dealt
                for key, dealt in found.items()
                if dealt is not None and len(dealt[0]) == num_shares
            }
            orders = [order for _, order in handed_on.values()]
            if len(handed_on) == len(futures) and all(order == orders[0] for order in orders):
                return shares_of_each(
                    args, kwargs, {key: shares for key, (shares, _) in handed_on.items()}
                ), orders[0]
        return mode.split(num_shares, *each_argument(_resolved, args, kwargs))

    def progress(self) -> list[Progress]:
        """How far the ranks are with the method that they run, where that can be read here."""
        return self._ranks.progress()

    def recent_spans(self, since_wall_ns: int) -> list[Recorded]:
        """What ran in the process of every rank since then, for a timeline; see
        `verl.utils.timeline`."""
        replies = self._ranks.submit(
            self.role, RECENT_SPANS, dict.fromkeys(self._members, ((since_wall_ns,), {}))
        )
        label = f"{self.role}: {RECENT_SPANS}"
        return GroupFuture(
            self._ranks, label, replies, self._members, list, self.deadline_s
        ).result()

    def __getattr__(self, name: str) -> Any:
        # Reached only for names that no bound method has: name the nearest fact instead of a bare
        # AttributeError.
        worker_class = self.__dict__.get("worker_class", type(self))
        raise AttributeError(
            f"{worker_class.__name__} has no registered method '{name}'. "
            "Decorate it with @register(dispatch_mode=...) to call it on the group."
        )


def bound(call: Callable[..., Any], plan: CallPlan, method: Any) -> Callable[..., Any]:
    """A function with the signature of `method`, less `self`, with the group's own, and its
    docstring."""
    find_dispatch_mode(plan.dispatch_mode)  # an unknown mode is told when the group is made
    signature = inspect.signature(method)
    defaults = {_DEADLINE: None, _BLOCKING: plan.blocking, _ON_TOLD: None}
    kinds = {_DEADLINE: float | None, _BLOCKING: bool, _ON_TOLD: OnTold}
    for name in defaults.keys() & signature.parameters.keys():
        raise ConfigError(
            f"{method.__qualname__} has a parameter '{name}', which a call on a group takes for "
            "itself. Rename it."
        )

    @functools.wraps(method)
    def call_ranks(*args: Any, **kwargs: Any) -> Any:
        return call(
            args, kwargs, **{name: kwargs.pop(name, default) for name, default in defaults.items()}
        )

    parameters = [*signature.parameters.values()][1:]
    place = len(parameters) - any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters
    )
    parameters[place:place] = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kinds[name]
        )
        for name, default in defaults.items()
    ]
    vars(call_ranks)["__signature__"] = signature.replace(parameters=parameters)
    return call_ranks


def _resolved(value: Any) -> Any:
    return value.get() if isinstance(value, GroupFuture | DataProtoFuture) else value


def start_role(
    ranks: Ranks,
    role: str,
    worker_class: type[Worker],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    deadline_s: float,
    members: Sequence[int] | None = None,
) -> WorkerGroup:
    """Build a worker with the same arguments on every rank at once (`members`: some), and give the
    group of them, whose calls have the deadline of this one unless they name their own."""
    building = (worker_class, *args), kwargs
    members = range(ranks.size) if members is None else members
    replies = ranks.submit(role, BUILD, dict.fromkeys(members, building))
    label = f"{role}: {worker_class.__name__}()"
    layout = GroupFuture(ranks, label, replies, members, list, deadline_s).result()
    data_ranks = [data_rank for data_rank, _ in layout]
    sizes = {size for _, size in layout}
    shares = len(set(data_ranks))
    assert sizes == {shares}, f"{worker_class.__name__}: data ranks {data_ranks} of {sizes}"

    group = WorkerGroup.over(ranks, role, worker_class, data_ranks, members)
    group.deadline_s = deadline_s
    return group
