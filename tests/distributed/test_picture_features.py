"""Ranks of a sharded model may differ in which features of pictures they have."""

import pytest

from tests.cases import cases
from tests.distributed import picture_jobs
from tests.distributed.ranks import Ranks
from tests.distributed.test_ranks import worst_relative_l2

ALL_ROWS = ((0, 1, 2, 3),)
UNEVEN = ((0, 1, 2), (3,))  # with one row per micro-batch: three micro-batches and one


@pytest.mark.parametrize(
    "kept_on", cases([(0, 1), (0,), (1,), ()], quick=lambda ranks: len(ranks) == 1)
)
def test_ranks_learn_the_same_whatever_features_they_have(
    two_ranks: Ranks, kept_on: tuple[int, ...]
) -> None:
    expected = picture_jobs.train(ALL_ROWS, None)
    assert expected["calls"] == 4 * 2 * 2
    found = two_ranks.call(picture_jobs.train, UNEVEN, kept_on)
    for rank, answer in enumerate(found):
        assert answer["calls"] == (0 if rank in kept_on else len(UNEVEN[rank]))
        assert worst_relative_l2(answer["gradient"], expected["gradient"]) <= 1e-9
        # the first steps of AdamW divide a gradient by itself
        assert worst_relative_l2(answer["weights"], expected["weights"]) <= 1e-6
