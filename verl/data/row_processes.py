"""Processes that read rows of a data set while the driver trains."""

import gc
import logging
import os
import pickle
import socket
import subprocess
import sys
import traceback
import weakref
from collections import deque
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

import numpy as np

from verl.data.own_rows import Items, origin_of, read_rows
from verl.data.pictures import KEPT_BYTES, PictureReader
from verl.data.rl_dataset import RLDataset
from verl.single_controller.host import Raised
from verl.single_controller.wire import Incoming, Kind, Link, Outgoing
from verl.utils.children import (
    code_to_run,
    describe_end,
    end_with_parent,
    kill_session,
    our_environment,
    start,
    take_connection,
)
from verl.utils.errors import (
    ConfigError,
    DataError,
    RemoteTraceback,
    WorkerLostError,
    describe_error,
)
from verl.utils.imports import file_of_user, load_module
from verl.utils.logging import logger
from verl.utils.seeding import seed_everything


class Draw(NamedTuple):
    """The rows of a batch, and its place in the order of all batches."""

    epoch: int
    taken: int  # rows of the epoch before these
    rows: list[int]


class _First(NamedTuple):
    """Everything that a process needs before it can unpickle the data set."""

    path: list[str]  # `sys.path` of the driver
    files: list[str]  # of users, with the class of the data set and its bases
    count: int
    key: str


class _Started(NamedTuple):
    """The session of the processes, and a connection to each."""

    leader: "subprocess.Popen[bytes]"
    control: socket.socket
    links: list[Link]
    owner: int  # the process that has started them; a fork of it has a copy


class RowProcesses:
    """Processes that read rows and prepare their pictures, each an equal share of every batch.

    They start with the first batch: a fresh program unpickles the data set, and is forked. It has
    no threads and no CUDA context, which would not survive that, and it does not import the user's
    program. Ctrl-C does not reach them, and they end with this process, however that ends.

    Args:
        dataset: pickled at once.
        count: number of processes.
        seed: of random numbers that a user's data set draws.
        key: the configuration key that asks for the processes, for errors.

    Raises:
        ConfigError: the data set cannot be pickled.
    """

    def __init__(self, dataset: Any, count: int, *, seed: int, key: str) -> None:
        self.count = count
        self._seed = seed
        self._key = f"{key}={count}"
        self._packed = _pack(dataset, self._key)
        self._first = _First(sys.path, _files_of(dataset), count, self._key)

        self._pictures = _reader_of(dataset)
        self._asked: deque[Draw] = deque()
        self._started: list[_Started] = []  # one, or none
        weakref.finalize(self, _end, self._started)  # at exit too

    def items(self, draw: Draw, ahead: Draw | None) -> Items:
        """Return the items of a batch, and begin with those of the batch `ahead`.

        Raises the error of a row as the data set does.
        """
        if self._asked and self._asked[0] != draw:
            self.close()  # the loader has moved: to the position of a checkpoint, for example

        try:
            if not self._started:
                self._start()
            if not self._asked:
                self._ask(draw)
            if ahead is not None:
                self._ask(ahead)  # before the wait for `draw`, so that no process is idle
            return self._receive(self._asked.popleft())
        except BaseException:
            self.close()  # answers that nothing has read are still in the connections
            raise

    def close(self) -> None:
        """End the processes. The next batch starts others."""
        self._asked.clear()
        _end(self._started)

    def _start(self) -> None:
        command = [sys.executable, "-c", code_to_run(__name__)]
        pairs = [socket.socketpair() for _ in range(self.count)]
        try:
            # OpenMP's threads are those of torch and NumPy.
            leader, control = start(command, our_environment(OMP_NUM_THREADS="1"))
        except OSError as error:
            raise DataError(
                f"{self._key}: no process could be started ({error}). Raise the limit on processes "
                "and memory (ulimit -u, the container's pids limit)."
            ) from error

        links = [Link(ours) for ours, _ in pairs]
        self._started.append(_Started(leader, control, links, os.getpid()))
        try:
            to_leader = Link(control)
            to_leader.send(Kind.CALL, 0, self._first)
            for _, theirs in pairs:
                socket.send_fds(control, [b"s"], [theirs.fileno()])
                theirs.close()
            to_leader.send(Kind.CALL, 0, self._packed)
        except ConnectionError as error:
            raise self._lost() from error

    def _ask(self, draw: Draw) -> None:
        self._asked.append(draw)
        shares = np.array_split(draw.rows, self.count)
        for number, (link, share) in enumerate(zip(self._readers_of(draw), shares)):
            place = [self._seed, draw.epoch, draw.taken, number]
            seed = int(np.random.SeedSequence(place).generate_state(1)[0])
            try:
                link.send(Kind.CALL, 0, (seed, share.tolist()))
            except ConnectionError as error:
                raise self._lost() from error

    def _receive(self, draw: Draw) -> Items:
        items: Items = []
        # The shares are consecutive rows, so the first error is that of the first bad row.
        for link in self._readers_of(draw):
            message = self._answer(link)
            if message.kind == Kind.RAISED:
                self._raise(*message.value())
            items += message.value()

        if self._pictures is not None:
            for item in items:
                prepared = item.get("prepared_pictures") or ()
                if prepared:
                    item["prepared_pictures"] = tuple(map(self._pictures.share, prepared))
        return items

    def _readers_of(self, draw: Draw) -> list[Link]:
        """Return the processes that read a row of a batch."""
        return self._started[0].links[: len(draw.rows)]

    def _answer(self, link: Link) -> Incoming:
        try:
            return link.receive()
        except (EOFError, ConnectionError) as error:
            raise self._lost() from error

    def _raise(self, raised: Raised, cause: Raised | None) -> NoReturn:
        there = RemoteTraceback(raised.traceback)
        if raised.error is None:
            raise DataError(f"{self._key}: a process raised {raised.summary}") from there
        if cause is None:
            raise raised.error

        if cause.error is None:
            raise raised.error from there
        cause.error.__cause__ = there
        raise raised.error from cause.error

    def _lost(self) -> WorkerLostError:
        end = describe_end(self._started[0].leader.wait())  # it ends as its forks do
        return WorkerLostError(
            f"{self._key}: a process that reads rows {end}. Its own messages are above. Ask for "
            "fewer processes; 0 reads rows in the driver."
        )


