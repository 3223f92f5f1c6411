"""Weights between processes on one GPU and on two, and the kernel of the fingerprint. `pytest -m
"gpu or multi_gpu"`."""

import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.distributed.jobs import Setup
from tests.distributed.ranks import Ranks
from tests.weight_sync import jobs
from tests.weight_sync.jobs import BUCKET_BYTES, Store, Trip, odd_tensors
from verl.utils.errors import RolloutError
from verl.weight_sync import FingerprintLog, receive_into
from verl.weight_sync.choice import device_of, gpu_uuid
from verl.weight_sync.fingerprint import Part, fingerprints
from verl.weight_sync.ipc import SharedMemoryReceiver, SharedMemorySender
from verl.weight_sync.shards import gathered

pytestmark = pytest.mark.timeout(300)
HAND_OVERS = 2


def take(connection: Connection, uuid: str, fault: str) -> None:
    """Receive the weights in another process, which may number the GPUs differently.

    Reports the location of each weight.
    """
    device = device_of(uuid)
    torch.cuda.set_device(device)
    receiver = SharedMemoryReceiver(connection, device)

    for _ in range(HAND_OVERS):
        store = Store(torch.bfloat16, fault, str(device))
        try:
            receive_into(store, receiver)
        except RolloutError as error:
            connection.send((device.index, str(error)))
            return

    connection.send(
        (
            device.index,
            {name: tensor.cpu().float().numpy() for name, tensor in store.tensors.items()},
        )
    )


def hand_over(
    device: torch.device, memory: torch.device, *, visible: str | None = None, fault: str = ""
):
    """Send from `device` through `memory` to another process on the same GPU.

    Returns the report of that process, and the error of this one.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=take, args=(theirs, gpu_uuid(device), fault), daemon=True)
    # Set before it starts, like launchers do: its imports may look for GPUs.
    with mock.patch.dict(os.environ, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}):
        process.start()
    theirs.close()
    error = ""

    try:
        with torch.cuda.device(device):
            sender = SharedMemorySender(
                [ours],
                device=memory,
                bucket_bytes=BUCKET_BYTES,
                dtype=torch.bfloat16,
                pin=memory.type == "cpu",
            )
            for step in range(HAND_OVERS):
                log = FingerprintLog()
                tensors = [(name, tensor.to(device)) for name, tensor in odd_tensors(step).items()]
                sender.send(
                    gathered(tensors, bucket_bytes=BUCKET_BYTES, dtype=torch.bfloat16, log=log), log
                )
    except RolloutError as raised:
        error = str(raised)

    answer = ours.recv()
    process.join(60)
    return *answer, error


def assert_arrived(received: dict) -> None:
    expected = odd_tensors(HAND_OVERS - 1)
    assert received.keys() == expected.keys()
    for name, tensor in expected.items():
        as_sent = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        assert torch.equal(torch.from_numpy(received[name]), as_sent.float()), name


@pytest.fixture
def gpu() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.gpu
@pytest.mark.parametrize("through", ["cuda", "cpu"], ids=["ipc", "host"])
def test_two_processes_on_one_gpu(gpu: torch.device, through: str):
    memory = gpu if through == "cuda" else torch.device("cpu")
    _, received, error = hand_over(gpu, memory)
    assert error == ""
    assert_arrived(received)


@pytest.mark.gpu
def test_damage_between_two_processes_is_named_in_both(gpu: torch.device):
    _, at_receiver, at_sender = hand_over(gpu, gpu, fault="rows")
    assert "'rows'" in at_receiver
    assert "'rows'" in at_sender


@pytest.mark.multi_gpu
@pytest.mark.parametrize("number", [0, 1])
def test_processes_that_number_the_gpus_differently(number: int):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    device = torch.device("cuda", number)
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[:2]
    theirs, received, error = hand_over(device, device, visible=",".join(reversed(seen)))
    assert (theirs, error) == (1 - number, "")
    assert_arrived(received)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("transport", ["broadcast", "host"])
def test_from_one_gpu_to_another(two_gpus: Ranks, tmp_path: Path, transport: str):
    trip = Trip(transport, tmp_path, torch.bfloat16, hand_overs=HAND_OVERS, device="cuda")
    (_, none), (received, error) = two_gpus.call(jobs.travel, trip)
    assert (none, error) == ("", "")
    for step, tensors in enumerate(received):
        for name, tensor in odd_tensors(step).items():
            assert torch.equal(tensors[name], tensor.to(tensors[name].dtype)), name


@pytest.mark.multi_gpu
@pytest.mark.parametrize(
    "settings", [{}, {"param_offload": True}, {"offload_policy": True}, {"fsdp_size": 1}]
)
def test_shards_of_two_gpus_are_gathered_whole(two_gpus: Ranks, settings: dict):
    setup = Setup(double=False, device="cuda", **settings)
    expected, log = jobs.gather_model(Setup(double=False, device="cuda"), torch.bfloat16, 1 << 20)
    for found, their_log in two_gpus.call(jobs.gather_model, setup, torch.bfloat16, 7000):
        assert their_log == log
        for name, tensor in expected.items():
            assert torch.equal(found[name].to(torch.bfloat16), tensor.to(torch.bfloat16)), name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernel_computes_the_fingerprint_of_the_host(gpu: torch.device, dtype: torch.dtype):
    shapes = [(1,), (65_536,), (65_537,), (131_072,), (1000, 777), (0, 3), (300_001,)]
    tensors = [torch.randn(shape, device=gpu).to(dtype) for shape in shapes]
    tensors += [tensors[4].flatten()[1:], tensors[4].T, tensors[1]]
    parts = [Part()] * (len(tensors) - 2) + [Part(5, 100, 777), Part((1 << 33) + 3)]
    assert (
        fingerprints(tensors, parts).tolist()
        == fingerprints([tensor.cpu() for tensor in tensors], parts).tolist()
    )


def milliseconds(call: Callable[[], object]) -> float:
    taken = []
    for _ in range(6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        taken.append(1e3 * (time.perf_counter() - start))
    return min(taken[1:])


@pytest.mark.gpu
def test_fingerprints_cost_no_more_than_a_copy(gpu: torch.device):
    """Use 1.5 GB in 28 layers with the shapes of a 1.5B model. A copy reads and writes all of
    it."""
    shapes = [(1536, 1536), (256, 1536), (8960, 1536), (1536, 8960), (1536,)] * 28
    tensors = [torch.randn(shape, device=gpu, dtype=torch.bfloat16) for shape in shapes]
    copies = [torch.empty_like(tensor) for tensor in tensors]
    copy_ms = milliseconds(lambda: torch._foreach_copy_(copies, tensors))
    proof_ms = milliseconds(lambda: fingerprints(tensors))
    print(f"fingerprints {proof_ms:.2f} ms, copy {copy_ms:.2f} ms")
    assert proof_ms <= 1.5 * copy_ms + 3.0  # the host's part, for 140 tensors, is constant
