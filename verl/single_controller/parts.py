"""Make parts of torchrun's ranks worlds of their own, so that their roles work at the same time."""

import itertools
import os
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from verl.single_controller.dispatch import Dispatch, register
from verl.single_controller.worker import Worker
from verl.single_controller.worker_group import DEADLINE_S, WorkerGroup, start_role
from verl.utils.launcher import LAUNCHED_RANKS
from verl.utils.rendezvous import LOOPBACK, free_port

if TYPE_CHECKING:
    from verl.single_controller.spmd import SpmdPool


class Seat(Worker):
    """A worker that reports the address of its rank, and sets the world of the rank."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def address(self) -> tuple[str, int]:
        """Return an address at which other ranks reach this one, with an unused port."""
        if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
            return LOOPBACK, free_port(LOOPBACK)

        master = os.environ["MASTER_ADDR"]
        family, kind, protocol, _, where = socket.getaddrinfo(master, 1, type=socket.SOCK_DGRAM)[0]
        # UDP sends no packet here, it only looks up a route.
        with socket.socket(family, kind, protocol) as towards:
            towards.connect(where)
            address = towards.getsockname()[0]
        # All machines know the first one by this name.
        if os.environ.get("GROUP_RANK", "0") == "0":
            address = master

        with socket.socket(family) as free:
            free.bind(("", 0))
            return address, free.getsockname()[1]

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def join(self, world: dict[str, str]) -> None:
        """Set the world for process groups that are made from now on."""
        os.environ.update(world)


class SpmdPart:
    """Some ranks of a launch, with roles that share their processes; implements `ResourcePool`."""

    def __init__(self, pool: "SpmdPool", members: Sequence[int]) -> None:
        self.pool = pool
        self.members = list(members)
        self.world_size = len(self.members)

    def start(
        self,
        role: str,
        worker_class: type[Worker],
        *args: Any,
        deadline_s: float = DEADLINE_S,
        **kwargs: Any,
    ) -> WorkerGroup:
        """Build `worker_class(*args, **kwargs)` on all these ranks at once; return their group."""
        return self.pool.start_on(self.members, role, worker_class, args, kwargs, deadline_s)

    def shutdown(self) -> None:
        """End all processes of the launch."""
        self.pool.shutdown()


def split_launch(pool: "SpmdPool", parts: Sequence[Sequence[int]]) -> list[SpmdPart]:
    """Split a launch into disjoint parts.

    From then on RANK counts within a part, WORLD_SIZE is its size, and its first rank serves the
    rendezvous. LOCAL_RANK, which selects the device, stays.
    """
    ranks = list(itertools.chain(*parts))
    assert len(set(ranks)) == len(ranks), parts
    seats = start_role(pool.ranks, "seat", Seat, (), {}, DEADLINE_S)
    addresses = seats.address()
    worlds: list[dict[str, str]] = [{} for _ in range(pool.world_size)]

    for part in parts:
        host, port = addresses[part[0]]
        for number, rank in enumerate(part):
            worlds[rank] = {
                "RANK": str(number),
                "WORLD_SIZE": str(len(part)),
                LAUNCHED_RANKS: str(pool.world_size),
                "MASTER_ADDR": host,
                "MASTER_PORT": str(port),
                "TORCHELASTIC_USE_AGENT_STORE": "False",  # the agent's store is for all ranks
            }

    seats.join(worlds)
    return [SpmdPart(pool, part) for part in parts]
