"""Groups of workers in Ray's processes, in the form of verl 0.5."""

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from verl.single_controller.calls import GroupFuture
from verl.single_controller.dispatch import (
    CallPlan,
    Dispatch,
    DispatchMode,
    registered_methods,
)
from verl.single_controller.ray_calls import Reply
from verl.single_controller.ray_ranks import RayRanks
from verl.single_controller.worker import Worker, undecorated
from verl.single_controller.worker_group import DEADLINE_S, WorkerGroup, start_role
from verl.utils.errors import ConfigError

if TYPE_CHECKING:
    from verl.single_controller.ray_pools import RayResourcePool


class ReferenceFuture(GroupFuture[list[Any]], list[Any]):
    """Future list of the answers of all ranks, as a list of Ray's references to them.

    `ray.get` and `ray.wait` take it as they take the list that verl 0.5 returns. `get()` has a
    deadline in addition, and names the ranks that raise or die.
    """

    def __init__(
        self,
        ranks: RayRanks,
        label: str,
        replies: dict[int, Reply],
        answering: Sequence[int],
        *others: Any,
    ) -> None:
        super().__init__(ranks, label, replies, answering, *others)
        self.extend(replies[rank].reference for rank in answering)


class RemoteWorker:
    """The worker of one rank, with methods that are called as those of an actor of Ray.

    `ray.get(worker.method.remote(1))` calls any method of it, also one that is not registered.
    """

    def __init__(self, ranks: RayRanks, rank: int, role: str) -> None:
        self._ranks = ranks
        self._rank = rank
        self._role = role

    def __getattr__(self, name: str) -> SimpleNamespace:
        if name.startswith("__"):  # a question of pickle or of copy
            raise AttributeError(name)

        def remote(*args: Any, **kwargs: Any) -> Any:
            return self._ranks.start_on(self._rank, self._role, name, args, kwargs)

        return SimpleNamespace(remote=remote)


class RayClassWithInitArgs:
    """A worker class and the arguments that build it on every rank."""

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        self.cls: type[Worker] = undecorated(cls)
        self.args = args
        self.kwargs = kwargs


class ColocatedClasses:
    """Several worker classes that live in one process per rank, by role.

    This is the argument for a `RayWorkerGroup` of one set of processes for several roles.
    `RayWorkerGroup.spawn` then returns the group of each role.
    """

    def __init__(self, class_dict: dict[str, RayClassWithInitArgs]) -> None:
        self.class_dict = class_dict


create_colocated_worker_cls = ColocatedClasses


class RayWorkerGroup(WorkerGroup):
    """Workers in a set of processes of their own; a pool has room for `max_colocate_count` sets.

    For colocated classes, `spawn` returns the groups. `pool.start(role, cls, ...)` is simpler and
    has the same effect. The last three arguments are those of verl 0.5 and are ignored, because the
    pool determines them.
    """

    def __init__(
        self,
        resource_pool: "RayResourcePool",
        ray_cls_with_init: RayClassWithInitArgs | ColocatedClasses,
        *,
        name_prefix: str | None = None,
        deadline_s: float = DEADLINE_S,
        bin_pack: bool = True,
        device_name: str | None = None,
        ray_wait_register_center_timeout: int = 300,
    ) -> None:
        given = ray_cls_with_init
        colocated = isinstance(given, ColocatedClasses)
        if not colocated and not isinstance(given, RayClassWithInitArgs):
            raise ConfigError(
                "ray_cls_with_init must be RayClassWithInitArgs(cls=MyWorker, ...) or the result "
                f"of create_colocated_worker_cls, got {type(given).__name__}."
            )
        ranks = resource_pool.new_processes()
        classes = given.class_dict if colocated else {name_prefix or given.cls.__name__: given}

        self._groups: dict[str, WorkerGroup] = {}
        for role, entry in classes.items():
            self._groups[role] = start_role(
                *(ranks, role, entry.cls, entry.args, entry.kwargs, deadline_s),
                group_class=RayWorkerGroup,
            )

        if colocated:
            self._ranks = ranks
            self.world_size = ranks.size
        else:
            ((role, group),) = self._groups.items()
            self._bind(group.worker_class, ranks, role, group._data_ranks, group._members)
            self.deadline_s = deadline_s

    @property
    def workers(self) -> list[RemoteWorker]:
        """Return the worker of each rank, to call one of them alone."""
        ranks: Any = self._ranks
        return [RemoteWorker(ranks, member, self.role) for member in self._members]

    def _future_class(self, mode: DispatchMode) -> type[GroupFuture]:
        return ReferenceFuture if mode.lists_answers else GroupFuture

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, WorkerGroup]:
        """Return the groups of these roles."""
        unknown = sorted(set(prefix_set) - set(self._groups))
        if unknown:
            raise ConfigError(
                f"No roles {unknown} in this group; there are {sorted(self._groups)}."
            )
        return {role: self._groups[role] for role in prefix_set}

    def fuse(self, prefix_set: Iterable[str]) -> None:
        """Set an attribute for each role of the fused worker, with the methods of that role."""
        for role, methods in self.spawn_fused(prefix_set).items():
            setattr(self, role, methods)

    def spawn_fused(self, prefix_set: Iterable[str]) -> dict[str, SimpleNamespace]:
        """Return an object for each role of the fused worker, with its methods and `world_size`."""
        offered = registered_methods(self.worker_class)
        groups = {}
        for role in prefix_set:
            prefix = fused_name(role, "")
            methods: dict[str, Any] = {}
            for name in offered:
                if name.startswith(prefix):
                    methods[name.removeprefix(prefix)] = getattr(self, name)

            if not methods:
                raise ConfigError(
                    f"{self.worker_class.__name__} has no fused role '{role}' with registered "
                    "methods. Give the role to create_colocated_worker_cls_fused."
                )
            groups[role] = SimpleNamespace(world_size=self.world_size, **methods)

        return groups

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> GroupFuture:
        """Start any method of the worker on every rank.

        If all arguments are lists with an entry for each rank, each rank gets its entry. Otherwise
        every rank gets all arguments.
        """
        values = [*args, *kwargs.values()]
        are_lists = bool(values) and all(isinstance(value, list) for value in values)
        by_rank = are_lists and all(len(value) == self.world_size for value in values)
        mode = Dispatch.ALL_TO_ALL if by_rank else Dispatch.ONE_TO_ALL
        return self._call(method_name, CallPlan(mode), args, kwargs, blocking=False)

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call `execute_all_async`, and wait for the answers of all ranks."""
        return self.execute_all_async(method_name, *args, **kwargs).result()

    execute_all = execute_all_async

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> GroupFuture:
        """Start any method of the worker on the first rank."""
        plan = CallPlan(Dispatch.RANK_ZERO)
        return self._call(method_name, plan, args, kwargs, blocking=False)

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call `execute_rank_zero_async`, and wait for the answer."""
        return self.execute_rank_zero_async(method_name, *args, **kwargs).result()

    execute_rank_zero = execute_rank_zero_async


def fused_name(role: str, method: str) -> str:
    """Return the name under which a fused worker has the method of one of its roles."""
    return f"{role}__fused__{method}"
