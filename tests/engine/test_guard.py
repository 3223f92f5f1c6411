"""The search for the rows with a non-finite loss or gradient."""

from hypothesis import given
from hypothesis.strategies import integers, sets

from verl.engine.guard import find_offenders


@given(bad=sets(integers(0, 29), max_size=6), size=integers(1, 30))
def test_exactly_the_bad_rows_are_found(bad, size):
    groups = [list(range(start, min(start + size, 30))) for start in range(0, 30, size)]
    passes = []

    def is_finite(rows):
        passes.append(rows)
        return not bad.intersection(rows)

    assert sorted(find_offenders(groups, is_finite)) == sorted(bad)
    assert len(passes) <= len(groups) + 10 * len(bad)


def test_rows_that_fail_only_together_are_returned_together():
    assert find_offenders([[0, 1], [2, 3]], lambda rows: rows != [2, 3]) == [2, 3]


def test_the_search_stops_when_everything_is_bad():
    passes = []

    def is_finite(rows):
        passes.append(rows)
        return False

    assert find_offenders([list(range(1000))], is_finite) == list(range(8))
    assert len(passes) < 60
