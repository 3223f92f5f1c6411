"""The group of workers that live in this process."""

from typing import Any

from verl.single_controller.dispatch import Arguments, bind, registered_methods
from verl.single_controller.worker import Worker


class WorkerGroup:
    """One rank of one role, in this process. Every `@register`ed method of the worker can be called on the group."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.world_size = 1
        for name in registered_methods(type(worker)):
            setattr(self, name, bind(self._call_ranks, self.world_size, getattr(type(worker), name), name))

    def _call_ranks(self, name: str, per_rank: list[Arguments]) -> list[Any]:
        return [getattr(self.worker, name)(*args, **kwargs) for args, kwargs in per_rank]

    def __getattr__(self, name: str) -> Any:
        # Reached only for names that no bound method has: name the nearest fact instead of a bare AttributeError.
        raise AttributeError(
            f"{type(self.__dict__.get('worker')).__name__} has no registered method '{name}'. "
            "Decorate it with @register(dispatch_mode=...) to call it on the group."
        )
