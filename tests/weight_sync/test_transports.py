"""Every transport delivers weights bit for bit to another process, or both ends name the tensor
that differs."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.ranks import Ranks
from tests.tiny_models import tiny_model
from tests.weight_sync.jobs import BUCKET_BYTES, Engine, Store, Trip, odd_tensors, travel
from verl.rollout.twin import ModelTwin
from verl.utils.errors import CheckpointError, RolloutError
from verl.utils.scratch import remove_scratch
from verl.weight_sync import DirectSender, FingerprintLog, Offer, Route, ipc, receive_into
from verl.weight_sync.disk import DiskReceiver, DiskSender
from verl.weight_sync.ipc import SharedMemoryReceiver, SharedMemorySender
from verl.weight_sync.shards import gathered

TRANSPORTS = ("host", "broadcast", "disk")


def as_received(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_bit_arrives(two_ranks: Ranks, tmp_path: Path, transport: str, dtype: torch.dtype):
    (_, none), (received, error) = two_ranks.call(
        travel, Trip(transport, tmp_path, dtype, hand_overs=3)
    )
    assert (none, error) == ("", "")
    assert len(received) == 3
    for step, tensors in enumerate(received):
        expected = odd_tensors(step)
        assert tensors.keys() == expected.keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, as_received(expected[name], dtype)), name


@pytest.mark.parametrize(("fault", "name"), [("bit", "large"), ("rows", "rows")])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_damage_in_transit_is_named(
    two_ranks: Ranks, tmp_path: Path, transport: str, fault: str, name: str
):
    (_, at_sender), (_, at_receiver) = two_ranks.call(
        travel, Trip(transport, tmp_path, fault=fault)
    )
    assert (
        "1 of 9 weights of the rollout engine are not the trainer's, by their fingerprints: "
        f"'{name}'."
    ) in at_receiver
    if transport != "disk":  # does not wait for the reader
        assert f"'{name}'" in at_sender


@pytest.mark.parametrize("transport", ["host", "broadcast"])
@pytest.mark.parametrize(
    ("fault", "message"), [("refuses", "no such weight: rows"), ("breaks off", "no more")]
)
def test_a_fault_at_one_end_ends_both(
    two_ranks: Ranks, tmp_path: Path, transport: str, fault: str, message: str
):
    for _, error in two_ranks.call(travel, Trip(transport, tmp_path, fault=fault)):
        assert message in error


def test_a_folder_is_readable_by_others_and_damage_to_its_files_is_detected(tmp_path: Path):
    model = tiny_model("qwen2", tie_word_embeddings=True)
    sender = DiskSender(tmp_path, bucket_bytes=10_000, dtype=torch.bfloat16)
    for _ in range(3):
        sender.send(model.named_parameters())
    assert sorted(path.name for path in tmp_path.glob("global_step_*")) == [
        "global_step_2",
        "global_step_3",
    ]
    folder = tmp_path / "global_step_3" / "weights"
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 2
    stored = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert (
        json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].keys()
        == stored.keys()
    )
    for name, parameter in model.named_parameters():
        assert torch.equal(stored[name], parameter.to(torch.bfloat16))

    damaged = bytearray(files[0].read_bytes())
    damaged[-1] ^= 1
    files[0].write_bytes(damaged)
    store = Store(torch.bfloat16)
    receive_into(store, DiskReceiver(tmp_path))  # the previous one is sound
    assert store.tensors.keys() == stored.keys()
    with pytest.raises(CheckpointError, match="found none"):
        receive_into(store, DiskReceiver(tmp_path / "elsewhere"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["aliased", "cast"])
def test_tied_weights_within_one_process(dtype: torch.dtype):
    model = tiny_model("qwen2", tie_word_embeddings=True)
    twin = ModelTwin(model, attention="eager", dtype=dtype, device=torch.device("cpu"))
    log = FingerprintLog()
    named = gathered(model.named_parameters(), bucket_bytes=10_000, dtype=dtype, log=log)
    DirectSender(Engine(twin)).send(named, log)
    assert twin.module.lm_head.weight is twin.module.model.embed_tokens.weight
    for name, parameter in model.named_parameters():
        placed = twin.module.get_parameter(name)
        assert torch.equal(placed, parameter.to(dtype))
        assert (placed.data_ptr() == parameter.data_ptr()) == (dtype == torch.float32)


def test_the_tensors_of_a_bucket_are_valid_together():
    """An engine may take all of them in one call."""
    ours, theirs = Pipe()
    tensors = odd_tensors(1)
    received: dict[str, torch.Tensor] = {}
    most = 0

    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(
            SharedMemorySender, [ours], device=torch.device("cpu"), bucket_bytes=BUCKET_BYTES
        )
        receiver = SharedMemoryReceiver(theirs, torch.device("cpu"))
        sent = pool.submit(made.result().send, tensors.items())
        for bucket in receiver.buckets():
            together = dict(bucket)
            most = max(most, len(together))
            received |= {name: tensor.clone() for name, tensor in together.items()}
        receiver.report(None)
        sent.result()

    assert most > 1
    assert received.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(received[name], tensor), name


def test_a_receiver_that_cannot_open_the_memory_says_why(monkeypatch: pytest.MonkeyPatch):
    ours, theirs = Pipe()
    monkeypatch.setattr(ipc, "recv_handle", mock.Mock(side_effect=OSError("no descriptors left")))
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(
            SharedMemorySender, [ours], device=torch.device("cpu"), bucket_bytes=BUCKET_BYTES
        )
        with pytest.raises(OSError, match="no descriptors left"):
            SharedMemoryReceiver(theirs, torch.device("cpu"))
        with pytest.raises(RolloutError, match="did not take the weights. OSError: no descriptors"):
            made.result()


def test_memory_of_a_gpu_is_opened_where_torchs_function_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
):
    """SGLang puts a function in its place that takes the parts of a handle by position alone."""
    ours, theirs = Pipe()
    opened = []

    def rebuild(*parts: Any) -> torch.Tensor:
        opened.append(parts)
        return torch.empty(2, dtype=torch.uint8)

    monkeypatch.setattr(ipc, "rebuild_cuda_tensor", rebuild)
    monkeypatch.setattr(ipc, "device_of", lambda uuid: torch.device("cuda", 3))
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    ours.send(ipc._Memory(1, gpu="the sender's", handle=("tensor", 0, "memory"), device_at=1))
    SharedMemoryReceiver(theirs, torch.device("cpu"))
    assert opened == [("tensor", 3, "memory")]
    assert ours.recv() is None


@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "breaks off"])
def test_buckets_are_filled_before_the_receivers_come(is_whole: bool):
    device = torch.device("cpu")
    ours, theirs = Pipe()
    given = {f"w{number}": torch.full((64,), float(number)) for number in range(5)}
    packed: list[str] = []
    received: dict[str, torch.Tensor] = {}
    errors: list[str] = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in given.items():
            packed.append(name)
            yield name, tensor
            if not is_whole:
                raise ValueError("no more")

    def receive() -> None:
        receiver = SharedMemoryReceiver(theirs, device)
        try:
            received.update((name, each.clone()) for name, each in receiver.tensors())
        except RolloutError as error:
            errors.append(str(error))
        receiver.report(None)

    thread = threading.Thread(target=receive)

    def connect() -> list[Any]:
        assert packed == (["w0", "w1", "w2"] if is_whole else ["w0"]), "the third has no room"
        thread.start()
        return [ours]

    sender = SharedMemorySender(connect, device=device, bucket_bytes=256)
    if is_whole:
        sender.send(tensors())
    else:
        with pytest.raises(ValueError, match="no more"):
            sender.send(tensors())
    thread.join()
    assert len(errors) == (not is_whole), "the receivers would wait forever"
    if is_whole:
        assert all(torch.equal(received[name], tensor) for name, tensor in given.items())


def test_offers_share_a_folder_of_sockets_and_make_another_one_if_it_is_gone():
    def address() -> Path:
        route = Route("host", 0, (0,), "127.0.0.1")
        device = torch.device("cpu")
        offer = Offer(
            route, device=device, bucket_bytes=256, dtype=torch.float32, folder=Path("unused")
        )
        return Path(offer.meeting.address)

    first, second = address(), address()
    assert first.parent == second.parent
    assert first != second
    assert first.parent.stat().st_mode & 0o077 == 0, "private to this user"
    remove_scratch(first.parent)
    assert address().parent not in (first.parent, second.parent)
