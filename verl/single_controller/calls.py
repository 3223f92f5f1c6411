"""Wait for a call on several ranks, and report ranks that raise, die or are late."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from verl.single_controller.breadcrumbs import Progress
from verl.single_controller.host import OnEmit, Raised
from verl.single_controller.shares import Arguments
from verl.utils.errors import DeadlineError, WorkerError, WorkerLostError
from verl.utils.timeline import note_span

if TYPE_CHECKING:
    from verl.single_controller.data_future import DataProtoFuture

# Time for the other ranks to end after one has raised. A rank that still runs then waits in a
# collective that the first one will never reach.
GRACE_S = 5.0
# A healthy process answers from a thread of its own in milliseconds; one that starts up or swaps
# may take longer.
ANSWER_S = 3.0
# Time before the deadline for ending all processes, so that the error is raised by then.
REPORT_S = 1.0

WHY_DEAD = (
    "A rank that dies without an error of its own was killed, or its machine is gone; on that "
    "machine `dmesg | grep -i kill` shows whether it was killed for memory."
)


@dataclass(frozen=True)
class Lost:
    """End of a call on a rank that lost its process."""

    reason: str


Ends = dict[int, Raised | Lost | None]  # how the calls on some ranks ended; None: well


class Ranks(Protocol):
    """The processes of a backend, numbered from 0, which run the workers of one or more roles."""

    size: int
    hands_on_unfinished: bool  # whether `hand_on` takes replies to calls that are still running

    def submit(
        self,
        role: str,
        method: str,
        arguments: Mapping[int, Arguments],
        blocking: bool = True,
        on_emit: OnEmit = None,
    ) -> dict[int, Any]:
        """Start a method on some ranks; return replies for `wait` and `values`.

        Calls on a rank run in their order.

        Args:
            blocking: whether the caller waits at once, so that a worker in its own process may run
                before this returns.
            on_emit: receives the values of `emit`, in threads that must not be blocked.
        """
        ...

    def hand_on(self, replies: Sequence[Any], receiver: "Ranks") -> list[Any] | None:
        """Return stand-ins for the values of replies, as arguments of calls on `receiver`.

        The driver then need not read the values. Returns None where it must.
        """
        ...

    def wait(self, replies: Mapping[int, Any], timeout_s: float) -> Ends:
        """Return how the calls ended that have ended; None stands for success.

        Returns when all have ended, when one has failed, or when the time is over.
        """
        ...

    def values(self, replies: Sequence[Any]) -> list[Any]:
        """Return the answers of successful calls. Only this brings them to the driver."""
        ...

    def describe(self, rank: int) -> str:
        """Return the machine and process of a rank."""
        ...

    def stacks(self, timeout_s: float) -> dict[int, str]:
        """Return the stacks of all ranks that answer in time, also while a method runs there."""
        ...

    def breadcrumbs(self) -> dict[int, str]:
        """Return the last note of every rank. Call `stacks` before."""
        ...

    def progress(self) -> list[Progress]:
        """Return the progress of ranks that keep their notes on the driver's machine."""
        ...

    def abort(self, reason: str) -> None:
        """End all processes at once; every later call is a WorkerLostError with this reason."""
        ...


Answer = TypeVar("Answer")


