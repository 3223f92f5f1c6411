"""Backend `ray`: pools of processes on one or more machines, and groups of workers in them.

It needs `pip install ray`.
"""

import os
import re
import shutil
import socket
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import yaml
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from verl.single_controller.calls import GroupFuture
from verl.single_controller.dispatch import CallPlan, Dispatch, registered_methods
from verl.single_controller.ray_control import (
    LATE,
    end_agents_with_driver,
    init_patiently,
    is_own,
    note_own,
    on_loopback,
    remove_session_at_exit,
    starts_its_own,
)
from verl.single_controller.ray_ranks import RayRanks, forwarded
from verl.single_controller.ray_upload import EXCLUDES, refused_upload
from verl.single_controller.worker import Worker, undecorated
from verl.single_controller.worker_group import DEADLINE_S, WorkerGroup, start_role
from verl.utils.errors import ConfigError
from verl.utils.logging import logger
from verl.utils.sigterm import sigterm_kept
from verl.utils.yaml_text import explain_yaml

_ADDRESS_S = 10.0
_OWN_ROOM_S = 30.0  # wait for room in the run's own Ray, where only the run itself can free some
_SILENT_S = 3.0  # of waiting for room
RUNTIME_ENV: dict[str, Any] = {
    "excludes": EXCLUDES,
    "env_vars": {"TOKENIZERS_PARALLELISM": "false"},
}


def merged_runtime_env(given: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """Extend `RUNTIME_ENV` and the `forwarded` variables by those of a user.

    `given` is a mapping or the path of a YAML file. Excludes are joined and variables merged; all
    other entries are the user's. Raises ConfigError for entries of the wrong type.
    """
    where = f"ray_init.runtime_env={given}" if isinstance(given, str) else "ray_init.runtime_env"
    content = _read_yaml(given) if isinstance(given, str) else given
    if not isinstance(content, Mapping | None):
        raise ConfigError(
            f"{where} must hold a mapping, got {content!r} ({type(content).__name__}). "
            "Example: {env_vars: {NAME: text}}."
        )

    rest = dict(content or {})
    excludes = rest.pop("excludes", None) or []
    variables = rest.pop("env_vars", None) or {}

    if isinstance(excludes, str) or not isinstance(excludes, Sequence):
        raise ConfigError(
            f"{where}: excludes must be a list of patterns, such as [data/], got {excludes!r}."
        )

    are_texts = isinstance(variables, Mapping)
    are_texts = are_texts and all(isinstance(value, str) for value in variables.values())
    if not are_texts:
        raise ConfigError(
            f"{where}: env_vars must map names to texts, such as {{NAME: '7'}}, got {variables!r}."
        )

    return {
        **rest,
        "excludes": [*RUNTIME_ENV["excludes"], *excludes],
        "env_vars": {**RUNTIME_ENV["env_vars"], **forwarded(), **variables},
    }


def _read_yaml(path: str) -> Any:
    try:
        return yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"ray_init.runtime_env: {explain_yaml(error, path)}") from error
    except OSError as error:
        raise ConfigError(f"ray_init.runtime_env={path} cannot be read: {error}") from error


def _check_address(address: str | None) -> None:
    """Raise ConfigError for a HOST:PORT that does not answer.

    Ray's own client would try for more than five minutes.
    """
    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        return  # auto, local
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ADDRESS_S).close()
    except OSError as error:
        raise ConfigError(
            f"No Ray cluster answers at ray_init.address={address}: {error}. Start one there with "
            "`ray start --head`, or leave the address unset to let the run start its own."
        ) from error