def main() -> None:
    """Fork processes that read rows until the driver closes their connections, or is killed."""
    control = socket.socket(fileno=take_connection())
    link = Link(control)
    try:
        first = link.receive().value()
        sockets = [socket.socket(fileno=_descriptor(control)) for _ in range(first.count)]
        packed = link.receive()
    except (EOFError, ConnectionError):
        return  # the driver is gone

    sys.path[:] = first.path
    dataset = _unpack(packed, first)
    gc.freeze()  # so that the forks share the memory of modules and rows
    for own in sockets:
        if os.fork() == 0:
            _run(own, sockets, dataset, first.key)
        own.close()

    end_with_parent(control.fileno())
    _, status = os.wait()
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        os.kill(os.getpid(), -code)
    sys.exit(code)


def _descriptor(control: socket.socket) -> int:
    _, (descriptor,), _, _ = socket.recv_fds(control, 1, 1)
    return descriptor


def _run(own: socket.socket, sockets: list[socket.socket], dataset: Any, key: str) -> None:
    """Answer requests in a fork, which never returns."""
    code = 1
    try:
        for other in sockets:
            if other is not own:
                other.close()  # the driver notices the end of a process when nothing else has it
        if own is not sockets[0]:
            logger.setLevel(logging.ERROR)  # one process logs for all
        end_with_parent(own.fileno())
        with suppress(EOFError, ConnectionError):  # the driver is gone
            _serve(Link(own), dataset, key)
        code = 0
    except BaseException:  # noqa: BLE001 - nothing above would show it
        traceback.print_exc()
    finally:
        os._exit(code)


def _serve(link: Link, dataset: Any, key: str) -> None:
    while True:
        seed, rows = link.receive().value()
        try:
            if isinstance(dataset, ConfigError):
                raise dataset
            seed_everything(seed)
            items = _pack_items(read_rows(dataset, rows), key)
        except Exception as error:  # noqa: BLE001 - a process border: the driver raises it
            _refuse(link, error)
            return
        link.send(Kind.RESULT, 0, items)
        del items  # its pictures are not needed while this process waits


def _refuse(link: Link, error: Exception) -> None:
    """Send an error with its cause, and wait for the end.

    The driver may first ask for another batch.
    """
    cause = None if error.__cause__ is None else Raised.from_error(error.__cause__)
    link.send(Kind.RAISED, 0, (Raised.from_error(error), cause))
    while True:
        link.receive()


def _pack_items(items: Items, key: str) -> Outgoing:
    try:
        return Outgoing(items)
    except Exception as error:  # a user's class may raise anything
        raise DataError(
            f"{key} reads rows in processes, from which an item of the data set cannot be sent "
            f"({describe_error(error)}). Return numbers, texts, tensors, and lists and dicts of "
            "them; or set the key to 0, which reads rows in the driver."
        ) from error


def _unpack(packed: Incoming, first: _First) -> Any:
    """Return the data set, or the error that the processes raise."""
    try:
        for file in first.files:
            load_module(file)
        dataset = packed.value()
    except Exception as error:  # noqa: BLE001 - a user's class may raise anything
        return ConfigError(_cannot_send("this data set", first.key, error))

    if isinstance(dataset, RLDataset):
        dataset.num_threads = 1
    pictures = _reader_of(dataset)
    if pictures is not None:
        pictures.most_bytes = KEPT_BYTES // first.count
    return dataset


def _reader_of(dataset: Any) -> PictureReader | None:
    """Return the reader of pictures of a data set, which may be a user's; None without one."""
    pictures = getattr(origin_of(dataset), "pictures", None)
    return pictures if isinstance(pictures, PictureReader) else None


def _pack(dataset: Any, key: str) -> Outgoing:
    kind = type(origin_of(dataset))
    try:
        if kind.__module__ == "__main__":
            raise pickle.PicklingError(
                "its class is defined in the script that was started, which a process does not "
                "import"
            )
        return Outgoing(dataset)
    except Exception as error:  # a user's class may raise anything
        raise ConfigError(_cannot_send(f"the data set {kind.__name__}", key, error)) from error


def _cannot_send(what: str, key: str, error: Exception) -> str:
    return (
        f"{key} reads rows in processes, to which {what} cannot be sent "
        f"({describe_error(error)}). Define its class at the top level of a file of its own "
        "(data.custom_cls.path) or of a module, and open files and connections when the first row "
        "is read; or set the key to 0, which reads rows in the driver."
    )


def _files_of(dataset: Any) -> list[str]:
    """Return the files of users that define the class of a data set and its bases."""
    classes = type(origin_of(dataset)).__mro__
    names = dict.fromkeys(kind.__module__ for kind in reversed(classes))
    return [file for name in names if (file := file_of_user(name))]


def _end(started: list[_Started]) -> None:
    for leader, control, links, owner in started:
        control.close()
        for link in links:
            link.close()
        if owner == os.getpid() and leader.poll() is None:
            kill_session(leader.pid)
            leader.wait()
    started.clear()
