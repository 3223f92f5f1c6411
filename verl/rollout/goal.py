"""How far an engine generates before it is stopped: so many groups of samples must be whole."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Goal:
    """The groups of samples that must be whole before generation may stop.

    Args:
        groups: ids of the unfinished samples of every group, oldest group first.
        needs: pairs (among, count): of the first `among` groups, `count` must be whole.
    """

    groups: tuple[tuple[int, ...], ...]
    needs: tuple[tuple[int, int], ...]

    def shares(self, num_shares: int) -> list["Goal"]:
        """Deal the groups to engines in turn. Where all reach their goals, this one is reached."""
        goals = []
        for share in range(num_shares):
            needs = []
            for among, count in self.needs:
                needs.append((_dealt(among, share, num_shares), _dealt(count, share, num_shares)))
            goals.append(Goal(self.groups[share::num_shares], tuple(needs)))
        return goals


def _dealt(count: int, share: int, num_shares: int) -> int:
    """Return how many of the first `count` groups `share` gets."""
    return len(range(share, count, num_shares))


class GoalWatch:
    """Counts the groups that are whole."""

    def __init__(self, goal: Goal) -> None:
        self._needs = goal.needs
        self._open: dict[int, int] = {}  # sample id -> place of its group
        self._missing: list[int] = []
        for place, sample_ids in enumerate(goal.groups):
            self._open |= dict.fromkeys(sample_ids, place)
            self._missing.append(len(sample_ids))
        self.is_reached = self._look()

    def note(self, sample_ids: Iterable[int]) -> None:
        """Count samples that have ended."""
        is_news = False
        for sample_id in sample_ids:
            place = self._open.pop(sample_id, None)
            if place is not None:
                self._missing[place] -= 1
                is_news = is_news or self._missing[place] == 0
        if is_news:
            self.is_reached = self._look()

    def _look(self) -> bool:
        return all(self._missing[:among].count(0) >= count for among, count in self._needs)
