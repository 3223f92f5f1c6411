"""Reserved memory on CUDA: a captured graph is valid again once the memory is back, and released
memory is available on the device."""

import gc
import threading
import time

import pytest
import torch
from torch import nn

from verl.utils.errors import RolloutError
from verl.utils.reserved_memory import ReservedMemory
from verl.utils.units import GIB

pytestmark = pytest.mark.gpu

MIB = 1024**2


@pytest.fixture
def reserve():
    """Reserve memory, and close it after the test."""
    torch.cuda.empty_cache()
    made = []

    def make(num_bytes):
        made.append(ReservedMemory(num_bytes, torch.device("cuda")))
        return made[-1]

    yield make
    for memory in made:
        memory.close()


def free_bytes():
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def capture(step):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def test_a_graph_replays_on_memory_that_was_released_and_restored(reserve):
    memory = reserve(GIB)
    memory.grow(256 * MIB)
    memory.grow(GIB)
    weight = memory.tensor(0, (512, 512), torch.bfloat16)
    # Across the boundary of two mappings, and up to the last byte.
    inputs = memory.tensor(256 * MIB - 32 * 1024, (64, 512), torch.bfloat16)
    product = memory.tensor(512 * MIB, (64, 512), torch.bfloat16)
    copied = memory.tensor(GIB - 64 * 512 * 2, (64, 512), torch.bfloat16)
    count = memory.tensor(700 * MIB, (1000,), torch.int64)

    def step():
        torch.mm(inputs, weight, out=product)
        copied.copy_(product)  # a copy node in the graph, not a kernel
        count.add_(1)

    def fill(seed):
        generator = torch.Generator("cuda").manual_seed(seed)
        weight.normal_(generator=generator)
        inputs.normal_(generator=generator)
        product.fill_(float("nan"))
        copied.fill_(float("nan"))
        count.fill_(seed)

    fill(0)
    graph = capture(step)
    freed = []
    for seed in (10, 20, 30):
        awake = free_bytes()
        memory.release()
        freed.append(free_bytes() - awake)
        assert memory.mapped_bytes == 0
        # Takes the pages that were just released, so that other ones are mapped.
        others = torch.full((GIB,), 255, dtype=torch.uint8, device="cuda")
        memory.grow(GIB)
        fill(seed)
        graph.replay()
        graph.replay()
        expected = inputs.float() @ weight.float()
        torch.testing.assert_close(product.float(), expected, rtol=2e-2, atol=0.2)
        assert torch.equal(copied, product)
        assert bool((count == seed + 2).all())
        assert bool((others == 255).all())
        del others
        torch.cuda.empty_cache()
    # The largest: other processes may take memory of this device in between.
    assert max(freed) >= GIB, freed


def test_growth_keeps_the_contents(reserve):
    memory = reserve(64 * MIB)
    memory.grow(3 * MIB)
    first = memory.tensor(0, (3 * MIB // 8,), torch.int64)
    values = torch.arange(3 * MIB // 8, device="cuda")
    first.copy_(values)
    for size in (10 * MIB, 11 * MIB, 64 * MIB):
        memory.grow(size)
        assert memory.mapped_bytes >= size
        assert torch.equal(first, values)
    everything = memory.tensor(0, (64 * MIB // 8,), torch.int64)
    assert torch.equal(everything[: len(values)], values)
    everything.copy_(torch.arange(len(everything), device="cuda"))
    assert torch.equal(everything.cpu(), torch.arange(len(everything)))


def test_torch_needs_nothing_of_a_view_while_its_memory_is_released(reserve):
    memory = reserve(4 * MIB)
    memory.grow(4 * MIB)
    view = memory.tensor(MIB, (256, 1024), torch.float32).fill_(1)
    memory.release()
    parameter = nn.Parameter(view, requires_grad=False)
    view.record_stream(torch.cuda.Stream())
    assert parameter[1:].view(-1, 512).data_ptr() == view.data_ptr() + 4096
    assert parameter.is_cuda

    dropped = parameter.t()
    del parameter, dropped
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    memory.grow(4 * MIB)
    assert float(view.fill_(2).sum()) == 2 * view.numel()


def test_close_and_the_last_view_free_all_memory(reserve):
    # loads the kernels, which allocate memory themselves
    torch.ones(8, device="cuda").fill_(2).sum().item()
    before = free_bytes()
    memory = reserve(GIB)
    memory.grow(GIB)
    assert before - free_bytes() >= GIB
    memory.close()
    assert before - free_bytes() < GIB // 8
    dropped = ReservedMemory(GIB, torch.device("cuda"))

    dropped.grow(GIB)
    part = dropped.tensor(0, (1024, 1024), torch.float32)[512:]
    del dropped
    gc.collect()
    assert float(part.fill_(3).sum()) == 3 * part.numel()
    assert before - free_bytes() >= GIB
    del part
    gc.collect()

    assert before - free_bytes() < GIB // 8


def test_a_thread_that_has_not_used_cuda_may_grow_and_release(reserve):
    memory = reserve(8 * MIB)
    failures = []

    def run(work):
        def guarded():
            try:
                work()
            except RolloutError as error:
                failures.append(error)

        thread = threading.Thread(target=guarded)
        thread.start()
        thread.join()

    run(lambda: memory.grow(8 * MIB))
    assert not failures
    view = memory.tensor(0, (MIB,), torch.int64)
    assert int(view.fill_(5).sum()) == 5 * MIB
    run(memory.release)
    assert not failures
    assert memory.mapped_bytes == 0


def test_insufficient_memory_is_reported_and_changes_nothing(reserve):
    total = torch.cuda.mem_get_info()[1]
    memory = reserve(2 * total)
    memory.grow(4 * MIB)
    view = memory.tensor(0, (MIB,), torch.int32).fill_(7)
    mapped = memory.mapped_bytes
    free = free_bytes()
    with pytest.raises(RolloutError, match="gpu_memory_utilization"):
        memory.grow(2 * total)
    assert memory.mapped_bytes == mapped
    assert abs(free_bytes() - free) < 64 * MIB
    assert bool((view == 7).all())
    memory.grow(16 * MIB)


def test_blocks_cached_by_torch_make_room(reserve):
    free = free_bytes()
    most = int(0.6 * free)
    block = torch.empty(most, dtype=torch.uint8, device="cuda")
    del block
    assert free_bytes() < most
    memory = reserve(most)
    memory.grow(most)
    assert memory.mapped_bytes >= most


@pytest.mark.parametrize("gib", [8, 40])
def test_release_and_restore_are_fast(reserve, capsys, gib):
    if free_bytes() < (gib + 1) * GIB:
        pytest.skip(f"needs {gib + 1} GiB of free memory")
    memory = reserve(gib * GIB)
    memory.grow(gib * GIB)
    view = memory.tensor(0, (gib * GIB // 8,), torch.int64)
    times = []

    for turn in range(3):
        view.fill_(turn)
        torch.cuda.synchronize()
        start = time.perf_counter()
        memory.release()
        released = time.perf_counter()
        memory.grow(gib * GIB)
        times.append((released - start, time.perf_counter() - released))
        view.fill_(-turn)
        assert bool((view[:: 1024**2] == -turn).all())

    shown = ", ".join(f"{1e3 * away:.1f} + {1e3 * back:.1f}" for away, back in times)
    with capsys.disabled():
        print(f"\n{gib} GiB, release + growth in ms: {shown}")
    assert min(away + back for away, back in times) < 2
