"""The process of a rank, for every backend: the workers in it, and calls of their methods."""

import asyncio
import inspect
import traceback
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from verl.single_controller.breadcrumbs import breadcrumb, note_progress
from verl.single_controller.shares import Args, Kwargs
from verl.single_controller.worker import Worker
from verl.utils.errors import sendable
from verl.utils.timeline import recorded_since, span

# Names of "methods" that a process runs itself, in addition to those of its workers.
BUILD = "__init__"  # the first argument is the class
RECENT_SPANS = "recent spans"  # returns a Recorded

OnEmit = Callable[[Any], None] | None
_on_emit: ContextVar[OnEmit] = ContextVar("on_emit", default=None)


def emit(value: Any) -> None:
    """Pass a value from within a running method to the caller's `on_emit`, if it has set one."""
    if (on_emit := _on_emit.get()) is not None:
        on_emit(value)


@dataclass(frozen=True)
class Colocated:
    """A stand-in for the worker of `role` in the same process, as a keyword of a new worker."""

    role: str


def found_here(kwargs: Kwargs, workers: Mapping[str, Worker]) -> Kwargs:
    """Replace every `Colocated` by the worker of this process."""
    found: Kwargs = {}
    for name, value in kwargs.items():
        found[name] = workers[value.role] if isinstance(value, Colocated) else value
    return found


@dataclass(frozen=True)
class Raised:
    """An exception that was raised on a rank, as text. `error` is None if it cannot be pickled."""

    summary: str
    traceback: str
    error: BaseException | None

    @classmethod
    def from_error(cls, error: BaseException) -> "Raised":
        text = "".join(traceback.format_exception(error))
        summary = "".join(traceback.format_exception_only(error)).strip()
        return cls(summary, text, sendable(error))


class Host:
    """The workers of one rank, by role. They share the memory and the device of the process."""

    def __init__(self) -> None:
        self.roles: dict[str, Worker] = {}

    def run(
        self,
        role: str,
        method: str,
        args: Args,
        kwargs: Kwargs,
        on_emit: OnEmit = None,
    ) -> Any:
        """Call a method, or build the worker and return its (data_rank, data_size)."""
        breadcrumb(f"{role}.{method} starts")
        end = "raised"
        try:
            if method == BUILD:
                worker_class, *rest = args
                worker = self.roles[role] = worker_class(*rest, **found_here(kwargs, self.roles))
                answer = (worker.data_rank, worker.data_size)
            else:
                answer = call_method(self.roles[role], role, method, args, kwargs, on_emit)
            end = "is done"
            return answer
        finally:
            breadcrumb(f"{role}.{method} {end}")


def call_method(
    worker: Worker,
    role: str,
    method: str,
    args: Args,
    kwargs: Kwargs,
    on_emit: OnEmit,
) -> Any:
    """Call a method of a worker as a span of the timeline, or return the recent spans."""
    if method == RECENT_SPANS:
        return recorded_since(*args, **kwargs)

    token = _on_emit.set(on_emit)
    try:
        with span(method, row=role):
            answer = getattr(worker, method)(*args, **kwargs)
            return asyncio.run(answer) if inspect.iscoroutine(answer) else answer
    finally:
        _on_emit.reset(token)
        note_progress(0, 0, "")
