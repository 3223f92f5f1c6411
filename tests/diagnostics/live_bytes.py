"""Bytes of all live tensors on a CPU, as the allocator of a device reports them."""

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """A `Meter` of the tensors made in its context, plus the tensors in `there`."""

    def __init__(self, there: Iterable[torch.Tensor] = (), room: int = 0) -> None:
        super().__init__()
        self._storages: weakref.WeakSet[Any] = weakref.WeakSet()
        self._room = room
        self.peak = self.before = 0
        self._note(there)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._note(tree_leaves(result))
        self.peak = max(self.peak, self.now)
        return result

    @property
    def now(self) -> int:
        return sum(storage.nbytes() for storage in self._storages)

    def room(self) -> int:
        return self._room

    def start(self) -> None:
        gc.collect()
        self.peak = self.before = self.now

    def taken(self) -> int:
        return self.peak - self.before

    def _note(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, DTensor):
                value = value.to_local()
            if isinstance(value, torch.Tensor) and value.device.type == "cpu":
                self._storages.add(value.untyped_storage())


def taken_by(work: Callable[[], object], there: Iterable[torch.Tensor] = ()) -> int:
    """Return the peak bytes that `work` adds."""
    meter = LiveBytes(there)
    meter.start()
    with meter:
        work()
    return meter.taken()