def connect(*, runtime_env: Mapping[str, Any] | str | None = None, **ray_init: Any) -> None:
    """Initialize Ray with the arguments of `ray.init`, unless it is initialized, also by Client.

    Raises ConfigError if no cluster answers at `address`, if `num_cpus` is given for an existing
    cluster, if Ray rejects another argument, if the path of its folder is too long, if a process of
    it writes nothing there (a full disk), or if it refuses to upload the folders of `runtime_env`
    (with their largest files). Any other error is Ray's own.
    """
    if ray.is_initialized():
        logger.info("Ray is initialized already and used as it is.")
        return

    _check_address(ray_init.get("address"))
    # A submitted job may have a runtime_env of its own. By default Ray refuses entries that both of
    # them set.
    os.environ.setdefault("RAY_OVERRIDE_JOB_RUNTIME_ENV", "1")
    runtime_env = merged_runtime_env(runtime_env)
    own = starts_its_own(ray_init.get("address"))
    if own:
        ray_init = {"include_dashboard": False, **ray_init, "address": "local"}

    try:
        with sigterm_kept(), on_loopback() if own else nullcontext():
            init_patiently(runtime_env=runtime_env, **ray_init)
        note_own(own)
        if own:
            end_agents_with_driver()
            remove_session_at_exit()
    except Exception as error:
        ray.shutdown()  # or the next attempt would find it initialized
        explained = _explain_failure(error, ray_init, runtime_env)
        if explained is None:
            raise
        raise explained from error


def _explain_failure(
    error: Exception, ray_init: Mapping[str, Any], runtime_env: Mapping[str, Any]
) -> ConfigError | None:
    """Return the error to raise if `ray.init` failed; None keeps Ray's own."""
    if isinstance(error, ValueError) and "num_cpus" in ray_init and "num_cpus" in str(error):
        return ConfigError(
            f"ray_init.num_cpus={ray_init['num_cpus']} is for a Ray that is started here, but "
            "there is one already, which has its own number. Leave it unset, or set "
            "ray_init.address=local to let the run start its own."
        )
    if "AF_UNIX path length" in str(error):
        return ConfigError(
            f"Ray's folder has too long a path for its sockets: {error}. Set RAY_TMPDIR=/tmp."
        )

    missing = re.search(r"Timed out waiting for file (\S+)", str(error))
    if missing is not None:
        return _explain_missing_file(Path(missing.group(1)))

    if LATE in str(error):
        return ConfigError(
            "Ray was started twice, and was not ready within 30 s each time: the machine has a "
            f"load of {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores. Start the run when it is "
            "less busy, or start Ray first with `ray start --head` and set ray_init.address=auto."
        )

    refused = refused_upload(error, runtime_env)
    if refused is not None:
        return refused

    if isinstance(error, (ValueError, TypeError, ConnectionError)):
        address = ray_init.get("address") or os.environ.get("RAY_ADDRESS")
        reason = " ".join(str(error).split())
        return ConfigError(
            f"Ray cannot be started or joined, with ray_init.address={address}: "
            f"{reason.removesuffix('.')}. An address is HOST:6379, ray://HOST:10001, auto (a "
            "cluster that runs on this machine), or local to let the run start its own."
        )
    return None


def _explain_missing_file(file: Path) -> ConfigError:
    """Return the error of a process of Ray that wrote nothing, for which a full disk is usual."""
    folder = next(parent for parent in file.parents if parent.is_dir())
    free = shutil.disk_usage(folder).free
    return ConfigError(
        f"A process of Ray did not start: it has not written {file}. The disk there has "
        f"{free / 2**20:.1f} MiB free. Free some, or set RAY_TMPDIR to a folder of another disk; "
        f"the logs in {file.parent / 'logs'} have any other reason."
    )


# `verl.single_controller.ray.base`, verl 0.5's path, is then looked up in the table of old paths.
__path__: list[str] = []


