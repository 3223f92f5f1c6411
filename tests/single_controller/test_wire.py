"""Sent values arrive unchanged, belong to the receiver, and leave nothing behind."""

import os
import resource
import socket
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings

from tests.protocol.batches import as_rows, batches
from verl.protocol import DataProto
from verl.single_controller.wire import Kind, Link, Outgoing


def connected(family: str) -> tuple[Link, Link]:
    """Return two ends: "memory" as on one machine, "stream" as between two machines."""
    if family == "memory":
        one, other = socket.socketpair()
        return Link(one), Link(other)
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        return Link(one), Link(server.accept()[0])


@pytest.fixture(params=["memory", "stream"])
def ends(request):
    pair = connected(request.param)
    yield pair
    for end in pair:
        end.close()


@settings(max_examples=20)
@given(batch=batches)
@pytest.mark.parametrize("family", ["memory", "stream"])
def test_batches_arrive_unchanged(family, batch):
    one, other = connected(family)
    one.send(Kind.CALL, 7, ("role", batch, {"word": None}))
    message = other.receive()
    role, again, words = message.value()
    assert (message.kind, message.number, role, words) == (Kind.CALL, 7, "role", {"word": None})
    assert as_rows(again) == as_rows(batch)
    one.close()
    other.close()


def test_large_values_belong_to_the_receiver(ends):
    one, other = ends
    column = torch.arange(20_000)
    value = {
        "batch": DataProto.from_dict(tensors={"x": column}),
        "tensor": column[3:],
        "array": np.ones(30_001, "u1"),
    }
    message = Outgoing(value)  # once, to two receivers

    one.send(Kind.CALL, 1, message)
    first = other.receive().value()
    one.send(Kind.CALL, 2, message)
    second = other.receive().value()
    first["batch"].batch["x"].zero_()
    first["tensor"] += 1
    for tensor in (first["batch"].batch["x"], first["tensor"]):
        assert tensor.data_ptr() % 64 == 0, "aligned as torch's own memory"

    assert column.equal(torch.arange(20_000)), "the sender's memory is its own"
    assert second["batch"].batch["x"].equal(column)
    assert second["tensor"].equal(column[3:])
    assert second["array"].sum() == 30_001


def test_a_large_value_goes_through_memory_and_not_through_the_socket():
    one, other = connected("memory")
    one.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    # without a reader, the socket would block here
    one.send(Kind.CALL, 1, torch.ones(1_000_000))
    assert other.receive().value().sum() == 1_000_000


def test_values_too_large_for_files_go_through_the_socket():
    one, other = connected("memory")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        with ThreadPoolExecutor(1) as reader:
            received = reader.submit(other.receive)
            one.send(Kind.CALL, 1, torch.ones(1_000_000))
            assert received.result().value().sum() == 1_000_000
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_no_file_is_left_behind(ends):
    one, other = ends
    before = psutil.Process().num_fds()
    for number in range(20):
        one.send(Kind.CALL, number, torch.ones(10_000))
        assert other.receive().value().sum() == 10_000
    assert psutil.Process().num_fds() == before


def test_a_closed_connection_is_noticed(ends):
    one, other = ends
    child = os.fork()  # a copy of the socket in a child must not keep the connection open
    if child == 0:
        os.read(other.socket.fileno(), 1) if other.socket.fileno() >= 0 else None
        os._exit(0)
    one.close()
    with pytest.raises((EOFError, OSError)):
        other.receive()
    os.waitpid(child, 0)
