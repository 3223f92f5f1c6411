"""The store in which ranks meet."""

import os
import signal
import socket
import threading
import time

import pytest
from torch.distributed import TCPStore

from verl.utils.errors import ConfigError, WorkerLostError
from verl.utils.rendezvous import env_store, free_port, wait_for_key


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_taken_port_is_named(monkeypatch, host):
    with socket.create_server((host, 0)) as taken:
        port = str(taken.getsockname()[1])
        values = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": host, "MASTER_PORT": port}
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        with pytest.raises(ConfigError, match=f"MASTER_PORT={port}.*in use.*--standalone"):
            env_store(5)


@pytest.mark.parametrize("waits_for", ["a key of the launcher's store", "rank 0"])
def test_ctrl_c_ends_a_rank_that_waits_for_the_driver(monkeypatch, waits_for: str):
    """torchrun ended such a rank after 30 s: rank 0 had been interrupted before they met."""
    by_agent = waits_for != "rank 0"
    port = free_port("127.0.0.1")
    values = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(by_agent))
    server = TCPStore("127.0.0.1", port, is_master=True) if by_agent else None

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    ctrl_c = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    started = time.monotonic()
    ctrl_c.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            wait_for_key(env_store(20.0), "folder", 20.0)
    finally:
        ctrl_c.join()
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - started < 10
    del server


def test_a_rank_whose_driver_does_not_come_says_so(monkeypatch):
    port = str(free_port("127.0.0.1"))
    values = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(WorkerLostError, match=f"Rank 0 does not listen .*MASTER_PORT={port}"):
        env_store(0.1)
