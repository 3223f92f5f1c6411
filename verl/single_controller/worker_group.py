"""The front of a group: every `@register`ed method of the worker, callable on all ranks at once."""

import functools
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from verl.protocol import DataProto
from verl.single_controller.breadcrumbs import Progress
from verl.single_controller.calls import GroupFuture, Ranks
from verl.single_controller.data_future import DataProtoFuture
from verl.single_controller.dealing import Dealt
from verl.single_controller.dispatch import (
    CallPlan,
    Dispatch,
    DispatchMode,
    Execute,
    answered_by_one,
    find_dispatch_mode,
    registered_methods,
)
from verl.single_controller.host import BUILD, RECENT_SPANS, OnEmit
from verl.single_controller.in_process import Background, InProcess
from verl.single_controller.shares import Args, Arguments, Kwargs, each_argument, shares_of_each
from verl.single_controller.worker import Worker
from verl.utils.errors import ConfigError
from verl.utils.timeline import Recorded

# Default of a call. Generous: a rollout of long responses may take an hour.
DEADLINE_S = 7200.0


class WorkerGroup:
    """One role on all ranks of a pool, with the worker's `@register`ed methods.

    `WorkerGroup(worker)` is the group of one worker in this process; `start` of a resource pool
    makes groups of several ranks. A call takes the method's arguments, which its dispatch mode
    splits, and three more:

    - `deadline_s`: seconds until the call raises DeadlineError, which shows the stacks of every
      rank. The default is the deadline that the group was started with.
    - `blocking`: whether the call waits for the answer or returns a future with `result()`. The
      default is that of `@register`.
    - `on_emit`: gets each value that the method passes to `emit` while it runs. It is called in any
      thread, also in two at once, so it must be quick and must not raise. If a call goes through
      Ray (with rows, or not blocking), values arrive tenths of a second later, and the last ones
      may get lost.
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
        members: Sequence[int],
    ) -> Any:
        """Return the group of the workers of `role`.

        Args:
            data_ranks: `Worker.data_rank` of each worker.
            members: the ranks where they live.
        """
        group = cls.__new__(cls)
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
        self._places: dict[str, list[tuple[int, bool]]] = {}
        self.deadline_s = DEADLINE_S
        for name, plan in registered_methods(worker_class).items():
            call = functools.partial(self._call, name, plan, blocking=plan.blocking)
            setattr(self, name, bound(call, plan, getattr(worker_class, name)))

    @property
    def num_shares(self) -> int:
        """Number of shares that the rows of a batch are dealt to."""
        return max(self._data_ranks) + 1

    def _call(
        self,
        name: str,
        plan: CallPlan,
        args: Args,
        kwargs: Kwargs,
        *,
        deadline_s: float | None = None,
        blocking: bool = True,
        on_emit: OnEmit = None,
    ) -> Any:
        deadline_s = self.deadline_s if deadline_s is None else deadline_s
        mode = find_dispatch_mode(plan.dispatch_mode)

        if plan.execute_mode is Execute.RANK_ZERO or plan.dispatch_mode == Dispatch.RANK_ZERO:
            mode = answered_by_one(mode)
            share_of = {0: 0}
            answering = [0]
        elif mode.by_data_rank:
            places = self._places_on(mode.mesh)
            share_of = {place: share for place, (share, _) in enumerate(places)}
            num_shares = max(share_of.values()) + 1
            answering = [places.index((share, True)) for share in range(num_shares)]
        else:
            share_of = {rank: rank for rank in range(self.world_size)}
            answering = list(share_of)

        per_share, undo = self._split(mode, plan, len(answering), args, kwargs)
        arguments: dict[int, Arguments] = {}
        for place, share in share_of.items():
            arguments[self._members[place]] = per_share[share]
        answering = [self._members[place] for place in answering]
        replies = self._ranks.submit(self.role, name, arguments, blocking, on_emit)

        def collect(outputs: list[Any]) -> Any:
            return mode.collect(outputs, undo)

        label = f"{self.role}.{name}"
        dealt = (undo,) if mode.takes_any_deal else None
        kind = GroupFuture if blocking else self._future_class(mode)
        future = kind(self._ranks, label, replies, answering, collect, deadline_s, dealt)
        return future.result() if blocking else future

    def _future_class(self, mode: DispatchMode) -> type[GroupFuture]:
        """Return the class of futures of a mode."""
        return GroupFuture

    def _places_on(self, mesh: str | None) -> list[tuple[int, bool]]:
        """Return (share, whether it may answer) of each worker on a mesh.

        None, and any mesh where the workers register none, is that of `Worker.data_rank`.
        """
        of_data = [(share, True) for share in self._data_ranks]
        if mesh is None:
            return of_data
        if mesh not in self._places:
            to_all = CallPlan(Dispatch.ONE_TO_ALL)
            found = self._call("mesh_place", to_all, (mesh,), {})
            self._places[mesh] = of_data if None in found else _checked_places(mesh, found)
        return self._places[mesh]

    def _split(
        self,
        mode: DispatchMode,
        plan: CallPlan,
        num_shares: int,
        args: Args,
        kwargs: Kwargs,
    ) -> tuple[list[Arguments], Any]:
        """Run `mode.split`, or pass on the shares of earlier answers as they are.

        Shares go from rank to rank if all batches are answers of calls that were dealt alike.
        Otherwise futures are read, joined and dealt again.
        """
        if not plan.materialize_futures:
            return mode.split(num_shares, args, kwargs)

        futures: dict[int, GroupFuture] = {}
        has_batches = False
        for value in (*args, *kwargs.values()):
            if isinstance(value, GroupFuture):  # an instance of DataProtoFuture too
                futures[id(value)] = value
            elif isinstance(value, DataProto | Dealt | DataProtoFuture):
                has_batches = True

        if futures and mode.takes_any_deal and not has_batches:
            handed_on = self._handed_on(futures, num_shares)
            if handed_on is not None:
                shares, order = handed_on
                return shares_of_each(args, kwargs, shares), order
        return mode.split(num_shares, *each_argument(_resolved, args, kwargs))

    def _handed_on(
        self, futures: Mapping[int, GroupFuture], num_shares: int
    ) -> tuple[dict[int, list[Any]], Any] | None:
        """Return the shares of all futures and the order they have in common, or None."""
        shares: dict[int, list[Any]] = {}
        orders = []
        for key, future in futures.items():
            dealt = future.handed_on(self._ranks)
            if dealt is None or len(dealt[0]) != num_shares:
                return None
            shares[key], order = dealt
            orders.append(order)

        are_alike = all(order == orders[0] for order in orders)
        return (shares, orders[0]) if are_alike else None

    @property
    def processes(self) -> Hashable:
        """Return a key that groups of the same processes have in common."""
        return "this process" if isinstance(self._ranks, InProcess) else id(self._ranks)

    def progress(self) -> list[Progress]:
        """Return the progress of the ranks with their method, if it can be read here."""
        return self._ranks.progress()

    def recent_spans(self, since_wall_ns: int) -> list[Recorded]:
        """Return the spans of every rank's process since then; see `verl.utils.timeline`."""
        arguments: Arguments = ((since_wall_ns,), {})
        per_rank = dict.fromkeys(self._members, arguments)
        replies = self._ranks.submit(self.role, RECENT_SPANS, per_rank)
        label = f"{self.role}: {RECENT_SPANS}"
        future = GroupFuture(self._ranks, label, replies, self._members, list, self.deadline_s)
        return future.result()

    def __getattr__(self, name: str) -> Any:
        # This is reached only for unknown names: explain how to register a method.
        worker_class = self.__dict__.get("worker_class", type(self))
        raise AttributeError(
            f"{worker_class.__name__} has no registered method '{name}'. "
            "Decorate it with @register(dispatch_mode=...) to call it on the group."
        )


