"""The contract of a hand-over: who sends named tensors, who takes them, and how it is proved."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import torch

from verl.distributed.collectives import ALONE, Axis, gather_objects
from verl.utils.errors import RolloutError
from verl.weight_sync.fingerprint import Fingerprint, FingerprintLog

# (name as in the Hugging Face module's `named_parameters`, whole tensor); a tied weight once
NamedTensors = Iterable[tuple[str, torch.Tensor]]


class WeightTaker(Protocol):
    """What a hand-over needs of an engine."""

    @property
    def weight_dtype(self) -> torch.dtype:
        """In which the engine keeps what is floating point."""
        ...

    def update_weights(self, named_tensors: NamedTensors) -> None:
        """Take every tensor before asking for the next one, whose memory may be the same."""
        ...

    def weight_place(self, name: str) -> torch.Tensor | None:
        """The engine's own tensor of that name, if what `update_weights` is about to be given may
        be written there."""
        ...

    def weight_fingerprints(self) -> Mapping[str, Fingerprint]:
        """Of the tensors as the engine has them now, by name."""
        ...


class WeightSender(Protocol):
    """One end of a transport. `send` returns when every receiver has all tensors, and raises
    RolloutError where one has
    not: its engine refused them, or what it has is not what `log` says was sent."""

    def send(self, named_tensors: NamedTensors, log: FingerprintLog | None = None) -> None:
        """`log` is filled by whoever makes the tensors (see `gathered`); without one nothing is
        proved."""
        ...


class WeightReceiver(Protocol):
    """The other end, in another process; see `receive_into`."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What is sent next, to its end. A tensor is valid until the next one is asked for."""
        ...

    def expected(self) -> Mapping[str, int] | None:
        """Fingerprints of what was sent, after the end of `tensors`; None: not to be proved."""
        ...

    def report(self, fault: str | None) -> None:
        """Tell the sender how it went, once a hand-over."""
        ...


class ProofSchedule:
    """Which hand-overs are proved: the first, and every `interval`-th after it; 0: the first
    alone."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._number = 0

    def next(self) -> FingerprintLog | None:
        """A log for the hand-over that begins, or None."""
        due = self._number == 0 or (self._interval > 0 and self._number % self._interval == 0)
        self._number += 1
        return FingerprintLog() if due else None


def receive_into(engine: WeightTaker, receiver: WeightReceiver, sharing: Axis = ALONE) -> None:
    """Give the engine all tensors of one hand-over, prove them if asked to, and report to the
    sender.

    Raises what the engine raises, or RolloutError naming the tensors that differ. `sharing`: the
    ranks whose engines have parts of the same tensors, all of which must call this.
    """
    tensors = receiver.tensors()
    try:
        engine.update_weights(tensors)
        check(receiver.expected(), engine, world=sharing, sharing=sharing)
    except Exception as error:
        # The sender, and with it the other receivers, would wait for ever for one that has left.
        for _ in tensors:
            pass
        receiver.report(f"{type(error).__name__}: {error}")
        raise
    receiver.report(None)


def check(
    expected: Mapping[str, int] | None,
    engine: WeightTaker,
    *,
    world: Axis = ALONE,
    sharing: Axis = ALONE,
) -> None:
    """Raise RolloutError, on every rank of `world`, naming the tensors that some engine's
    fingerprints show to differ.

    Args:
        expected: of the whole tensors, in the engine's dtype; None: nothing is to be proved, on any
            rank.
        world: the ranks that must all call this.
        sharing: the ranks whose engines have parts of the same tensors.
    """
    if expected is None:
        return
    sums: dict[str, int] = {}
    found = (
        [engine.weight_fingerprints()]
        if sharing.size == 1
        else gather_objects(engine.weight_fingerprints(), sharing)
    )
    for name, fingerprint in found[sharing.rank].items():
        parts = (
            [other[name].value for other in found] if fingerprint.is_part else [fingerprint.value]
        )
        sums[name] = _signed(sum(parts))
    differing = [name for name in {**expected, **sums} if expected.get(name) != sums.get(name)]
    faults = gather_objects(differing, world)
    if any(faults):
        raise RolloutError(_told(faults, len(expected)))


def _told(faults: list[list[str]], total: int) -> str:
    ranks_of: dict[str, list[int]] = {}
    for rank, names in enumerate(faults):
        for name in names:
            ranks_of.setdefault(name, []).append(rank)
    listed = [
        f"'{name}'" + (f" on rank {', '.join(map(str, ranks))}" if len(faults) > 1 else "")
        for name, ranks in ranks_of.items()
    ]
    more = f" and {len(listed) - 5} more" if len(listed) > 5 else ""
    return (
        f"After the hand-over {len(listed)} of {total} weights of the rollout engine are not the "
        f"trainer's, by their fingerprints: {'; '.join(listed[:5])}{more}. What it generates would "
        "not be the policy's. Start again from the last checkpoint; if it comes back on the same "
        "machine, have its memory and links checked."
    )


def _signed(number: int) -> int:
    """`number` mod 2^64 as int64 counts."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
