"""Move memory to the host: parameters and moments between phases, activations between passes."""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from verl.utils.arithmetic import round_up
from verl.utils.errors import ConfigError

# Pinned memory comes in powers of two, so it is taken in pieces of that size: one buffer for
# everything could be twice as large as its contents.
CHUNK_BYTES = 2**28
_ALIGNMENT = 512  # bytes
# Activations on their way to the host, during which this many layers can compute.
LEAVING_LAYERS = 2


class Offload:
    """Tensors with memory on their device only within `on_device`, and on the host otherwise.

    The tensors stay the same objects: their storage is emptied and filled again, so FSDP2 or an
    optimizer can keep references to them. They must not be read or written outside of `on_device`,
    where they have no memory.

    Args:
        tensors: returns the tensors each time they go to the host. Scalars are not moved.
        device: of the tensors. On CUDA the host's memory is pinned; on a CPU tensors are copied
            within the host, for tests.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], device: torch.device) -> None:
        self._tensors = tensors
        self._device = device
        self._chunks: list[Tensor] = []
        # storages without memory, and the bytes they had
        self._away: list[tuple[torch.UntypedStorage, int]] = []
        self._users = 0
        self._to_host()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Keep the tensors on the device within this context.

        Of nested contexts, the outermost moves the tensors.
        """
        if self._users == 0:
            self._to_device()
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if self._users == 0:
                self._to_host()

    def _to_host(self) -> None:
        storages = {}  # by address: several tensors may share one
        for part in _dense(self._tensors()):
            storage = part.untyped_storage()
            storages[storage.data_ptr()] = storage
        self._away = []
        for storage in storages.values():
            if storage.nbytes():
                self._away.append((storage, storage.nbytes()))

        for there, here in self._pieces():
            here.copy_(there, non_blocking=True)
        for storage, _ in self._away:
            # the allocator hands it out again on this stream alone, after the copies
            storage.resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # a rollout engine takes its pages from the driver

    def _to_device(self) -> None:
        for storage, num_bytes in self._away:
            storage.resize_(num_bytes)
        for there, here in self._pieces():
            there.copy_(here, non_blocking=True)
        self._away = []

    def _pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (bytes of a storage, their place on the host), chunk by chunk."""
        position = 0
        for storage, num_bytes in self._away:
            there = torch.empty(0, dtype=torch.uint8, device=storage.device)
            there.set_(storage)  # pyright: ignore
            start = 0
            while start < num_bytes:
                number, offset = divmod(position, CHUNK_BYTES)
                count = min(num_bytes - start, CHUNK_BYTES - offset)
                yield there[start : start + count], self._chunk(number)[offset : offset + count]
                start = start + count
                position = position + count
            position = round_up(position, _ALIGNMENT)

    def _chunk(self, number: int) -> Tensor:
        while len(self._chunks) <= number:
            pinned = self._device.type == "cuda"
            self._chunks.append(torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=pinned))
        return self._chunks[number]


def _dense(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield tensors with memory: local parts of DTensors, parts of quantized ones; no scalars."""
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            parts = (getattr(tensor, name) for name in names)
            # newer DTensors name their mesh too
            yield from _dense(part for part in parts if isinstance(part, Tensor))
        elif tensor.ndim:
            yield tensor


def apply_activation_offload(module: nn.Module, device: torch.device) -> None:
    """Keep the inputs of checkpointed layers on the host until the backward pass.

    Call it after `apply_checkpointing`, before compile and sharding. No number changes.
    """
    hooks = _ActivationHooks(device)
    layers: list[Any] = []
    for part in module.modules():
        if hasattr(part, "_gradient_checkpointing_func"):
            layers.append(part)
    if not layers:
        raise ConfigError(
            "enable_activation_offload keeps the inputs of checkpointed layers on the host, but "
            "checkpointing is off. Set enable_gradient_checkpointing=True as well."
        )
    for layer in layers:
        layer._gradient_checkpointing_func = partial(hooks.call, layer._gradient_checkpointing_func)


class _Kept:
    """One activation: on the host, and on the device shortly before and after the copies."""

    def __init__(self, host: Tensor, before: "weakref.ref[_Kept] | None") -> None:
        self.host = host
        # the one packed before this one, so needed after it; weak: a graph may be dropped unused
        self.before = before
        # with the event of the end of its copy
        self.on_device: tuple[Tensor, Any] | None = None

    def leave(self) -> None:
        """Free the memory on the device.

        The computing stream waits for the copy, not the allocator: a host that runs ahead would
        find no copy finished, and take new memory for every layer.
        """
        if self.on_device is not None:
            tensor, copied = self.on_device
            torch.cuda.current_stream(tensor.device).wait_event(copied)
            self.on_device = None

    def __del__(self) -> None:
        self.leave()


class _ActivationHooks:
    """Copies activations on a separate stream, at the same time as the computation.

    They leave the device during the forward pass of the next layers, and come back during the
    backward pass of the layer after.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.leaving: deque[weakref.ref[_Kept]] = deque()
        self.last: weakref.ref[_Kept] | None = None

    def call(
        self,
        checkpointed: Callable[..., Any],
        function: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        # Within the layer, checkpointing has its own hooks: only the inputs come to these.
        with saved_tensors_hooks(self.pack, self.unpack):
            return checkpointed(function, *args, **kwargs)

    def pack(self, tensor: Tensor) -> _Kept | Tensor:
        if not tensor.is_floating_point() or tensor.device.type != self.device.type:
            return tensor  # positions and the like: small, and shared by all layers
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.stream is not None)
        kept = _Kept(host, self.last)
        self.last = weakref.ref(kept)
        if self.stream is None:
            host.copy_(tensor.detach())
            return kept
        kept.on_device = (tensor.detach(), self._copy(host, tensor.detach()))
        self.leaving.append(self.last)
        if len(self.leaving) > LEAVING_LAYERS and (oldest := self.leaving.popleft()()) is not None:
            oldest.leave()
        return kept

    def unpack(self, kept: _Kept | Tensor) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        if self.stream is None:
            return kept.host.to(self.device, copy=True)
        tensor = self._fetch(kept)
        kept.leave()  # to the caller, once it has been copied
        before = kept.before() if kept.before is not None else None
        if before is not None:
            self._fetch(before)
        return tensor

    def _fetch(self, kept: _Kept) -> Tensor:
        """Return the activation's memory on the device, to be read after `leave`."""
        if kept.on_device is None:
            # It is memory of the computing stream, which may still use its earlier contents.
            tensor = torch.empty(kept.host.shape, dtype=kept.host.dtype, device=self.device)
            kept.on_device = (tensor, self._copy(tensor, kept.host))
        return kept.on_device[0]

    def _copy(self, to: Tensor, source: Tensor) -> Any:
        """Copy on the second stream, after the work queued so far; return the event of its end."""
        assert self.stream is not None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            to.copy_(source, non_blocking=True)
            return self.stream.record_event()
