"""Workers that tests start on real processes, and the calls that a driver makes on them."""

import ctypes
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist

from verl.protocol import DataProto
from verl.single_controller import (
    Dispatch,
    Execute,
    Worker,
    breadcrumb,
    emit,
    note_progress,
    register,
)
from verl.utils.errors import ConfigError, WorkerError


def rows(count: int, start: int = 0) -> DataProto:
    numbers = torch.arange(start, start + count)
    return DataProto.from_dict(
        tensors={"x": numbers}, non_tensors={"name": [f"row {i}" for i in numbers.tolist()]}
    )


def with_lengths(lengths: list[int], *, mask: str = "attention_mask") -> DataProto:
    batch = rows(len(lengths))
    batch.batch[mask] = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return batch


UNEVEN = with_lengths([3, 9, 1, 7, 5])


class Stamp:
    """A value that records the processes that have unpickled it."""

    def __init__(self) -> None:
        self.read_by: list[int] = []

    def __getstate__(self) -> list[int]:
        return [*self.read_by, -1]  # an empty state would not be set

    def __setstate__(self, read_by: list[int]) -> None:
        self.read_by = [*read_by[:-1], os.getpid()]


class Counter(Worker):
    """A worker that records its batches."""

    def __init__(self, number: int | None = None) -> None:
        self.number = self.rank if number is None else number
        self.seen: list[int] = []

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def double(self, batch: DataProto, *, plus: int = 0) -> DataProto:
        """Double each number."""
        self.seen.append(len(batch))
        return DataProto.from_dict(tensors={"y": batch.batch["x"] * 2 + plus})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={"number": torch.full((len(batch),), self.number)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def sample(self, batch: DataProto, n: int) -> DataProto:
        return batch.repeat(n, interleave=True)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def add(self, one: DataProto, other: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={"sum": one.batch["x"] + other.batch["x"]})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def apply(self, function: Any, batch: DataProto) -> DataProto:
        return function(batch)

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def share(self, number: int) -> int:
        return number + 100 * self.data_rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def tell(self, word: str) -> str:
        return f"{self.number}: {word}"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def give_back(self, value: Any) -> Any:
        return value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def seen_so_far(self) -> list[int]:
        return self.seen

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def tell_first(self, word: str) -> str:
        return f"{self.number}: {word}"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def tell_only_first(self, word: str) -> str:
        return f"{self.number}: {word}"

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update(self, batch: DataProto) -> dict[str, float]:
        self.seen.append(len(batch))
        return {"rows": len(batch)}

    @register()
    def each(self, word: str) -> str:
        return f"{self.number}: {word}"

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def stamp(self, batch: DataProto, fail: bool = False) -> DataProto:
        """Return twice as many rows, each with its own stamp."""
        if fail:
            raise KeyError("no stamps")
        answer = batch.select().repeat(2, interleave=True)
        answer.non_tensor_batch["stamp"] = np.array(
            [Stamp() for _ in range(len(answer))], dtype=object
        )
        return answer

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def read_stamps(self, batch: DataProto, other: DataProto | None = None) -> DataProto:
        readers = [stamp.read_by for stamp in batch.non_tensor_batch["stamp"]]
        return DataProto.from_dict(
            tensors={"x": batch.batch["x"] + (0 if other is None else other.batch["x"])},
            non_tensors={"readers": np.array([*readers, None], dtype=object)[:-1]},
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def double_later(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={"x": batch.batch["x"] * 2})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def double_aloud(
        self, batch: DataProto, pause_s: float = 0.0, until_heard: Path | None = None
    ) -> DataProto:
        """Report every number as soon as it is doubled, then wait for this rank's file in
        the folder `until_heard`."""
        for name in batch.non_tensor_batch["name"]:
            emit((name, self.rank))
            time.sleep(pause_s)
            while until_heard is not None and not (until_heard / str(self.rank)).exists():
                time.sleep(0.001)
        return self.double(batch)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def emit_and_raise(self) -> None:
        emit("before")
        raise ConfigError("after")

    def private(self) -> None: ...


class Other(Worker):
    """A second role in the same processes, with another order of shares."""

    def __init__(self, same_share_for_all: bool = False) -> None:
        self.same_share_for_all = same_share_for_all

    @property
    def data_rank(self) -> int:
        return 0 if self.same_share_for_all else self.rank

    @property
    def data_size(self) -> int:
        return 1 if self.same_share_for_all else self.world_size

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def count(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={"count": torch.full((len(batch),), len(batch))})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def process(self) -> tuple[int, str | None]:
        return os.getpid(), os.environ.get("LOCAL_RANK")


class Troubled(Worker):
    """A worker with ranks that disagree."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fine(self, word: str = "") -> tuple[int, int]:
        return self.rank, os.getpid()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def only_rank_raises(self, rank: int) -> None:
        if self.rank == rank:
            raise ConfigError(f"rank {rank} has no such key")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def one_raises_before_a_collective(self, rank: int) -> None:
        if self.rank == rank:
            raise KeyError("skipped the collective")
        self._collective()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def one_skips_a_collective(self, rank: int) -> None:
        if self.rank != rank:
            self._collective()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def is_at(self, done: int, total: int, until: Path) -> None:
        """Stay at `done` of `total` until the file `until` exists."""
        note_progress(done, total, "mini-batches")
        while not until.exists():
            time.sleep(0.001)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def one_exits_between_collectives(self, rank: int) -> None:
        self._collective()
        if self.rank == rank:
            os._exit(7)
        self._collective()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def listening_addresses(self) -> list[str]:
        self._collective()
        sockets = psutil.Process().net_connections("tcp")
        return [each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def one_gets(self, rank: int, signal_number: int) -> None:
        breadcrumb("on the way to the signal")
        if self.rank == rank:
            os.kill(os.getpid(), signal_number)
        time.sleep(60)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def cannot_be_sent(self) -> Any:
        return lambda: None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def cannot_be_pickled(self) -> Any:
        return threading.Lock()

    def _collective(self) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))


def negated(batch: DataProto) -> DataProto:
    return DataProto.from_dict(tensors={"y": -batch.batch["x"]})


# ---------------------------------------------------------------- programs of the driver


def same_answers(pool: Any) -> dict[str, Any]:
    """Return all results that must be the same for any number of ranks."""
    group = pool.start("counter", Counter)
    future = group.double_later(rows(3))

    return {
        "double": group.double(rows(5), plus=1).batch["y"].tolist(),
        "sample": list(group.sample(UNEVEN, 2).non_tensor_batch["name"]),
        "of one row": group.double(rows(1)).batch["y"].tolist(),
        "of a future": group.double(future).batch["y"].tolist(),
        "a future": future.result().batch["x"].tolist(),
        "function": group.apply(negated, rows(4)).batch["y"].tolist(),
        "first": group.tell_first("hello"),
        "large": group.double(rows(100_000)).batch["y"].sum().item(),
    }


HANDED_ON = {
    "x": [0, 0, 1, 1, 2, 2, 3, 3, 4, 4],
    "of two": [0, 0, 2, 2, 4, 4, 6, 6, 8, 8],
    "with a batch": [0, 1, 3, 4, 6, 7, 9, 10, 12, 13],
    "after": 10,
}  # returned by `handed_on`


def handed_on(one: Any, other: Any) -> dict[str, Any]:
    """Send answers of a group of `one` unread to calls on a group of `other`."""
    first = one.start("first", Counter)
    second = other.start("second", Counter)
    stamped = first.stamp(UNEVEN, blocking=False)
    answer = second.read_stamps(stamped)

    again = second.read_stamps(stamped, other=first.stamp(UNEVEN, blocking=False))
    with_a_batch = second.read_stamps(stamped, rows(10))
    failed = first.stamp(rows(4), fail=True, blocking=False)

    try:
        second.read_stamps(failed)
        message = ""
    except WorkerError as error:
        message = str(error)

    return {
        "x": answer.batch["x"].tolist(),
        "of two": again.batch["x"].tolist(),
        "with a batch": with_a_batch.batch["x"].tolist(),
        "after": len(stamped.result()),
        "read by the driver": sum(
            os.getpid() in readers for readers in answer.non_tensor_batch["readers"]
        ),
        "error": message,
    }


def heard(pool: Any, folder: Path) -> dict[str, Any]:
    """Return the reports that a driver receives during its calls.

    Each rank continues when its first report has arrived, so the calls end only if reports arrive
    while they run.
    """
    group = pool.start("counter", Counter)
    messages: list[Any] = []

    def note(value: Any) -> None:
        messages.append(value)
        (folder / str(value[1])).touch()

    assert group.double_aloud(rows(6)).batch["y"].tolist() == [0, 2, 4, 6, 8, 10], (
        "works without a listener"
    )
    answer = group.double_aloud(rows(6), until_heard=folder, on_emit=note)
    later = group.double_aloud(rows(2, start=6), on_emit=note, blocking=False).result()
    raised: list[Any] = []
    try:
        group.emit_and_raise(on_emit=raised.append)
    except (WorkerError, ConfigError) as error:
        raised.append("no such key" not in str(error) and "after" in str(error))
    return {
        "answers": answer.batch["y"].tolist() + later.batch["y"].tolist(),
        "reports": sorted(name for name, _ in messages),
        "ranks": sorted({rank for _, rank in messages}),
        "raised": raised,
        "pending": len(pool.ranks.links.pending) if hasattr(pool, "ranks") else 0,
    }


def two_roles(pool: Any) -> dict[str, Any]:
    """Check that roles of one pool share processes, and that ranks that share rows answer once."""
    group = pool.start("counter", Counter)
    other = pool.start("other", Other, same_share_for_all=True)
    return {
        "words": group.tell("hello"),
        "each": group.each(["a", "b"]),
        "share": group.share([1, 2]),
        "counted": other.count(rows(3)).batch["count"].tolist(),
        "processes": other.process(),
        "again": pool.start("second", Other).process(),
        "documentation": group.double.__doc__,
    }


def trouble(pool: Any, method: str, *args: Any) -> Any:
    return trouble_within(pool, 20.0, method, *args)


def trouble_within(pool: Any, deadline_s: float, method: str, *args: Any) -> Any:
    group = pool.start("troubled", Troubled)
    return getattr(group, method)(*args, deadline_s=deadline_s)


def one_raises_and_all_go_on(pool: Any) -> Any:
    group = pool.start("troubled", Troubled)
    errors = []
    for call in (
        lambda: group.only_rank_raises(1),
        lambda: group.only_rank_raises(0),
        group.cannot_be_sent,
    ):
        try:
            call()
        except WorkerError as error:
            errors.append((type(error).__name__, str(error), repr(error.__cause__)))
    return errors, [rank for rank, _ in group.fine()]


def interrupted_call(pool: Any) -> list[list[int]]:
    """Interrupt a call that has reached rank 1 only. Return the batches that each rank has seen."""
    group = pool.start("counter", Counter)
    local = pool.ranks.local
    submit = local.submit

    def interrupted(job: Any) -> Any:
        local.submit = submit
        os.kill(os.getpid(), signal.SIGINT)
        return submit(job)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    local.submit = interrupted
    try:
        group.update(rows(2))
    except KeyboardInterrupt:
        return group.seen_so_far()
    finally:
        signal.signal(signal.SIGINT, before)
    raise AssertionError("the call was not interrupted")


def many_calls(pool: Any) -> dict[str, list[int]]:
    """Return the growth of each rank and, last, of the driver between 100 and 500 calls of 1 MB.

    Growth is a tuple of MiB of unshared memory, open descriptors and threads.
    """
    group = pool.start("measured", Measured)
    batch = DataProto.from_dict(tensors={"x": torch.zeros(500, 500)})
    found = []
    for calls in (100, 400):
        for _ in range(calls // 4):
            group.same(batch)
            group.same(batch, blocking=False)  # the answer is never read
            group.same(group.same(batch, blocking=False))
        found.append([*group.usage(), usage()])
    before, after = found
    return {name: [b[name] - a[name] for a, b in zip(before, after)] for name in before[0]}


def assert_nothing_grew(more: dict[str, list[int]]) -> None:
    """Check the growth that `many_calls` returns."""
    assert max(more["mib"]) < 8, (
        f"four in a hundred of 400 calls' rows, of which a rank gets 0.5 MiB: {more}"
    )
    assert max(more["files"]) <= 2, more
    assert max(more["threads"]) <= 2, more


def usage() -> dict[str, int]:
    process = psutil.Process()
    # Freed memory between blocks in use comes and goes by 20 MiB, and is no leak.
    getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: 0)(0)
    mib = process.memory_full_info().uss // 2**20
    return {"mib": mib, "files": process.num_fds(), "threads": process.num_threads()}


class Measured(Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def same(self, batch: DataProto) -> DataProto:
        return batch

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def usage(self) -> dict[str, int]:
        return usage()


def killed(pool: Any, rank: int) -> Any:
    """Kill the process of one rank within a method that the others are in as well."""
    return trouble(pool, "one_gets", rank, signal.SIGKILL)


def terminated_after_a_death(pool: Any) -> None:
    """Let torchrun see a rank die while the driver is not waiting, so that it ends the driver."""
    group = pool.start("troubled", Troubled)
    os.kill(group.fine()[1][1], signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)


def progress_of_two(pool: Any, folder: Path) -> list[list[tuple[int, int, str]]]:
    """Return the progress of the ranks, as their driver sees it within a method and after it."""
    group = pool.start("troubled", Troubled)
    seen = folder / "seen"
    future = group.is_at(3, 8, seen, blocking=False)
    while not all(progress.total for progress in group.progress()):
        time.sleep(0.001)
    within = group.progress()
    seen.touch()
    future.result()
    return [within, group.progress()]


def listening(pool: Any) -> list[list[str]]:
    return pool.start("troubled", Troubled).listening_addresses()


def driver_stops(pool: Any) -> None:
    """Stop the driver; no code within the driver can notice that."""
    pool.start("troubled", Troubled)
    os.kill(os.getpid(), signal.SIGSTOP)


def stopped(pool: Any, rank: int, deadline_s: float) -> Any:
    return trouble_within(pool, deadline_s, "one_gets", rank, signal.SIGSTOP)