class GroupFuture(Generic[Answer]):
    """Future answer of a group. `result()` waits for it, at most until the call's deadline.

    `get()` is another name of it. `ray.get` takes references of Ray alone, and refuses this; it
    takes a `ReferenceFuture`.
    """

    def __init__(
        self,
        ranks: Ranks,
        label: str,
        replies: dict[int, Any],
        answering: Sequence[int],
        collect: Callable[[list[Any]], Answer],
        deadline_s: float,
        dealt: tuple[Any] | None = None,
    ) -> None:
        self.ranks = ranks
        self.label = label
        self._replies = replies
        self._answering = answering
        self._collect = collect
        self._dealt = dealt
        self._started_ns = time.monotonic_ns()
        self._deadline_s = deadline_s
        # A short deadline keeps most of its time for the call.
        self._ends_at = time.monotonic() + deadline_s - min(REPORT_S, deadline_s / 10)
        self._asks_at = self._ends_at - min(ANSWER_S, deadline_s / 4)
        self._value: Any = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Return whether `result()` would return or raise at once."""
        ended = self.ranks.wait(self._replies, 0.0) if self._replies else {}
        return len(ended) == len(self._replies) or any_failed(ended)

    def result(self) -> Answer:
        """Wait for the answers and return them collected.

        Raises WorkerError if a rank raised, WorkerLostError if one died, DeadlineError if one is
        late. Unless every rank has returned from the call, all processes of the group are ended
        first.
        """
        if self._replies and self._error is None:
            try:
                self._wait()
                values = self.ranks.values([self._replies[rank] for rank in self._answering])
                self._value = self._collect(values)
            except Exception as error:  # noqa: BLE001 - kept for every later call of `result`
                self._error = error
            self._replies = {}  # and with them the memory of the answers
            note_span(self.label, "calls", self._started_ns, overlaps=True)
        if self._error is not None:
            raise self._error
        return self._value

    get = result

    def chunk(self, chunks: int) -> "list[DataProtoFuture]":
        """Return a future for each of the `chunks` parts that `DataProto.chunk` will cut."""
        # This module comes first, because a DataProtoFuture may consist of GroupFutures.
        from verl.single_controller.data_future import DataProtoFuture

        return DataProtoFuture.concat([self]).chunk(chunks)

    def handed_on(self, receiver: Ranks) -> tuple[list[Any], Any] | None:
        """Return a stand-in for each share's answer, and the data that undoes the dealing of rows.

        The stand-ins are arguments of a call on `receiver`. Returns None if the answer must be read
        and dealt again.
        """
        if self._dealt is None or not self._replies or self._error is not None:
            return None
        if not self.ranks.hands_on_unfinished:
            try:
                self._wait()
            except Exception as error:
                self._error = error  # for every later call of `result`
                raise
        shares = self.ranks.hand_on([self._replies[rank] for rank in self._answering], receiver)
        return None if shares is None else (shares, *self._dealt)

    def __getattr__(self, name: str) -> Any:
        # This is reached only for unknown names, mostly those of the answer.
        label = vars(self).get("label", "a call")
        raise AttributeError(
            f"The future of {label} has no '{name}'. Call its get() first, which waits for the "
            "answer and returns it; ray.get does not take it.",
            name=name,
            obj=self,
        )

    def __reduce__(self) -> Any:
        raise TypeError(
            f"The future of {self.label} cannot leave the driver's process. Give its result(), or "
            "register the method that takes it with materialize_futures=True."
        )

    def _wait(self) -> None:
        ended = self._wait_until(self._asks_at, self._replies)
        stacks: dict[int, str] | None = None
        if len(ended) < len(self._replies) and not any_failed(ended):
            # Ask before the deadline, because it takes ANSWER_S to find that a stuck rank does not
            # answer. The call may still succeed in that time.
            stacks = self.ranks.stacks(ANSWER_S)
            left = {rank: reply for rank, reply in self._replies.items() if rank not in ended}
            ended |= self._wait_until(self._ends_at, left)

        if any(isinstance(end, Raised) for end in ended.values()):
            ended = self._wait_for_the_others()
        lost: dict[int, Lost] = {}
        raised: dict[int, Raised] = {}
        # By rank, not by time: every run of the same faults reports the same one first.
        for rank, end in sorted(ended.items()):
            if isinstance(end, Lost):
                lost[rank] = end
            elif isinstance(end, Raised):
                raised[rank] = end
        late = [rank for rank in self._replies if rank not in ended]

        if lost:
            # Deaths come first, also if others raised: a broken collective is a result of a death.
            self._fail(WorkerLostError, self._describe_deaths(lost, raised), lost)
        if raised:
            cause = next(iter(raised.values())).error
            self._fail(WorkerError, self._describe_errors(raised), late, cause)
        if late:
            assert stacks is not None
            self._fail(DeadlineError, self._describe_late(late, stacks), late, stacks=stacks)

    def _wait_until(self, ends_at: float, replies: Mapping[int, Any]) -> Ends:
        return self.ranks.wait(replies, max(ends_at - time.monotonic(), 0.001))

    def _wait_for_the_others(self) -> Ends:
        """Give the other ranks GRACE_S to end: most raise as well, or are done."""
        ends_at = min(self._ends_at, time.monotonic() + GRACE_S)
        waiting = dict(self._replies)
        ended = {}
        while waiting:
            just_ended = self._wait_until(ends_at, waiting)
            ended |= just_ended
            for rank in just_ended:
                waiting.pop(rank, None)
            if time.monotonic() >= ends_at:
                break
        return ended

    def _describe_deaths(self, lost: dict[int, Lost], raised: dict[int, Raised]) -> str:
        headline = f"{self.label}: {'; '.join(describe_deaths(self.ranks, lost))}"
        if not raised:
            return headline
        return f"{headline}\nAlso: {self._describe_errors(raised)}"

    def _describe_late(self, late: list[int], stacks: dict[int, str]) -> str:
        """List ranks that do not answer first, because the others wait for them."""
        silent: list[str] = []
        waiting: list[str] = []
        for rank in late:
            name = f"rank {rank} ({self.ranks.describe(rank)})"
            if rank in stacks:
                waiting.append(f"{name} still works or waits")
            else:
                silent.append(f"{name} does not answer")
        parts = "; ".join([*silent, *waiting])
        return f"{self.label} not done within {self._deadline_s:g} s: {parts}"

    def _describe_errors(self, raised: dict[int, Raised]) -> str:
        by_summary: dict[str, list[int]] = {}
        for rank, end in raised.items():
            by_summary.setdefault(end.summary, []).append(rank)
        parts = []
        for summary, numbers in by_summary.items():
            first = numbers[0]
            shown = ", ".join(map(str, numbers))
            where = f"rank {shown} ({self.ranks.describe(first)})"
            traceback = raised[first].traceback.rstrip()
            parts.append(f"{self.label} raised on {where}: {summary}\n{traceback}")
        return "\n".join(parts)

    def _fail(
        self,
        kind: type[Exception],
        headline: str,
        broken: Any,
        cause: BaseException | None = None,
        stacks: dict[int, str] | None = None,
    ) -> None:
        """Raise `kind`. If ranks are `broken` (dead or stuck), add stacks and end all first."""
        if broken:
            stacks = self.ranks.stacks(ANSWER_S) if stacks is None else stacks
            summary = headline.split("\n")[0]
            lines = [headline]
            if kind is WorkerLostError:
                lines.append(WHY_DEAD)
            lines += _whereabouts(self.ranks, stacks)
            # Again below the stacks, which may be longer than a screen.
            lines += ["All processes of the group have been ended.", summary]
            headline = "\n".join(lines)
            self.ranks.abort(summary)
        raise kind(headline) from cause


def any_failed(ended: Ends) -> bool:
    """Return whether one of these calls has failed."""
    return any(end is not None for end in ended.values())


def describe_deaths(ranks: Ranks, lost: Mapping[int, Lost]) -> list[str]:
    """Describe each rank that has died."""
    deaths = []
    for rank, end in lost.items():
        deaths.append(f"rank {rank} ({ranks.describe(rank)}) died: {end.reason}")
    return deaths


def _whereabouts(ranks: Ranks, stacks: dict[int, str]) -> list[str]:
    notes = ranks.breadcrumbs()
    lines: list[str] = []
    for rank in range(ranks.size):
        if rank not in stacks:
            note = notes.get(rank, "none")
            lines.append(f"Rank {rank} does not answer; last breadcrumb: {note}")
    for rank, text in sorted(stacks.items()):
        lines.append(
            f"Rank {rank} answers; last breadcrumb: {notes.get(rank, 'none')}; its stacks: {text}"
        )
    return lines
