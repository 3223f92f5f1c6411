"""Processes of different worlds that exchange tensors: one broadcasts, the others listen."""

import json
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_TIMEOUT_S = 7200.0  # calls have deadlines of their own, which end the process earlier


def open_store(host: str) -> tuple[dist.TCPStore, int]:
    """Start a store where `PeerGroup`s meet. It listens on the address of `host` alone.

    Returns:
        The store, and the port under which the others reach it.
    """
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        timeout=timedelta(seconds=_TIMEOUT_S),
    )
    return store, port


def find_store(host: str, port: int) -> dist.TCPStore:
    """Connect to the store that another process has opened."""
    return dist.TCPStore(
        host,
        port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=_TIMEOUT_S),
    )


class PeerGroup:
    """Member 0 broadcasts tensors and says messages, the others listen.

    It is no process group of the default world: members may belong to worlds that know nothing of
    each other. Messages are JSON, for a store serves whoever reaches its port.

    Args:
        store: the same for all members.
        rank: of this process among the members.
        size: number of members; every one of them must make its group at the same time.
        device: of the tensors: NCCL for CUDA, gloo for a CPU.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self._store = dist.PrefixStore("messages", store)
        self._hand_over = 0
        self._heard = 0
        meeting = dist.PrefixStore("members", store)
        self._group: Any  # torch's stubs lack its methods
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            self._group = dist.ProcessGroupNCCL(meeting, rank, size, options)
        else:
            timeout = timedelta(seconds=_TIMEOUT_S)
            self._group = dist.ProcessGroupGloo(meeting, rank, size, timeout)

    def broadcast(self, tensor: torch.Tensor) -> Any:
        """Start to send member 0's tensor to the others; gives the work to wait for."""
        return self._group.broadcast(tensor, 0)

    def say(self, message: Any) -> None:
        """Send a JSON value from member 0 to the others."""
        self._store.set(self._message(self._heard), json.dumps(message))
        self._heard += 1

    def hear(self) -> Any:
        """Wait for the next message of member 0."""
        message = json.loads(self._store.get(self._message(self._heard)))
        self._heard += 1
        return message

    def answer(self, message: Any) -> None:
        """Send the last word of a hand-over to member 0, which waits for it in `answers`."""
        self._store.set(self._answer(self.rank), json.dumps(message))
        self._next_hand_over()

    def answers(self) -> list[Any]:
        """Wait for the answers of the members 1, 2 and so on. Forgets the messages so far."""
        found = []
        for rank in range(1, self.size):
            found.append(json.loads(self._store.get(self._answer(rank))))
            self._store.delete_key(self._answer(rank))
        for number in range(self._heard):
            self._store.delete_key(self._message(number))
        self._next_hand_over()
        return found

    def _message(self, number: int) -> str:
        return f"{self._hand_over}/message/{number}"

    def _answer(self, rank: int) -> str:
        return f"{self._hand_over}/answer/{rank}"

    def _next_hand_over(self) -> None:
        self._hand_over += 1
        self._heard = 0
