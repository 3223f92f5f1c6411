"""Declarations of the phases of a step, from which follows which of them may overlap."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

_PHASE = "_verl_phase"

Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(frozen=True)
class Phase:
    """A phase's use of the columns and rows of a batch."""

    reads: frozenset[str]
    writes: frozenset[str]
    chooses_rows: bool  # gives other rows than it has got, or masks some


def phase(*, reads: str = "", writes: str = "", chooses_rows: bool = False) -> Callable:
    """Declare a phase of a trainer.

    A method that replaces it and declares nothing is taken to read and write everything: the phases
    then run one after the other.

    Args:
        reads: names of columns, separated by blanks.
        writes: likewise.
        chooses_rows: whether it drops, adds or masks rows.

    Example:
        >>> class MyTrainer(PPOTrainer):
        ...     @phase(reads="token_level_scores response_mask", writes="advantages returns")
        ...     def estimate_advantages(self, batch): ...
    """
    declared = Phase(frozenset(reads.split()), frozenset(writes.split()), chooses_rows)

    def mark(method: Method) -> Method:
        setattr(method, _PHASE, declared)
        return method

    return mark


def declared_phases(trainer: type, *names: str) -> list[Phase] | None:
    """Return the declarations of these methods; None where one of them has none."""
    phases = []
    for name in names:
        declared = getattr(getattr(trainer, name), _PHASE, None)
        if declared is None:
            return None
        phases.append(declared)
    return phases


def may_overlap(first: Phase, second: Phase) -> bool:
    """Check whether two phases give the same batch in any order.

    Neither writes a column that the other one reads or writes, and neither chooses rows.
    """
    if first.chooses_rows or second.chooses_rows:
        return False
    second_touches = second.reads | second.writes
    return first.writes.isdisjoint(second_touches) and second.writes.isdisjoint(first.reads)
