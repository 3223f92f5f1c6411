"""Declare the columns that a part reads and writes.

The trainer runs two parts at the same time only if their declarations allow it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

_PHASE = "_verl_phase"

Part = TypeVar("Part", bound=Callable[..., Any])


@dataclass(frozen=True)
class Phase:
    """A part's use of the columns and rows of a batch."""

    reads: frozenset[str]
    writes: frozenset[str]
    chooses_rows: bool  # gives other rows than it has got, or masks some

    @property
    def leaves_batch_alone(self) -> bool:
        """Whether the batch is afterwards as it was."""
        return not self.writes and not self.chooses_rows


def phase(
    *, reads: str = "", writes: str = "", chooses_rows: bool = False
) -> Callable[[Part], Part]:
    """Declare the columns that a part uses: a trainer's phase, a reward, an advantage estimator.

    A part that declares nothing is taken to read and write everything: phases then run one after
    the other, and every column that it might read is computed. A method that replaces a declared
    one needs a declaration of its own.

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

    def mark(part: Part) -> Part:
        setattr(part, _PHASE, declared)
        return part

    return mark


def declared_phase(part: Callable[..., Any]) -> Phase | None:
    """Return the declaration of a function, or of an object's `__call__`; None without one."""
    declared = getattr(part, _PHASE, None)
    if declared is None:
        declared = getattr(type(part).__call__, _PHASE, None)
    return declared


def declared_phases(kind: type, *names: str) -> list[Phase] | None:
    """Return the declarations of these methods of a class; None where one of them has none."""
    phases = []
    for name in names:
        declared = getattr(getattr(kind, name), _PHASE, None)
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
