"""Some of torchrun's ranks as a world of their own, so that roles on other ranks work at the same
time."""

import os
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from verl.single_controller.dispatch import Dispatch, register
from verl.single_controller.worker import Worker
from verl.single_controller.worker_group import DEADLINE_S, WorkerGroup, start_role
from verl.utils.rendezvous import LOOPBACK, free_port

if TYPE_CHECKING:
    from verl.single_controller.spmd import SpmdPool


class Seat(Worker):
    """Of one rank: tells where others find it, and learns which world it is in."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def address(self) -> tuple[str, int]:
        """Where the first rank of a world can be reached, with a port that is free now."""
        if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
            return LOOPBACK, free_port(LOOPBACK)
        master = os.environ["MASTER_ADDR"]
        family, kind, protocol, _, where = socket.getaddrinfo(master, 1, type=socket.SOCK_DGRAM)[0]
        # no packet is sent, a route is looked up
        with socket.socket(family, kind, protocol) as towards:
            towards.connect(where)
            own = towards.getsockname()[0]
        with socket.socket(family) as free:
            free.bind(("", 0))
            # The name that all machines know this one by, where it is the first.
            return master if os.environ.get("GROUP_RANK", "0") == "0" else own, free.getsockname()[
                1
            ]

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def join(self, world: dict[str, str]) -> None:
        """Process groups that are made from now on are those of this world."""
        os.environ.update(world)


class SpmdPart:
    """Some ranks of a launch; implements `ResourcePool`. Its roles share the processes of these
    ranks."""

    def __init__(self, pool: "SpmdPool", members: Sequence[int]) -> None:
        self.pool, self.members = pool, list(members)
        self.world_size = len(self.members)

    def start(
        self,
        role: str,
        worker_class: type[Worker],
        *args: Any,
        deadline_s: float = DEADLINE_S,
        **kwargs: Any,
    ) -> WorkerGroup:
        """Build `worker_class(*args, **kwargs)` on every one of these ranks at once; gives the
        group of them."""
        return self.pool.start_on(self.members, role, worker_class, args, kwargs, deadline_s)

    def shutdown(self) -> None:
        """End all processes of the launch."""
        self.pool.shutdown()


def split_launch(pool: "SpmdPool", parts: Sequence[Sequence[int]]) -> list[SpmdPart]:
    """Disjoint parts of a launch. RANK counts within the part from then on, WORLD_SIZE is its size,
    and its first rank is the one where the others meet; LOCAL_RANK, the device, stays."""
    ranks = [rank for part in parts for rank in part]
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
                "MASTER_ADDR": host,
                "MASTER_PORT": str(port),
                "TORCHELASTIC_USE_AGENT_STORE": "False",  # which is that of all ranks
            }

    seats.join(worlds)
    return [SpmdPart(pool, part) for part in parts]
