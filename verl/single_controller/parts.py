"""Make parts of torchrun's ranks worlds of their own, so that their roles work at the same time."""

import itertools
import os
import socket
from collections.abc import Sequence

from verl.single_controller.calls import Ranks
from verl.single_controller.dispatch import Dispatch, register
from verl.single_controller.worker import Worker
from verl.single_controller.worker_group import DEADLINE_S, start_role
from verl.utils.launcher import LAUNCHED_RANKS, RANKS_OF_GROUP
from verl.utils.rendezvous import LOOPBACK, free_port


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


def split_launch(launch: Ranks, parts: Sequence[Sequence[int]]) -> None:
    """Make disjoint parts of a launch worlds of their own.

    From then on RANK counts within a part, WORLD_SIZE is its size, and its first rank serves the
    rendezvous. LOCAL_RANK, which selects the device, stays.
    """
    ranks = list(itertools.chain(*parts))
    assert len(set(ranks)) == len(ranks), parts
    seats = start_role(launch, "seat", Seat, (), {}, DEADLINE_S)
    addresses = seats.address()
    worlds: list[dict[str, str]] = [{} for _ in range(launch.size)]

    for part in parts:
        host, port = addresses[part[0]]
        for number, rank in enumerate(part):
            worlds[rank] = {
                "RANK": str(number),
                "WORLD_SIZE": str(len(part)),
                LAUNCHED_RANKS: str(launch.size),
                RANKS_OF_GROUP: ",".join(map(str, part)),
                "MASTER_ADDR": host,
                "MASTER_PORT": str(port),
                "TORCHELASTIC_USE_AGENT_STORE": "False",  # the agent's store is for all ranks
            }

    seats.join(worlds)
