"""The store in which ranks meet."""

import socket

import pytest

from verl.utils.errors import ConfigError
from verl.utils.rendezvous import env_store


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
