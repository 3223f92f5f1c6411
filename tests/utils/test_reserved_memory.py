"""Reserved memory on a simulated driver that follows CUDA's rules: calls, their order, and memory
that stays."""

import ctypes
import gc
import subprocess
import sys
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.utils import reserved_memory
from verl.utils.errors import MissingDependencyError, RolloutError
from verl.utils.reserved_memory import ReservedMemory

PAGE = 4096
DEVICE = torch.device("cuda", 1)


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_CONTEXT = 201


class FakeDriver:
    """The used part of `cuda.bindings.driver`.

    As in CUDA, memory lives while a handle or a mapping holds it.
    """

    CUresult = Result
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED=1)

    def __init__(self, memory: int) -> None:
        self.memory = memory
        self.calls: list[str] = []
        self.failing = ""
        self.retained: list[int] = []
        self.contexts: list[Any] = []
        self.ranges: dict[int, Any] = {}
        self.handles: dict[int, int] = {}
        self.mappings: dict[int, list[Any]] = {}  # address -> [size, handle, accessible]
        self.sizes: dict[int, int] = {}  # of all memory ever created

    def __getattribute__(self, name: str) -> Any:
        """Log the calls, fail the chosen one, and require a context where CUDA does."""
        value: Any = super().__getattribute__(name)
        if not (name.startswith("cu") and callable(value)):
            return value

        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            if name == self.failing:
                return Result.CUDA_ERROR_INVALID_VALUE, None
            if name.startswith(("cuMem", "cuCtxS")) and self.contexts[-1:] != ["primary 1"]:
                return Result.CUDA_ERROR_INVALID_CONTEXT, None
            return value(*arguments)

        return call

    @property
    def used(self) -> int:
        return sum(
            self.sizes[handle]
            for handle in {*self.handles, *(entry[1] for entry in self.mappings.values())}
        )

    @property
    def untouched(self) -> bool:
        return not (self.ranges or self.handles or self.mappings or self.contexts or self.retained)

    def CUmemAllocationProp(self):
        return SimpleNamespace(location=SimpleNamespace())

    CUmemAccessDesc = CUmemAllocationProp

    def cuInit(self, flags):
        return (Result(flags),)

    def cuDeviceGet(self, ordinal):
        return Result(0), ordinal

    def cuDevicePrimaryCtxRetain(self, device):
        self.retained.append(device)
        return Result(0), f"primary {device}"

    def cuDevicePrimaryCtxRelease(self, device):
        self.retained.remove(device)
        return (Result(0),)

    def cuCtxPushCurrent(self, context):
        self.contexts.append(context)
        return (Result(0),)

    def cuCtxPopCurrent(self):
        return Result(0), self.contexts.pop()

    def cuCtxSynchronize(self):
        return (Result(0),)

    def cuMemGetInfo(self):
        return Result(0), self.memory - self.used, self.memory

    def cuMemGetAllocationGranularity(self, properties, option):
        return Result(0), PAGE

    def cuMemAddressReserve(self, size, alignment, address, flags):
        if size % PAGE or (alignment, address, flags) != (0, 0, 0):
            return Result(1), None
        memory = (ctypes.c_uint8 * (size + PAGE))()
        base = -(-ctypes.addressof(memory) // PAGE) * PAGE
        self.ranges[base] = (size, memory)
        return Result(0), base

    def cuMemAddressFree(self, address, size):
        if address not in self.ranges or self.ranges[address][0] != size or self.mappings:
            return (Result(1),)
        del self.ranges[address]
        return (Result(0),)

    def cuMemCreate(self, size, properties, flags):
        described = (properties.type, properties.location.type, properties.location.id, flags)
        if size % PAGE or not size or described != (1, 1, 1, 0):
            return Result(1), None
        if self.used + size > self.memory:
            return Result(2), None
        handle = len(self.sizes)
        self.sizes[handle] = self.handles[handle] = size
        return Result(0), handle

    def cuMemRelease(self, handle):
        return (Result(0 if self.handles.pop(handle, 0) else 1),)

    def cuMemMap(self, address, size, offset, handle, flags):
        inside = any(
            base <= address and address + size <= base + whole
            for base, (whole, _) in self.ranges.items()
        )
        taken = any(
            address < start + entry[0] and start < address + size
            for start, entry in self.mappings.items()
        )
        if not inside or taken or self.handles.get(handle) != size or (offset, flags) != (0, 0):
            return (Result(1),)
        self.mappings[address] = [size, handle, False]
        return (Result(0),)

    def cuMemSetAccess(self, address, size, access, count):
        described = [(one.location.type, one.location.id, one.flags) for one in access]
        if self.mappings.get(address, [0])[0] != size or described != [(1, 1, 3)] or count != 1:
            return (Result(1),)
        self.mappings[address][2] = True
        return (Result(0),)

    def cuMemUnmap(self, address, size):
        if self.mappings.get(address, [0])[0] != size:
            return (Result(1),)
        del self.mappings[address]
        return (Result(0),)


@pytest.fixture
def driver(monkeypatch):
    fake = FakeDriver(memory=64 * PAGE)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", fake)
    # The one step that needs a CUDA build of torch: reading bytes at an address as a tensor.
    monkeypatch.setattr(
        reserved_memory, "_bytes_at", lambda address, size, owner: host_bytes(address, size)
    )
    return fake


def host_bytes(address: int, num_bytes: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)


def test_addresses_cost_no_memory_and_growth_is_rounded_up(driver):
    memory = ReservedMemory(1000 * PAGE - 5, DEVICE)
    assert (memory.num_bytes, memory.mapped_bytes, driver.used) == (1000 * PAGE, 0, 0)
    driver.calls.clear()
    memory.grow(PAGE + 1)
    assert memory.mapped_bytes == driver.used == 2 * PAGE
    assert [name for name in driver.calls if "Ctx" not in name] == [
        *("cuMemCreate", "cuMemMap", "cuMemRelease", "cuMemSetAccess")
    ]
    driver.calls.clear()
    memory.grow(2 * PAGE)
    memory.grow(0)
    assert driver.calls == []


def test_growth_adds_and_does_not_map_again(driver):
    memory = ReservedMemory(20 * PAGE, DEVICE)
    memory.grow(3 * PAGE)
    first = dict(driver.mappings)
    memory.grow(10 * PAGE)
    assert first.items() <= driver.mappings.items()
    assert sorted(entry[0] for entry in driver.mappings.values()) == [3 * PAGE, 7 * PAGE]
    assert all(accessible for _, _, accessible in driver.mappings.values())


def test_memory_returns_at_the_same_addresses(driver):
    memory = ReservedMemory(20 * PAGE, DEVICE)
    memory.grow(3 * PAGE)
    memory.grow(10 * PAGE)
    before = memory.tensor(5 * PAGE, (4,), torch.int32).data_ptr()
    driver.calls.clear()
    memory.release()
    assert (memory.mapped_bytes, driver.used, driver.handles) == (0, 0, {})
    # The device may still read the memory until it has been synchronized.
    assert driver.calls.index("cuCtxSynchronize") < driver.calls.index("cuMemUnmap")
    memory.grow(10 * PAGE)
    assert memory.tensor(5 * PAGE, (4,), torch.int32).data_ptr() == before


@given(steps=st.lists(st.integers(-3, 40 * PAGE), max_size=12))
def test_exactly_the_requested_memory_is_mapped(steps):
    """Interpret steps below 0 as `release`, all others as `grow`."""
    driver = FakeDriver(memory=64 * PAGE)
    expected = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cuda.bindings.driver", driver)
        memory = ReservedMemory(40 * PAGE, DEVICE)

    for step in steps:
        if step < 0:
            memory.release()
        else:
            memory.grow(step)
        expected = 0 if step < 0 else max(expected, -(-step // PAGE) * PAGE)
        assert memory.mapped_bytes == driver.used == expected
        assert not driver.contexts

    memory.close()
    assert driver.untouched


def test_blocks_cached_by_torch_are_freed_before_an_error(driver, monkeypatch):
    memory = ReservedMemory(100 * PAGE, DEVICE)
    memory.grow(2 * PAGE)
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(list(driver.contexts)))
    monkeypatch.setattr(reserved_memory, "GIB", PAGE)
    with pytest.raises(
        RolloutError,
        match=r"for 78\.00 GiB in addition to the 2\.00 GiB .* 62\.00 of 64\.00 GiB.*utilization",
    ):
        memory.grow(80 * PAGE)
    assert (memory.mapped_bytes, driver.used, driver.handles) == (2 * PAGE, 2 * PAGE, {})

    def free_the_cache():
        emptied.append(list(driver.contexts))
        driver.memory = 100 * PAGE

    monkeypatch.setattr(torch.cuda, "empty_cache", free_the_cache)
    memory.grow(80 * PAGE)
    assert memory.mapped_bytes == 80 * PAGE
    # Once each, with the current context of the thread, which torch may use on another device.
    assert emptied == [[], []]


@pytest.mark.parametrize(
    "name",
    [
        *("cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent"),
        *("cuMemGetAllocationGranularity", "cuMemAddressReserve"),
    ],
)
def test_a_call_that_fails_at_the_start_is_named_and_leaves_no_memory(driver, name):
    driver.failing = name
    with pytest.raises(RolloutError, match=f"{name} failed on cuda:1: CUDA_ERROR_INVALID_VALUE"):
        ReservedMemory(PAGE, DEVICE)
    driver.failing = ""
    gc.collect()
    assert driver.untouched


@pytest.mark.parametrize("name", ["cuCtxPushCurrent", "cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_failed_growth_changes_nothing_and_can_be_retried(driver, name):
    memory = ReservedMemory(20 * PAGE, DEVICE)
    memory.grow(2 * PAGE)
    driver.failing = name
    with pytest.raises(RolloutError, match=f"{name} failed on cuda:1: CUDA_ERROR_INVALID_VALUE"):
        memory.grow(5 * PAGE)
    assert (memory.mapped_bytes, driver.used) == (2 * PAGE, 2 * PAGE)
    assert not driver.handles
    assert not driver.contexts
    driver.failing = ""
    memory.grow(5 * PAGE)
    memory.close()
    assert driver.untouched


@pytest.mark.parametrize(
    "name", ["cuCtxSynchronize", "cuMemUnmap", "cuMemAddressFree", "cuDevicePrimaryCtxRelease"]
)
def test_a_failed_close_can_be_retried(driver, name):
    memory = ReservedMemory(20 * PAGE, DEVICE)
    memory.grow(2 * PAGE)
    memory.grow(5 * PAGE)
    driver.failing = name
    with pytest.raises(RolloutError, match=f"{name} failed"):
        memory.close()
    driver.failing = ""
    memory.close()
    memory.close()
    assert driver.untouched


def test_a_view_covers_the_bytes_at_its_offset(driver):
    memory = ReservedMemory(20 * PAGE, DEVICE)
    memory.grow(4 * PAGE)
    content = host_bytes(next(iter(driver.mappings)), 4 * PAGE)
    memory.tensor(PAGE, (2, 3), torch.int32).copy_(torch.arange(6).view(2, 3))
    assert content[PAGE : PAGE + 24].view(torch.int32).tolist() == [0, 1, 2, 3, 4, 5]
    # Two rows of three out of rows of four, next to a view of the fourth column.
    rows = memory.tensor(PAGE, (2, 3), torch.float16, strides=(4, 1)).fill_(1)
    column = memory.tensor(PAGE + 6, (2,), torch.float16, strides=(4,)).fill_(2)
    assert content[PAGE : PAGE + 16].view(torch.float16).tolist() == [1, 1, 1, 2, 1, 1, 1, 2]
    assert (rows.stride(), column.stride()) == ((4, 1), (4,))
    assert memory.tensor(4 * PAGE - 1, (), torch.uint8).shape == ()


@pytest.mark.parametrize(
    ("offset", "shape", "dtype", "strides"),
    [
        (0, (2 * PAGE + 1,), torch.uint8, None),
        (2 * PAGE, (), torch.uint8, None),
        (0, (2, 2), torch.uint8, (2 * PAGE, 1)),
        (-4, (1,), torch.float32, None),
        (2, (1,), torch.float32, None),
        (0, (0, 4), torch.float32, None),
        (0, (1, 4), torch.float32, (1,)),
    ],
)
def test_a_view_of_unmapped_memory_is_rejected(driver, offset, shape, dtype, strides):
    memory = ReservedMemory(20 * PAGE, DEVICE)
    memory.grow(2 * PAGE)
    with pytest.raises(AssertionError):
        memory.tensor(offset, shape, dtype, strides)


def test_dropped_memory_is_freed_and_a_close_makes_no_further_calls(driver):
    memory = ReservedMemory(20 * PAGE, DEVICE)
    memory.grow(2 * PAGE)
    with pytest.raises(AssertionError, match="of a range of"):
        memory.grow(20 * PAGE + 1)
    del memory
    gc.collect()
    assert driver.untouched
    memory = ReservedMemory(20 * PAGE, DEVICE)
    memory.close()
    with pytest.raises(AssertionError, match="after close"):
        memory.grow(PAGE)
    with pytest.raises(AssertionError, match="after close"):
        memory.tensor(0, (1,), torch.uint8)


def test_a_process_may_end_without_a_close():
    script = (
        "import sys, torch\n"
        "from tests.utils.test_reserved_memory import DEVICE, FakeDriver, PAGE, ReservedMemory\n"
        "sys.modules['cuda.bindings.driver'] = FakeDriver(memory=64 * PAGE)\n"
        "memory = ReservedMemory(PAGE, DEVICE)\n"
        "memory.grow(PAGE)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=root
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(MissingDependencyError, match="pip install cuda-bindings"):
        ReservedMemory(PAGE, DEVICE)
