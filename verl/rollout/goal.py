"""How far an engine generates before it is stopped: so many groups of samples must be whole."""

from collections.abc import Iterable, Sequence
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

    def shares(self, num_shares: int, homes: Sequence[int] | None = None) -> list["Goal"]:
        """Deal the groups to engines. Where all reach their goals, this one is reached.

        Args:
            homes: the engine that each group is in; None: they are dealt in turn.
        """
        if homes is None:
            homes = [place % num_shares for place in range(len(self.groups))]
        goals = []
        for share in range(num_shares):
            groups = [group for group, home in zip(self.groups, homes) if home == share]
            needs = []
            for among, count in self.needs:
                needs.append((homes[:among].count(share), homes[:count].count(share)))
            goals.append(Goal(tuple(groups), tuple(needs)))
        return goals


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
