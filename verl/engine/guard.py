"""Which rows spoilt an update: looked for only after one has failed."""

from collections.abc import Callable, Sequence


def find_offenders(
    groups: Sequence[Sequence[int]], is_finite: Callable[[Sequence[int]], bool], *, limit: int = 8
) -> list[int]:
    """The rows whose loss or gradient is not finite, at most about `limit` of them, by halving the groups that fail.

    A group that fails although both its halves pass (their sum overflows) is returned whole. Costs about
    2 log2(group size) passes per offender.
    """
    found: list[int] = []

    def search(failing: Sequence[int]) -> None:
        if len(found) >= limit:
            return
        if len(failing) == 1:
            found.append(failing[0])
            return
        middle = len(failing) // 2
        worse = [half for half in (failing[:middle], failing[middle:]) if not is_finite(half)]
        for half in worse:
            search(half)
        if not worse:
            found.extend(failing)

    for group in groups:
        if len(found) < limit and not is_finite(group):
            search(group)
    return found
