"""The base of every SPMD worker: its rank, how many ranks there are, and helpers of verl 0.5."""

import os
import socket
from collections.abc import Callable
from typing import Any

from verl.single_controller.dispatch import Dispatch, register
from verl.utils.errors import ConfigError
from verl.utils.launcher import launched_ranks
from verl.utils.rendezvous import LOOPBACK, free_port


class Worker:
    """Base class of all roles. A worker runs equally under Ray, torchrun or in one process.

    It may add columns to the batches it gets, but not write into their tensors: rank 0 may share
    them with the driver.
    """

    @property
    def rank(self) -> int:
        return int(os.environ.get("RANK", "0"))

    @property
    def world_size(self) -> int:
        return launched_ranks()

    @property
    def data_rank(self) -> int:
        """Return the share of a batch that this rank works on; read once, after `__init__`.

        Ranks that split the tokens of the same rows (sequence parallel) have the same.
        """
        return self.rank

    @property
    def data_size(self) -> int:
        """Return the number of shares."""
        return self.world_size

    def close(self) -> None:
        """End processes and threads that this worker has started.

        Called where the worker's process goes on after the run. Elsewhere they end with it.
        """

    def _register_dispatch_collect_info(
        self, mesh_name: str, dp_rank: int, is_collect: bool
    ) -> None:
        """Register the place of this rank on a mesh; see `make_nd_compute_dataproto_dispatch_fn`.

        Args:
            dp_rank: the share of a batch that this rank works on.
            is_collect: whether this rank may answer for its share.
        """
        places = vars(self).setdefault("_mesh_places", {})
        if mesh_name in places:
            raise ConfigError(f"The mesh '{mesh_name}' is registered already; give another name.")
        places[mesh_name] = (dp_rank, is_collect)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def mesh_place(self, mesh_name: str) -> tuple[int, bool] | None:
        """Return (dp_rank, is_collect) of this rank; None if it registered no mesh at all."""
        places = vars(self).get("_mesh_places", {})
        if places and mesh_name not in places:
            raise ConfigError(
                f"{type(self).__name__} has no mesh '{mesh_name}', only {', '.join(places)}. Call "
                "self._register_dispatch_collect_info(mesh_name, dp_rank, is_collect) when the "
                "worker or its model is made."
            )
        return places.get(mesh_name)

    def get_master_addr_port(self) -> tuple[str, str]:
        """Return MASTER_ADDR and MASTER_PORT. Raises KeyError in a process without a launcher."""
        return os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]

    def get_availale_master_addr_port(self) -> tuple[str, str]:  # spelled as in verl 0.5
        """Return the address of this machine, and a port that nothing uses now."""
        return self._get_node_ip(), str(self._get_free_port())

    def get_cuda_visible_devices(self) -> str:
        """Return CUDA_VISIBLE_DEVICES, or "not set"."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "not set")

    def _get_node_ip(self) -> str:
        """Return the address that other machines reach this one at; loopback without a network."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(("192.0.2.1", 9))  # selects an interface; UDP sends no packet here
            except OSError:
                return LOOPBACK
            return probe.getsockname()[0]

    def _get_free_port(self) -> int:
        """Return a port that nothing uses now."""
        return free_port("")

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def execute_with_func_generator(
        self, func: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Call `func(worker, ...)` on every rank, with its share of the batches."""
        return func(self, *args, **kwargs)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def execute_func_rank_zero(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `func(...)` on rank 0."""
        return func(*args, **kwargs)


def undecorated(cls: Any) -> Any:
    """Return the class under the decorator ray.remote, without importing ray."""
    metadata = getattr(cls, "__ray_metadata__", None)
    if metadata is None:
        return cls
    return metadata.modified_class.__ray_actor_class__
