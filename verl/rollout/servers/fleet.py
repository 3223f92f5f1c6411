"""The servers of an engine: which one draws a sample, which have ended, which have old weights."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

from verl.rollout.servers.server import (
    AdapterLostError,
    Drawn,
    Server,
    ServerLostError,
    WeightSource,
)
from verl.utils.errors import RolloutError
from verl.utils.logging import logger

_BLOCK = 32  # tokens of a prompt that are cached together, roughly as servers do
_MOST_PROBES = 3
_AGAIN_S = 2.0  # from one look at a lost server to the next, while others draw


class Restarter(Protocol):
    """Starts a server again."""

    def restart(self, url: str, *, hung_at: float) -> None:
        """Start the server at `url` again if its process has ended.

        End it before if it was started before `hung_at`, a time of `time.monotonic`.
        """
        ...


@dataclass(eq=False)
class Member:
    """A server and its work."""

    server: Server
    tokens_in_flight: int = 0
    blocks: set[int] = field(default_factory=set)  # beginnings of prompts that it has seen
    fault: Exception | None = None  # why it is lost; None: it answers
    signature: Drawn | None = None  # its probe after the last push, where it records no version


@dataclass(frozen=True)
class Push:
    """The weights that were pushed last.

    Args:
        source: gives them to a server again.
        version: their name.
        signatures: `Member.signature` of each server, in the order of the members; None: unknown.
    """

    source: WeightSource
    version: str
    signatures: Sequence[Drawn | None] | None = None


class Placement:
    """The load of a sample, and the beginnings of its prompt."""

    def __init__(self, prompt_ids: Sequence[int], limit: int) -> None:
        self.tokens = len(prompt_ids) + limit
        self._length = len(prompt_ids)
        self.blocks: list[int] = []
        mark = 0
        for start in range(0, len(prompt_ids) - _BLOCK + 1, _BLOCK):
            mark = hash((mark, *prompt_ids[start : start + _BLOCK]))
            self.blocks.append(mark)

    def cost(self, member: Member) -> int:
        """Return the tokens before this sample: those in flight, and the part to compute anew."""
        known = 0
        for mark in self.blocks:
            if mark not in member.blocks:
                break
            known += _BLOCK
        return member.tokens_in_flight + self._length - known


class Fleet:
    """Chooses servers, and brings lost ones back with the weights of the last push.

    Args:
        members: the servers.
        patience_s: how long to wait for a server while none answers.
        restarter: starts servers again; None: their owner does.
        probe: draws fixed tokens on a server.
    """

    def __init__(
        self,
        members: Sequence[Member],
        patience_s: float,
        restarter: Restarter | None,
        probe: Callable[[Server], Drawn],
    ) -> None:
        self.members = list(members)
        self._patience_s = patience_s
        self._restarter = restarter
        self._probe = probe
        self._lock = threading.RLock()
        self._recovery = threading.RLock()
        self._looked = 0.0
        self._pushed: Push | None = None
        self._versions: set[str] = set()  # of all pushes
        self._has_unnamed = False  # draws by a server that does not name their weights

    # ---------------------------------------------------------------- work

    @contextmanager
    def chosen(self, placement: Placement) -> Iterator[Member]:
        """Give a server for a sample: few tokens in flight, and much of the prompt cached.

        Raises RolloutError if no server answers for `patience_s`.
        """
        member = self._choose(placement)
        try:
            yield member
        finally:
            with self._lock:
                member.tokens_in_flight -= placement.tokens

    def _choose(self, placement: Placement) -> Member:
        while True:
            self._look_again()
            with self._lock:
                living = self.living()
                if living:
                    best = min(living, key=placement.cost)
                    best.tokens_in_flight += placement.tokens
                    best.blocks.update(placement.blocks)
                    return best
            self._wait_for_one()

    def draw_current(self, member: Member, draw: Callable[[Server], Drawn]) -> Drawn | None:
        """Draw on a server; None: it drew by other weights, and has those of the last push now.

        Raises ServerLostError if it does not answer.
        """
        with suppress(AdapterLostError):
            drawn = draw(member.server)
            if self._is_current(drawn):
                return drawn
        # It lost the weights in between. Nothing that it drew is used.
        self.make_current(member)
        return None

    def _is_current(self, drawn: Drawn) -> bool:
        """Return whether weights of this run drew the tokens, as far as the server says which."""
        if self._pushed is None:
            return True
        if not drawn.versions:
            self._has_unnamed = True
        return drawn.versions <= self._versions

    def probe_each(self) -> dict[str, Drawn]:
        """Draw the fixed tokens on every server that can. Return the draws by server's name.

        A server that is lost meanwhile is left out, unless it is the last one: then wait for one.
        """
        for _ in range(_MOST_PROBES):
            living = self.living()
            awake = [member for member in living if member.server.can_draw]
            drawn = {}
            for member in awake:
                try:
                    probe = self.draw_current(member, self._probe)
                    drawn[member.server.name] = probe or self._probe(member.server)
                except ServerLostError as error:
                    self.note_lost(member, error)
            if drawn or len(awake) < len(living):
                return drawn
            self._wait_for_one()

        faults = "; ".join(str(member.fault) for member in self.members)
        raise RolloutError(
            f"In {_MOST_PROBES} tries, every server ended during a draw of a few tokens: {faults}. "
            "Look into its log."
        )

    def check_unnamed(self) -> None:
        """Raise RolloutError if a server that names no weights has others than those of the push.

        Called when all samples have ended. A restart while it drew has been noticed, and answered
        by another push; this finds one between two draws.
        """
        if not self._has_unnamed:
            return
        self._has_unnamed = False

        for member in self.living():
            try:
                is_stale = self._is_stale(member)
            except ServerLostError as error:
                self.note_lost(member, error)
                continue
            if is_stale:
                raise RolloutError(
                    f"{member.server.name} has changed its weights during the generation (a "
                    "restart?), and its answers do not say which samples that concerns. Start "
                    "again from the last checkpoint; vLLM with --enable-scale-out names the "
                    "weights of every answer, so that such samples are drawn again."
                )

    def note_lost(self, member: Member, error: Exception) -> None:
        """Give no work to a server that has not answered, until it does."""
        with self._lock:
            is_new = member.fault is None
            member.fault = error
            member.blocks.clear()
            self._looked = time.monotonic()
        if is_new:
            logger.warning("%s. Its samples are drawn again.", error)

    def flush(self) -> None:
        """Drop the cached prefixes of all servers that are idle."""
        for member in self.living():
            try:
                member.server.flush()
            except ServerLostError as error:
                self.note_lost(member, error)
            member.blocks.clear()

    # ---------------------------------------------------------------- weights

    @property
    def is_idle(self) -> bool:
        """Return whether no sample of this process is on its way to a server or on one."""
        with self._lock:
            return all(member.tokens_in_flight == 0 for member in self.members)

    def push(self, source: WeightSource, version: str, *, is_idle: bool = False) -> None:
        """Give all servers new weights, and check that they record the version.

        Args:
            is_idle: no request is on the servers.
        """
        self.adopt(Push(source, version))
        self._have_each(lambda member: self._load(member, is_idle=is_idle))

    def last_push(self) -> Push:
        """Return the last push, for `adopt` on other ranks."""
        assert self._pushed is not None, "no weights were pushed"
        return replace(self._pushed, signatures=[member.signature for member in self.members])

    def adopt(self, push: Push) -> None:
        """Take the weights of a push, here or on another rank, as the current ones."""
        self._pushed = push
        self._versions.add(push.version)
        adapter = push.version if push.source.is_adapter else None
        signatures = push.signatures or [None] * len(self.members)

        for member, signature in zip(self.members, signatures, strict=True):
            member.server.adapter = adapter
            member.signature = signature
            member.blocks.clear()

    def check_versions(self) -> None:
        """Make every server that answers current. Called before a generation."""
        self._have_each(self.make_current)

    def _have_each(self, act: Callable[[Member], None]) -> None:
        """Act on every server. One that does not answer is lost; one at least has to."""
        for member in self.members:
            try:
                member.server.watch.look()  # one that hangs would take its time for each call
                act(member)
                member.fault = None
            except ServerLostError as error:
                self.note_lost(member, error)
        if not self.living():
            self._wait_for_one()

    def make_current(self, member: Member) -> None:
        """Give a server the weights of the last push again if it has others."""
        with self._recovery:
            if self._pushed is None:
                member.server.facts()
                return

            if member.fault is not None:
                member.server.resume()  # it may have been lost during a push, which pauses it
            if self._is_stale(member):
                logger.warning(
                    "%s does not have the weights of this run any more (a restart?). It gets them "
                    "again: %s.",
                    member.server.name,
                    self._pushed.version,
                )
                self._load(member)

    def _is_stale(self, member: Member) -> bool:
        assert self._pushed is not None
        version = member.server.weight_version()
        if version is not None:
            return version != self._pushed.version
        member.server.flush()  # the signature was drawn without cached keys
        probe = self._probe(member.server)
        return member.signature is None or probe.log_probs != member.signature.log_probs

    def _load(self, member: Member, *, is_idle: bool = False) -> None:
        assert self._pushed is not None
        version = self._pushed.version
        with member.server.watch.excused():
            recorded = member.server.load(self._pushed.source, version, is_idle=is_idle)

        if recorded is None:
            member.signature = self._probe(member.server)
        elif recorded != version:
            raise RolloutError(
                f"{member.server.name} confirmed new weights, but has the version '{recorded}' "
                f"instead of '{version}'. Another run may push weights to it: give each run "
                "servers of its own."
            )

    # ---------------------------------------------------------------- lost servers

    def living(self) -> list[Member]:
        """Return the servers that answer."""
        with self._lock:
            return [member for member in self.members if member.fault is None]

    def _look_again(self) -> None:
        """Try lost servers now and then, while others draw."""
        # A look at a server that hangs takes long. Samples of other threads must not wait for it.
        if not self._recovery.acquire(blocking=False):
            return
        try:
            is_due = time.monotonic() - self._looked > _AGAIN_S
            lost = [member for member in self.members if member.fault is not None]
            if lost and is_due:
                self._bring_back(lost)
                self._looked = time.monotonic()
        finally:
            self._recovery.release()

    def _bring_back(self, lost: Sequence[Member]) -> None:
        """Try lost servers, and start those again that the run owns. Needs the recovery lock."""
        for member in lost:
            watch = member.server.watch
            if self._restarter is not None:
                self._restarter.restart(member.server.url, hung_at=watch.hung_at)

            try:
                watch.look()
                watch.look_at_engine()
                self.make_current(member)
            except ServerLostError as error:
                member.fault = error
            else:
                member.fault = None
                logger.info("%s answers again.", member.server.name)

    def _wait_for_one(self) -> None:
        """Wait until a server answers."""
        deadline = time.monotonic() + self._patience_s
        with self._recovery:
            while not self.living():
                self._bring_back(self.members)
                if self.living():
                    return
                if time.monotonic() > deadline:
                    faults = "; ".join(str(member.fault) for member in self.members)
                    raise RolloutError(
                        f"No server has answered for {self._patience_s:.0f} s: {faults}. Look "
                        "into its log, and start it again with more memory or fewer sequences; "
                        "actor_rollout_ref.rollout.server_timeout_s sets how long to wait."
                    )
                time.sleep(0.5)