def _checked_places(mesh: str, places: list[tuple[int, bool]]) -> list[tuple[int, bool]]:
    """Return the places. Raises ConfigError unless each share has a worker that answers for it."""
    shares = {share for share, _ in places}
    answered = {share for share, answers in places if answers}
    if answered != set(range(len(shares))):
        raise ConfigError(
            f"On the mesh '{mesh}' every dp_rank from 0 on needs a rank with is_collect=True; the "
            f"ranks registered (dp_rank, is_collect) {places}."
        )
    return places


def bound(call: Callable[..., Any], plan: CallPlan, method: Any) -> Callable[..., Any]:
    """Return `call` with the docstring and signature of `method`, plus its own keywords."""
    find_dispatch_mode(plan.dispatch_mode)  # raises for an unknown mode when the group is made
    signature = inspect.signature(method)
    own: dict[str, inspect.Parameter] = {}
    for name, parameter in inspect.signature(call).parameters.items():
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            continue
        own[name] = parameter
        if name in signature.parameters:
            raise ConfigError(
                f"{method.__qualname__} has a parameter '{name}', which a call on a group takes "
                "for itself. Rename it."
            )

    @functools.wraps(method)
    def call_ranks(*args: Any, **kwargs: Any) -> Any:
        given = {name: kwargs.pop(name) for name in own.keys() & kwargs.keys()}
        return call(args, kwargs, **given)

    parameters = list(signature.parameters.values())[1:]  # without self
    place = len(parameters)
    if parameters and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD:
        place -= 1  # **kwargs must stay the last
    parameters[place:place] = own.values()
    vars(call_ranks)["__signature__"] = signature.replace(parameters=parameters)
    return call_ranks


def _resolved(value: Any) -> Any:
    return value.get() if isinstance(value, DataProtoFuture) else value  # also a GroupFuture


def start_role(
    ranks: Ranks,
    role: str,
    worker_class: type[Worker],
    args: Args,
    kwargs: Kwargs,
    deadline_s: float,
    members: Sequence[int] | None = None,
    group_class: type[WorkerGroup] = WorkerGroup,
) -> WorkerGroup:
    """Build a worker with the same arguments on every rank at once, and return their group.

    Args:
        deadline_s: for building, and the default of the group's calls.
        members: the ranks; None stands for all.
        group_class: class of the group.

    Raises:
        ConfigError: the class is no subclass of `Worker`.
    """
    if not isinstance(worker_class, type) or not issubclass(worker_class, Worker):
        name = getattr(worker_class, "__name__", repr(worker_class))
        raise ConfigError(
            f"The class of '{role}' must be a subclass of verl.single_controller.Worker, got {name}."
        )
    building: Arguments = ((worker_class, *args), kwargs)
    members = range(ranks.size) if members is None else members
    replies = ranks.submit(role, BUILD, dict.fromkeys(members, building))
    label = f"{role}: {worker_class.__name__}()"
    layout = GroupFuture(ranks, label, replies, members, list, deadline_s).result()
    data_ranks = [data_rank for data_rank, _ in layout]
    sizes = {size for _, size in layout}
    shares = len(set(data_ranks))
    assert sizes == {shares}, f"{worker_class.__name__}: data ranks {data_ranks} of {sizes}"

    group = group_class.over(ranks, role, worker_class, data_ranks, members)
    group.deadline_s = deadline_s
    return group
