"""The transport follows from facts, and the log says which and why."""

import logging

import pytest
import torch

from verl.utils.errors import RolloutError
from verl.weight_sync import Endpoint, Link, choose_transport
from verl.weight_sync import choice as choice_module

TRAINER = Endpoint("a", 1, "GPU-1")
ALL = Link(process_group=True)
ALONE = Link(process_group=False)


@pytest.mark.parametrize(
    ("receiver", "link", "transport", "reason"),
    [
        (Endpoint("a", 1, "GPU-1"), ALL, "direct", "both are in one process"),
        (Endpoint("a", 2, "GPU-1"), ALL, "ipc", "two processes on one GPU, GPU-1"),
        (Endpoint("a", 2, "GPU-1"), Link(True, connection=False), "disk", "without a connection"),
        (
            Endpoint("a", 2, "GPU-2"),
            ALL,
            "broadcast",
            "two GPUs of one machine that reach each other",
        ),
        (Endpoint("a", 2, "GPU-2"), Link(True, peer_access=False), "host", "without peer access"),
        (Endpoint("a", 2, "GPU-2"), ALONE, "host", "without a process group"),
        (Endpoint("a", 2), ALL, "host", "not both on a GPU"),
        (Endpoint("a", 2), Link(True, connection=False), "broadcast", "without a connection"),
        (
            Endpoint("b", 2, "GPU-2"),
            ALL,
            "broadcast",
            "on two machines, and ranks of one process group",
        ),
        (Endpoint("b", 1, "GPU-1"), ALONE, "disk", "share no process group"),
        (Endpoint("a", 2, "GPU-2"), Link(False, connection=False), "disk", "or a process group"),
    ],
)
def test_the_transport_follows_from_facts(
    caplog, receiver: Endpoint, link: Link, transport: str, reason: str
):
    with caplog.at_level(logging.INFO, logger="verl"):
        assert choose_transport(TRAINER, receiver, link) == transport
    [line] = caplog.messages
    assert f"by {transport}: " in line
    assert reason in line


def test_this_process_is_in_one_place():
    cpu = torch.device("cpu")
    assert Endpoint.here(cpu) == Endpoint.here(cpu)
    assert choose_transport(Endpoint.here(cpu), Endpoint.here(cpu), ALONE) == "direct"


def test_a_gpu_is_found_by_its_uuid(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(choice_module, "gpu_uuid", lambda device: ["GPU-2", "GPU-1"][device.index])
    assert choice_module.device_of("GPU-1") == torch.device("cuda", 1)
    with pytest.raises(RolloutError, match="GPU-3, and this process sees GPU-2, GPU-1"):
        choice_module.device_of("GPU-3")