class RayResourcePool:
    """Reserved room on a Ray cluster, for one process per GPU or CPU; implements `ResourcePool`.

    Args:
        process_on_nodes: number of processes of each node, such as [8, 8] for two nodes of eight
            GPUs. The processes of one entry are on one node.
        use_gpu: whether each process has a GPU; several sets of processes of one pool share it.
        name_prefix: prefix of placement groups and actors, to find them in Ray's dashboard.
        max_colocate_count: number of sets of processes that fit into the pool; see
            `RayWorkerGroup`.
        detached: whether processes outlive the driver.
        run_ranks: numbers of the processes among those of all pools of the run, for errors; None:
            the pool is the whole run.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int] | None = None,
        use_gpu: bool = True,
        name_prefix: str | None = None,
        max_colocate_count: int = 10,
        detached: bool = False,
        run_ranks: Sequence[int] | None = None,
    ) -> None:
        self.process_on_nodes = list(process_on_nodes or [])
        if not self.process_on_nodes or min(self.process_on_nodes) < 1 or max_colocate_count < 1:
            raise ConfigError(
                "process_on_nodes must count the processes of each node, and max_colocate_count "
                f"must be at least 1, got {process_on_nodes} and {max_colocate_count}. For two "
                "nodes of eight GPUs give [8, 8]."
            )

        self.world_size = sum(self.process_on_nodes)
        self.use_gpu = use_gpu
        self.max_colocate_count = max_colocate_count
        self.detached = detached
        self.run_ranks = run_ranks
        self.name_prefix = name_prefix or ""
        self._groups: list[PlacementGroup] = []
        self._shared: RayRanks | None = None
        self._all_ranks: list[RayRanks] = []

    def start(
        self,
        role: str,
        worker_class: type[Worker],
        *args: Any,
        deadline_s: float = DEADLINE_S,
        **kwargs: Any,
    ) -> WorkerGroup:
        """Build `worker_class(*args, **kwargs)` on every rank at once; return their group.

        Roles that are started here share their processes.
        """
        if self._shared is None:
            self._shared = self.new_processes()
        return start_role(self._shared, role, worker_class, args, kwargs, deadline_s)

    def new_processes(self, timeout_s: float = 300.0) -> RayRanks:
        """Start one more process for each rank.

        Raises ConfigError if the cluster has no room for them in time.
        """
        if not self._groups:
            self._groups = self._reserve(timeout_s)
        part = 1 / self.max_colocate_count
        ranks = RayRanks(
            self._groups,
            gpus=part if self.use_gpu else 0,
            cpus=part,
            name_prefix=self.name_prefix,
            detached=self.detached,
            run_ranks=self.run_ranks,
        )
        self._all_ranks.append(ranks)
        return ranks

    def _check_own_ray(self, bundle: Mapping[str, float]) -> None:
        """Raise ConfigError if the Ray that this run has started is too small; it cannot grow."""
        size = ray.cluster_resources()
        ways_out = {
            "GPU": "Lower trainer.n_gpus_per_node, or join a larger cluster by ray_init.address",
            "CPU": f"Set ray_init.num_cpus={self.world_size} if processes may share cores",
        }
        for kind, way_out in ways_out.items():
            needed = self.world_size * bundle.get(kind, 0.0)
            found = size.get(kind, 0.0)
            if needed > found:
                raise ConfigError(
                    f"{self.world_size} ranks need {needed:g} {kind}s, but this machine's Ray, "
                    f"which the run has started, has {found:g} and cannot grow. "
                    f"{way_out}."
                )

    def _reserve(self, timeout_s: float) -> list[PlacementGroup]:
        bundle = {"CPU": 1.0, "GPU": 1.0} if self.use_gpu else {"CPU": 1.0}
        if is_own():
            self._check_own_ray(bundle)
            timeout_s = min(timeout_s, _OWN_ROOM_S)

        groups: list[PlacementGroup] = []
        for number, count in enumerate(self.process_on_nodes):
            group = placement_group(
                [dict(bundle) for _ in range(count)],
                strategy="STRICT_PACK",
                name=f"{self.name_prefix}verl_pool_{number}_{uuid.uuid4().hex[:8]}",
                lifetime="detached" if self.detached else None,
            )
            groups.append(group)

        soon = min(timeout_s, _SILENT_S)
        if all(group.wait(soon) for group in groups):
            return groups

        if timeout_s > soon:
            logger.warning(
                f"Ray found no room yet for {self.process_on_nodes} processes with {bundle} each: "
                f"{_room(bundle)}. Waiting up to {timeout_s:g} s."
            )
            if all(group.wait(timeout_s - soon) for group in groups):
                return groups

        room = _room(bundle)
        for group in groups:
            remove_placement_group(group)
        raise ConfigError(
            f"Ray found no room for {self.process_on_nodes} processes with {bundle} each "
            f"within {timeout_s:g} s: {room}. Lower trainer.n_gpus_per_node or trainer.nnodes, or "
            "start more nodes (`ray start --address=...`)."
        )

    def shutdown(self) -> None:
        """End all processes of the pool after their current calls, and free its room."""
        for ranks in self._all_ranks:
            ranks.end()
        for group in self._groups:
            remove_placement_group(group)
        self._groups = []
        self._all_ranks = []
        self._shared = None


def _room(kinds: Iterable[str]) -> str:
    """Describe how many CPUs or GPUs the nodes of the cluster have, and how many are free."""
    nodes: list[dict[str, float]] = []
    for node in ray.nodes():
        if node["Alive"]:
            nodes.append({kind: node["Resources"].get(kind, 0) for kind in kinds})
    available = ray.available_resources()
    free = {kind: available.get(kind, 0) for kind in kinds}
    return f"its nodes have {nodes}, of which {free} is free"


class RayClassWithInitArgs:
    """A worker class and the arguments that build it on every rank."""

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        self.cls: type[Worker] = undecorated(cls)
        self.args = args
        self.kwargs = kwargs


class ColocatedClasses:
    """Several worker classes that live in one process per rank, by role."""

    def __init__(self, class_dict: dict[str, RayClassWithInitArgs]) -> None:
        self.class_dict = class_dict


def create_colocated_worker_cls(class_dict: dict[str, RayClassWithInitArgs]) -> ColocatedClasses:
    """Return the argument for a `RayWorkerGroup` of one set of processes for several roles.

    `RayWorkerGroup.spawn` then returns the group of each role.
    """
    return ColocatedClasses(class_dict)


class RayWorkerGroup(WorkerGroup):
    """Workers in a set of processes of their own; a pool has room for `max_colocate_count` sets.

    For colocated classes, `spawn` returns the groups. `pool.start(role, cls, ...)` is simpler and
    has the same effect. The last three arguments are those of verl 0.5 and are ignored, because the
    pool determines them.
    """

    def __init__(
        self,
        resource_pool: RayResourcePool,
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
                ranks, role, entry.cls, entry.args, entry.kwargs, deadline_s
            )

        if colocated:
            self._ranks = ranks
            self.world_size = ranks.size
        else:
            ((role, group),) = self._groups.items()
            self._bind(group.worker_class, ranks, role, group._data_ranks, group._members)
            self.deadline_s = deadline_s

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
        return self._call(method_name, CallPlan(mode), args, kwargs, None, False, None)

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call `execute_all_async`, and wait for the answers of all ranks."""
        return self.execute_all_async(method_name, *args, **kwargs).result()

    execute_all = execute_all_async

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> GroupFuture:
        """Start any method of the worker on the first rank."""
        plan = CallPlan(Dispatch.RANK_ZERO)
        return self._call(method_name, plan, args, kwargs, None, False, None)

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call `execute_rank_zero_async`, and wait for the answer."""
        return self.execute_rank_zero_async(method_name, *args, **kwargs).result()

    execute_rank_zero = execute_rank_zero_async


def fused_name(role: str, method: str) -> str:
    """Return the name under which a fused worker has the method of one of its roles."""
    return f"{role}__fused__{method}"


__all__ = [
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "connect",
    "create_colocated_worker_cls",
    "merged_runtime_env",
]
