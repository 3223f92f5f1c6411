"""The contract of a hand-over: sender, receiver, engine, and the proof that they agree."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from verl.distributed.collectives import ALONE, Axis, gather_objects
from verl.utils.errors import RolloutError, describe_error
from verl.utils.launcher import run_rank
from verl.weight_sync.fingerprint import Fingerprint, FingerprintLog, signed

# (name in `named_parameters` of the Hugging Face module, whole tensor). A tied weight comes once.
NamedTensors = Iterable[tuple[str, Tensor]]
TensorStream = Iterator[tuple[str, Tensor]]  # the same, to be read once
Content = TypeVar("Content")  # of a hand-over: a tensor, or the tensors of a bucket


class WeightTaker(Protocol):
    """The methods that a hand-over calls on an engine."""

    @property
    def weight_dtype(self) -> torch.dtype:
        """Dtype in which the engine keeps floating-point weights."""
        ...

    def update_weights(self, named_tensors: NamedTensors) -> None:
        """Copy each tensor before asking for the next one, which may reuse its memory."""
        ...

    def weight_place(self, name: str) -> Tensor | None:
        """Return the engine's own tensor of that name, if the next hand-over may write into it."""
        ...

    def weight_fingerprints(self) -> Mapping[str, Fingerprint]:
        """Compute the fingerprints of the engine's tensors as they are now, by name."""
        ...


class WeightSender(Protocol):
    """The trainer's end of a transport."""

    def send(self, named_tensors: NamedTensors, log: FingerprintLog | None = None) -> None:
        """Return when every receiver has all tensors.

        Raises RolloutError where a receiver's engine refused them, or where its fingerprints differ
        from those in `log`.

        Args:
            named_tensors: whole tensors, one after the other.
            log: filled by the code that makes the tensors (see `gathered`); None: no proof.
        """
        ...


class WeightReceiver(Protocol):
    """The rollout's end of a transport, in another process; see `receive_into`."""

    def tensors(self) -> TensorStream:
        """Yield the tensors of one hand-over. Each is valid until the next one is asked for."""
        ...

    def expected(self) -> Mapping[str, int] | None:
        """Return the sender's fingerprints, after the end of `tensors`; None: no proof is due."""
        ...

    def report(self, fault: str | None) -> None:
        """Report success (None) or the fault to the sender, once a hand-over."""
        ...


class ProofSchedule:
    """Chooses the hand-overs to prove: the first and every `interval`-th; 0: the first alone."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._number = 0

    def next(self) -> FingerprintLog | None:
        """Return a log for the hand-over that begins, or None if it is not to be proved."""
        number = self._number
        self._number += 1
        if number == 0 or (self._interval > 0 and number % self._interval == 0):
            return FingerprintLog()
        return None


def receive_into(engine: WeightTaker, receiver: WeightReceiver, sharing: Axis = ALONE) -> None:
    """Give the engine all tensors of one hand-over, prove them if due, and report to the sender.

    Raises the engine's own error, or RolloutError naming the tensors that differ.

    Args:
        engine: takes the tensors.
        receiver: this end of the transport.
        sharing: the ranks with engines that hold parts of the same tensors. All must call this.
    """
    with reported(receiver, receiver.tensors()) as tensors:
        engine.update_weights(tensors)
        check(receiver.expected(), engine, world=sharing, sharing=sharing)


@contextmanager
def reported(receiver: WeightReceiver, contents: Iterator[Content]) -> Iterator[Iterator[Content]]:
    """Give the contents of one hand-over, and report to the sender how the block has ended."""
    try:
        yield contents
    except Exception as error:
        # Read to the end: the sender, and with it the other receivers, would wait forever.
        for _ in contents:
            pass
        receiver.report(describe_error(error))
        raise
    receiver.report(None)


def copies_of(buckets: Iterator[NamedTensors]) -> NamedTensors:
    """Yield copies of the tensors, for engines that keep them: buckets are filled again."""
    for bucket in buckets:
        for name, tensor in bucket:
            yield name, tensor.clone()


def check(
    expected: Mapping[str, int] | None,
    engine: WeightTaker,
    *,
    world: Axis = ALONE,
    sharing: Axis = ALONE,
) -> None:
    """Raise RolloutError, on every rank of `world`, if a fingerprint of some engine differs.

    Args:
        expected: fingerprints of the whole tensors in the engine's dtype. None, which must hold on
            all ranks: no proof.
        engine: this rank's.
        world: the ranks that must all call this.
        sharing: the ranks with engines that hold parts of the same tensors.
    """
    if expected is None:
        return

    fingerprints = gather_objects(engine.weight_fingerprints(), sharing)
    sums: dict[str, int] = {}
    for name, own in fingerprints[sharing.rank].items():
        total = own.value
        if own.is_part:
            total = sum(other[name].value for other in fingerprints)
        sums[name] = signed(total, 64)

    differing = [name for name in {**expected, **sums} if expected.get(name) != sums.get(name)]
    faults = gather_objects(differing, world)
    if any(faults):
        raise RolloutError(_describe(faults, len(expected)))


def _describe(faults: list[list[str]], total: int) -> str:
    """Write the error for the names that differ, one list for each rank."""
    ranks_of: dict[str, list[int]] = {}
    for rank, names in enumerate(faults):
        for name in names:
            ranks_of.setdefault(name, []).append(run_rank(rank))

    listed = []
    for name, ranks in ranks_of.items():
        where = ""
        if len(faults) > 1:
            where = f" on rank {', '.join(map(str, ranks))}"
        listed.append(f"'{name}'{where}")
    more = f" and {len(listed) - 5} more" if len(listed) > 5 else ""
    return (
        f"After the hand-over {len(listed)} of {total} weights of the rollout engine are not the "
        f"trainer's, by their fingerprints: {'; '.join(listed[:5])}{more}. Its responses would not "
        "be the policy's. Start again from the last checkpoint; if the error comes back on the "
        "same machine, have its memory and links checked."
    )
