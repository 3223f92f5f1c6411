"""Device memory that can be freed and mapped again at the same addresses."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from verl.utils.arithmetic import round_up
from verl.utils.errors import RolloutError
from verl.utils.imports import require
from verl.utils.units import GIB


class ReservedMemory:
    """A range of device addresses; `grow` adds the memory behind it and `release` frees it.

    A captured CUDA graph keeps the addresses it was captured with. Buffers that leave the device
    between two phases are views of such a range, so the graph is valid again as soon as the memory
    is back. The contents are lost.

    Between `release` and `grow` a view may be kept, reshaped and dropped, but not read or written:
    a kernel that accesses it causes an illegal memory access, after which the process cannot use
    the device. The memory is outside torch's allocator: its statistics do not count it, and CUDA
    IPC cannot share it with another process.

    Every method may raise RolloutError with the name of the driver call that failed. Call `close`
    rather than leave it to the garbage collector, which may run during the capture of a graph, when
    waiting for the device is an error.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Reserve addresses for `num_bytes` (rounded up to `granularity`), and no memory.

        Raises MissingDependencyError without the package cuda-bindings.
        """
        # Set before anything can fail: `close` also runs on a half-made object.
        self._context: Any = None
        self._address = 0
        self._mapping_sizes: list[int] = []
        assert device.type == "cuda"
        assert num_bytes > 0
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device

        self._driver = require(
            "cuda.bindings.driver", "Memory at reserved addresses", "pip install cuda-bindings"
        )
        self._properties, self._access = self._describe_memory()
        self._call("cuInit", 0)
        self._driver_device = self._call("cuDeviceGet", self.device.index)
        self._context = self._call("cuDevicePrimaryCtxRetain", self._driver_device)

        with self._primary_context():
            # Every size and address must be a multiple of the smallest granularity. The recommended
            # one is such a multiple.
            self.granularity: int = self._call(
                "cuMemGetAllocationGranularity",
                self._properties,
                self._driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
            )
            self.num_bytes = round_up(num_bytes, self.granularity)
            self._address = int(self._call("cuMemAddressReserve", self.num_bytes, 0, 0, 0))

    @property
    def mapped_bytes(self) -> int:
        """Return the number of bytes, from the start of the range, that have memory."""
        return sum(self._mapping_sizes)

    def grow(self, num_bytes: int) -> None:
        """Back at least the first `num_bytes` with memory, rounded up to `granularity`.

        Memory that is mapped already keeps its contents; new memory is not initialized. If the
        device is short of memory, torch's cached blocks are freed first. Raises RolloutError,
        without any change, if there still is too little.
        """
        assert self._address, "grow() after close()"
        assert 0 <= num_bytes <= self.num_bytes, f"{num_bytes} bytes of a range of {self.num_bytes}"
        missing = round_up(num_bytes, self.granularity) - self.mapped_bytes
        if missing <= 0:
            return
        handle = self._create(missing)
        if handle is None:
            # Blocks that torch's allocator caches count as used for everyone else.
            torch.cuda.empty_cache()
            handle = self._create(missing)
        if handle is None:
            raise self._out_of_memory(missing)
        self._map(handle, missing)

    def release(self) -> None:
        """Free all memory after the device has finished its queued work; keep the addresses."""
        if not self._mapping_sizes:
            return
        with self._primary_context():
            self._call("cuCtxSynchronize")
            while self._mapping_sizes:
                self._unmap_last()

    def tensor(
        self,
        offset: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        strides: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Return a view of the range from byte `offset` on, which must have memory now.

        `strides` count elements, as torch's do; None means contiguous. The view keeps the range
        reserved: if a ReservedMemory is dropped without `close`, its memory is freed with its last
        view.
        """
        assert self._address, "tensor() after close()"
        assert all(size > 0 for size in shape), f"a view of no bytes: {tuple(shape)}"
        assert offset >= 0, f"offset {offset}"
        assert offset % dtype.itemsize == 0, f"{dtype} at byte {offset}"

        if strides is None:
            strides = torch.empty(tuple(shape), device="meta").stride()
        assert len(strides) == len(shape), f"{len(strides)} strides of {len(shape)} dimensions"

        last = sum((size - 1) * stride for size, stride in zip(shape, strides))
        num_bytes = (last + 1) * dtype.itemsize
        end = offset + num_bytes
        assert end <= self.mapped_bytes, (
            f"bytes {offset} to {end} of {self.mapped_bytes} that have memory"
        )

        flat = _bytes_at(self._address + offset, num_bytes, self)
        return flat.view(dtype).as_strided(tuple(shape), tuple(strides))

    def close(self) -> None:
        """Free the memory and the addresses, which invalidates every view. May be called twice."""
        self.release()
        if self._address:
            with self._primary_context():
                self._call("cuMemAddressFree", self._address, self.num_bytes)
            self._address = 0
        if self._context is not None:
            self._call("cuDevicePrimaryCtxRelease", self._driver_device)
            self._context = None

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # At the end of the process the driver frees everything; it and the names of this module may
        # be gone already.
        if not is_finalizing():
            self.close()

    def _describe_memory(self) -> tuple[Any, Any]:
        """Return the driver's descriptors of memory on our device with read and write access."""
        driver = self._driver
        properties = driver.CUmemAllocationProp()
        access = driver.CUmemAccessDesc()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        for described in (properties, access):
            described.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            described.location.id = self.device.index
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return properties, access

    def _create(self, num_bytes: int) -> Any:
        """Return a handle of unmapped memory; None if the device has too little."""
        with self._primary_context():
            code, handle = self._driver.cuMemCreate(num_bytes, self._properties, 0)
            if code == self._driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
                return None
            self._check("cuMemCreate", code)
            return handle

    def _map(self, handle: Any, num_bytes: int) -> None:
        """Map the memory of `handle` to the range's next `num_bytes`, or free it on failure."""
        address = self._address + self.mapped_bytes
        with self._primary_context():
            try:
                self._call("cuMemMap", address, num_bytes, 0, handle, 0)
                self._mapping_sizes.append(num_bytes)
            finally:
                # From here on only the mapping holds the memory, so unmapping frees it.
                self._call("cuMemRelease", handle)
            try:
                self._call("cuMemSetAccess", address, num_bytes, [self._access], 1)
            except RolloutError:
                self._unmap_last()
                raise

    def _unmap_last(self) -> None:
        # The driver can only unmap exactly the memory of one earlier map call.
        size = self._mapping_sizes[-1]
        self._call("cuMemUnmap", self._address + self.mapped_bytes - size, size)
        self._mapping_sizes.pop()

    @contextmanager
    def _primary_context(self) -> Iterator[None]:
        """Make torch's context of our device current.

        A new thread has no context, and torch may have another device selected.
        """
        self._call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent")

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call a driver function; return its value without the code, or a list of its values."""
        code, *values = getattr(self._driver, name)(*arguments)
        self._check(name, code)
        return values[0] if len(values) == 1 else values

    def _check(self, name: str, code: Any) -> None:
        if code != self._driver.CUresult.CUDA_SUCCESS:
            raise RolloutError(f"The CUDA driver call {name} failed on {self.device}: {code.name}.")

    def _out_of_memory(self, num_bytes: int) -> RolloutError:
        with self._primary_context():
            free, total = self._call("cuMemGetInfo")
        return RolloutError(
            f"The rollout asked {self.device} for {num_bytes / GIB:.2f} GiB in addition to the "
            f"{self.mapped_bytes / GIB:.2f} GiB that this buffer holds, and {free / GIB:.2f} of "
            f"{total / GIB:.2f} GiB are free. Lower "
            "actor_rollout_ref.rollout.gpu_memory_utilization, or stop other users of the device."
        )


class _DeviceBytes:
    """Bytes on the device in a form that torch reads.

    The tensor made from it keeps it alive, and with it `owner`.
    """

    def __init__(self, address: int, num_bytes: int, owner: ReservedMemory) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (num_bytes,),
            "strides": None,
            "typestr": "|u1",
            "version": 3,
        }


def _bytes_at(address: int, num_bytes: int, owner: ReservedMemory) -> torch.Tensor:
    flat = torch.as_tensor(_DeviceBytes(address, num_bytes, owner), device=owner.device)
    assert flat.data_ptr() == address, "torch copied the memory instead of viewing it"
    return flat
