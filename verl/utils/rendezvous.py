"""The key-value store in which the ranks of a world find each other."""

import os
import socket
import time
from datetime import timedelta

from torch.distributed import DistNetworkError, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from verl.utils.addresses import is_loopback
from verl.utils.errors import ConfigError, WorkerLostError

LOOPBACK = "127.0.0.1"
_POLL_S = 0.05

# Stores that this process serves, by port: two worlds may follow each other at one address.
_served: dict[int, TCPStore] = {}


def env_store(timeout_s: float) -> Store:
    """Return the store at MASTER_ADDR and MASTER_PORT.

    A store that rank 0 serves at a loopback address listens only there. PyTorch's own store listens
    on every interface, and any host that reaches it may read and write.

    Raises ConfigError if rank 0 cannot listen at that address, and WorkerLostError on other ranks
    if it does not listen in time.
    """
    timeout = timedelta(seconds=timeout_s)
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    serves = os.environ["RANK"] == "0" and not by_agent
    if not serves and not by_agent:
        _wait_for_server(timeout_s)
    try:
        if serves and is_loopback(os.environ["MASTER_ADDR"]):
            store: Store = _serve(int(os.environ["MASTER_PORT"]), timeout)
        else:
            store, _, _ = next(rendezvous("env://", timeout=timeout))
    except (OSError, DistNetworkError) as error:
        if not serves:
            raise
        raise ConfigError(
            f"Rank 0 cannot listen at MASTER_ADDR={os.environ['MASTER_ADDR']}, "
            f"MASTER_PORT={os.environ['MASTER_PORT']}: {error}. Another process may have the port. "
            "Set MASTER_PORT to a free one on all ranks, or launch with torchrun --standalone, "
            "which chooses one."
        ) from error
    store.set_timeout(timeout)
    return store


def wait_for_key(store: Store, key: str, timeout_s: float) -> bytes:
    """Return the value of a key, once another rank has set it.

    Unlike `Store.get`, which waits in C++, this can be interrupted by Ctrl-C and SIGTERM. Raises
    WorkerLostError if it is not set in time.
    """
    ends_at = time.monotonic() + timeout_s
    while not store.check([key]):
        if time.monotonic() > ends_at:
            raise WorkerLostError(
                f"Rank 0 did not start within {timeout_s:g} s after this rank. Its own output says "
                "why it ended or what it waits for."
            )
        time.sleep(_POLL_S)
    return store.get(key)


def _wait_for_server(timeout_s: float) -> None:
    """Wait until rank 0 listens. PyTorch waits for it in C++, which no signal interrupts."""
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    ends_at = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host, port), timeout=timeout_s).close()
            return
        except OSError as error:
            if time.monotonic() > ends_at:
                raise WorkerLostError(
                    f"Rank 0 does not listen at MASTER_ADDR={host}, MASTER_PORT={port} after "
                    f"{timeout_s:g} s ({error}). See its own output, and set both variables alike "
                    "on all ranks."
                ) from error
        time.sleep(_POLL_S)


def loopback_settings() -> dict[str, str]:
    """Return environment variables that make gloo use the loopback interface, for one machine.

    By default gloo uses the interface that the machine's name resolves to.
    """
    names = {name for _, name in socket.if_nameindex()}
    loopback = names & {"lo", "lo0"}
    return {"GLOO_SOCKET_IFNAME": loopback.pop()} if loopback else {}


def free_port(host: str) -> int:
    """Return an unused port at an address of this machine."""
    with socket.socket() as free:
        free.bind((host, 0))
        return free.getsockname()[1]


def _serve(port: int, timeout: timedelta) -> TCPStore:
    if port not in _served:
        listener = socket.create_server((os.environ["MASTER_ADDR"], port))
        _served[port] = TCPStore(
            os.environ["MASTER_ADDR"],
            port,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,  # a worker of a user may call init_process_group() by itself
            master_listen_fd=listener.detach(),
        )
    return _served[port]
