"""Ranks in this process: a call on a group is a call."""

import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch

from verl.single_controller.breadcrumbs import Progress, own_progress
from verl.single_controller.calls import Ends, Ranks
from verl.single_controller.host import OnEmit, call_method
from verl.single_controller.shares import Arguments
from verl.single_controller.worker import Worker


class Background:
    """Thread of this process that runs, one by one, calls that the driver does not wait for."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._latest: Future | None = None

    def start(self, call: Callable[..., Any], *args: Any) -> Future:
        if self._executor is None:
            device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
            initializer = functools.partial(_use_device, device)
            self._executor = ThreadPoolExecutor(1, "verl-background", initializer)
        self._latest = self._executor.submit(call, *args)
        return self._latest

    def finish(self) -> None:
        """Wait until all calls have ended."""
        if self._latest is not None:
            wait([self._latest])
            self._latest = None


def _use_device(number: int | None) -> None:
    """Set the current device, which belongs to a thread."""
    if number is not None:
        torch.cuda.set_device(number)


class InProcess:
    """Ranks that are workers of this process; implements `Ranks`. Their errors are not wrapped.

    A blocking call runs in the caller's thread, after all calls of `background`.
    """

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
        on_emit: OnEmit = None,
    ) -> dict[int, Future]:
        replies: dict[int, Future] = {}
        if not blocking:
            for rank, given in arguments.items():
                replies[rank] = self._background.start(
                    self._run, rank, role, method, given, on_emit
                )
            return replies

        self._background.finish()
        for rank, given in arguments.items():
            replies[rank] = Future()
            replies[rank].set_result(self._run(rank, role, method, given, on_emit))
        return replies

    def _run(self, rank: int, role: str, method: str, arguments: Arguments, on_emit: OnEmit) -> Any:
        args, kwargs = arguments
        return call_method(self.workers[rank], role, method, args, kwargs, on_emit)

    def wait(self, replies: Mapping[int, Future], timeout_s: float) -> Ends:
        """Wait without a deadline, because a call in this process cannot be ended.

        With `timeout_s=0`, only report the calls that have ended.
        """
        if timeout_s:
            wait(replies.values())
        done = [rank for rank, reply in replies.items() if reply.done()]
        return dict.fromkeys(done)

    def values(self, replies: Sequence[Future]) -> list[Any]:
        return [reply.result() for reply in replies]

    def hand_on(self, replies: Sequence[Future], receiver: Ranks) -> None:
        """Return None: values are in this process already."""

    def describe(self, rank: int) -> str:
        return "this process"

    def stacks(self, timeout_s: float) -> dict[int, str]:
        return {}

    def breadcrumbs(self) -> dict[int, str]:
        return {}

    def progress(self) -> list[Progress]:
        return [own_progress()]

    def abort(self, reason: str) -> None:
        raise AssertionError(f"this process cannot end its own ranks: {reason}")
