"""A rank's side of backend `spmd`: find the processes of torchrun, and serve the driver's calls."""

import json
import os
import queue
import signal
import sys
import threading
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, Store

from verl.single_controller.breadcrumbs import format_stacks, keep_breadcrumbs, read_breadcrumbs
from verl.single_controller.driver_watch import Pulse, exit_after_driver, watch_driver
from verl.single_controller.host import Host
from verl.single_controller.links import Door, Entrance, Peers, answer, connect, read_token
from verl.single_controller.wire import Kind, Link
from verl.utils.errors import WorkerLostError
from verl.utils.logging import logger
from verl.utils.rendezvous import env_store, loopback_settings, wait_for_key
from verl.utils.scratch import hold_scratch, remove_scratch
from verl.utils.sigterm import handle_sigterm

# Time after SIGTERM for the driver to end this rank. torchrun kills all ranks after 30 s.
_TERM_GRACE_S = 25.0


def _store(world_size: int, timeout_s: float) -> PrefixStore:
    if _on_one_machine(world_size):
        for name, value in loopback_settings().items():
            os.environ.setdefault(name, value)
    return PrefixStore("verl/single_controller", env_store(timeout_s))


def _on_one_machine(world_size: int) -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE", "") == str(world_size)


# ---------------------------------------------------------------- the driver's side


def connect_all(world_size: int, timeout_s: float) -> tuple[Peers, Path]:
    """Wait for all other ranks; return them and the folder of the notes."""
    store = _store(world_size, timeout_s)
    door = Door(world_size, other_machines=not _on_one_machine(world_size))
    if door.port:
        # Any host that reaches the store can read it. Ranks of this machine read a file instead.
        store.set("port", str(door.port))
        store.set("token", door.token)
        store.set("arguments", json.dumps([_digest(argument) for argument in sys.argv[1:]]))

    store.set("folder", door.folder)
    peers: Peers = {}
    ends_at = time.monotonic() + timeout_s

    while len(peers) < world_size - 1 and time.monotonic() < ends_at:
        peers |= door.admit()

    door.close()
    missing = sorted(set(range(1, world_size)) - set(peers))
    if missing:
        remove_scratch(Path(door.folder))
        raise WorkerLostError(
            f"Ranks {missing} of {world_size} did not connect within {timeout_s:g} s."
        )
    return peers, Path(door.folder)


# ---------------------------------------------------------------- the side of the other ranks


def serve(rank: int, world_size: int, connect_timeout_s: float, silence_s: float) -> None:
    """Run the driver's calls on the main thread until the driver ends this rank.

    After `silence_s` seconds without a sign of life, the driver and this rank are ended.
    """
    entrance = _find_entrance(world_size, connect_timeout_s)
    folder = Path(entrance.folder)
    hold_scratch(folder)
    keep_breadcrumbs(folder, rank)
    link = connect(entrance, rank, connect_timeout_s)
    pulse = watch_driver(link, rank, silence_s, folder)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the driver decides
    handle_sigterm(_leave_later)
    calls: queue.SimpleQueue = queue.SimpleQueue()

    threading.Thread(
        target=_watch, args=(link, calls, folder, rank, pulse), name="verl-watch", daemon=True
    ).start()
    host = Host()
    while True:
        message = calls.get()
        if message.kind is Kind.END:
            link.send(Kind.BYE, message.number, None)
            if not link.same_machine:
                remove_scratch(folder)
            return
        answer(link, host, message)
        del message  # it holds the memory of the batch


def _find_entrance(world_size: int, timeout_s: float) -> Entrance:
    store = _store(world_size, timeout_s)
    folder = wait_for_key(store, "folder", timeout_s).decode()  # set after all others
    if _on_one_machine(world_size):
        return Entrance(folder, "", 0, read_token(Path(folder)))
    port = int(store.get("port"))
    token = store.get("token").decode()
    if os.environ.get("LOCAL_RANK", "0") == "0":  # once a machine
        _warn_of_other_arguments(store)
    return Entrance(folder, os.environ["MASTER_ADDR"], port, token)


def _warn_of_other_arguments(store: Store) -> None:
    """Log where the command of this machine has other arguments than that of rank 0."""
    of_driver = set(json.loads(store.get("arguments")))
    arguments = {_digest(argument): argument.partition("=")[0] for argument in sys.argv[1:]}
    only_here = sorted(arguments[digest] for digest in arguments.keys() - of_driver)
    num_missing = len(of_driver - arguments.keys())
    if only_here or num_missing:
        logger.warning(
            "This machine was started with other arguments than rank 0, whose configuration is "
            "used on all. Given only here: %s; given to rank 0 alone: %d. Use the same command on "
            "every machine.",
            ", ".join(only_here) or "none",
            num_missing,
        )


def _digest(argument: str) -> str:
    """Return a digest of an argument: any host that reaches the store can read it."""
    return sha256(argument.encode()).hexdigest()


def _watch(link: Link, calls: queue.SimpleQueue, folder: Path, rank: int, pulse: Pulse) -> None:
    """Receive messages, and report stacks while the main thread is busy. Ends with the driver."""
    while True:
        try:
            message = link.receive()
        except (OSError, EOFError):
            # The main thread may wait in a collective that no other rank joins.
            exit_after_driver(rank, folder)
            return

        if message.kind is Kind.ABORT:
            sys.stdout.flush()
            os._exit(1)

        if message.kind is Kind.ALIVE:
            pulse.alive.set()
            continue

        if message.kind is Kind.ASK_STACKS:
            link.send(Kind.STACKS, message.number, (format_stacks(), read_breadcrumbs(folder)))
            continue

        if message.kind is Kind.END:
            pulse.leaving.set()
        calls.put(message)
        if message.kind is Kind.END:
            return
        del message


def _leave_later(signum: int, frame: Any) -> None:
    """Delay the end of this process after SIGTERM.

    torchrun ends all ranks when one dies, or when it gets the signal itself. The driver first asks
    this rank for its stacks, or finishes a checkpoint with it, and then ends it.
    """
    leave = threading.Timer(_TERM_GRACE_S, os._exit, (128 + signum,))
    leave.daemon = True
    leave.start()
