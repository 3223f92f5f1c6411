"""The locations of sender and receiver determine the transport and the sender."""

import logging

import pytest
import torch

from verl.utils.errors import RolloutError
from verl.weight_sync import Endpoint, Route, plan_routes
from verl.weight_sync import choice as choice_module
from verl.weight_sync.choice import choose_transport

TRAINER = Endpoint("a", 1, "GPU-1", unreachable_gpus=("GPU-9",))


@pytest.mark.parametrize(
    ("receiver", "transport", "reason"),
    [
        (Endpoint("a", 1, "GPU-1"), "direct", "both are in one process"),
        (Endpoint("a", 2, "GPU-1"), "ipc", "two processes on one GPU, GPU-1"),
        (Endpoint("a", 2, "GPU-2"), "broadcast", "two GPUs of one machine"),
        (Endpoint("a", 2, "GPU-9"), "host", "without peer access"),
        (Endpoint("a", 2), "host", "not both on a GPU"),
        (Endpoint("b", 1, "GPU-1"), "broadcast", "they are on two machines"),
    ],
)
def test_the_locations_determine_the_transport(receiver: Endpoint, transport: str, reason: str):
    chosen, because = choose_transport(TRAINER, receiver)
    assert chosen == transport
    assert reason in because


def test_this_process_has_one_location():
    cpu = torch.device("cpu")
    assert Endpoint.here(cpu) == Endpoint.here(cpu)
    assert choose_transport(Endpoint.here(cpu), Endpoint.here(cpu))[0] == "direct"


def test_receivers_are_spread_over_the_senders_of_their_machine(caplog):
    senders = [Endpoint("a", 1), Endpoint("a", 2)]
    receivers = [Endpoint("a", process) for process in (3, 4, 5)]
    with caplog.at_level(logging.INFO, logger="verl"):
        routes = plan_routes(senders, receivers)
    assert routes == [
        Route("host", 0, (0, 2), "127.0.0.1"),
        Route("host", 1, (1,), "127.0.0.1"),
    ]
    [line] = caplog.messages
    assert "by host: two processes of one machine" in line


def test_one_broadcast_reaches_all_other_machines():
    senders = [Endpoint("a", 1, host="first"), Endpoint("a", 2, host="first")]
    receivers = [Endpoint("a", 3), Endpoint("b", 1), Endpoint("c", 1)]
    assert plan_routes(senders, receivers) == [
        Route("host", 0, (0,), "127.0.0.1"),
        Route("broadcast", 0, (1, 2), "first"),
    ]


def test_a_receiver_on_a_senders_gpu_is_served_by_that_sender():
    senders = [Endpoint("a", 1, "GPU-1"), Endpoint("a", 2, "GPU-2")]
    [route] = plan_routes(senders, [Endpoint("a", 3, "GPU-2")])
    assert route == Route("ipc", 1, (0,), "127.0.0.1")


def test_the_user_can_choose_the_transport():
    [route] = plan_routes([Endpoint("a", 1)], [Endpoint("a", 2)], "disk")
    assert route.transport == "disk"


def test_a_gpu_is_identified_by_its_uuid(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(choice_module, "gpu_uuid", lambda device: ["GPU-2", "GPU-1"][device.index])
    assert choice_module.device_of("GPU-1") == torch.device("cuda", 1)
    with pytest.raises(RolloutError, match="GPU-3, and this process sees GPU-2, GPU-1"):
        choice_module.device_of("GPU-3")
