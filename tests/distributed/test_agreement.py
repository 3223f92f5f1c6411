"""Ranks with different passes raise an error instead of waiting for each other."""

import pytest

from tests.distributed.jobs import Setup, make_batch, new_engine, own_rows
from tests.distributed.ranks import Ranks
from verl.engine import agreement
from verl.engine.microbatch import TokenBudget, plan_micro_batches
from verl.utils.errors import DataError

SHAPES = [(5, 9), (2, 3), (12, 20), (7, 1)]
BY_ROWS = TokenBudget(rows=2, phase="the pass for values")


def infer(
    sequence: int,
    shapes: tuple,
    budgets: tuple[TokenBudget, TokenBudget],
    reverse_on_one_rank: bool,
) -> str:
    """Return the error of a pass with budgets or plans that may differ between the ranks."""
    engine = new_engine(Setup(sequence=sequence))
    rank = engine.mesh.world.rank
    deal = ((0, 1, 2, 3),) if sequence == 2 else ((0, 1, 2), (3,))
    with pytest.MonkeyPatch.context() as patch:
        if reverse_on_one_rank and rank == 1:
            patch.setattr(
                agreement, "plan_micro_batches", lambda *args: plan_micro_batches(*args)[::-1]
            )
        try:
            engine.infer(own_rows(engine, make_batch(shapes), deal), budgets[rank])
        except DataError as error:
            return str(error)
    return "none"


def test_ranks_with_the_same_rows_must_plan_the_same_passes(two_ranks: Ranks):
    assert two_ranks.call(infer, 2, SHAPES, (BY_ROWS, BY_ROWS), False) == ["none"] * 2
    errors = two_ranks.call(infer, 2, SHAPES, (BY_ROWS, BY_ROWS), True)
    assert errors[0] == errors[1]
    assert "Ranks 0 and 1 must make the same passes" in errors[0]
    message = "the pass for values: 2 passes of at most 2 rows over 4 rows with 59 tokens, plan "
    assert errors[0].count(message) == 2, errors[0]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            TokenBudget(rows=1, phase="the pass for values"),
            "the pass for values: 1 passes of at most 1 rows",
        ),
        (
            TokenBudget(rows=2, phase="the actor's update"),
            "the actor's update: 1 passes of at most 2 rows",
        ),
    ],
    ids=["size", "phase"],
)
def test_ranks_with_different_rows_must_be_in_the_same_phase(
    two_ranks: Ranks, other: TokenBudget, message: str
):
    # two passes on one rank, one on the other
    assert two_ranks.call(infer, 1, SHAPES, (BY_ROWS, BY_ROWS), False) == ["none"] * 2
    errors = two_ranks.call(infer, 1, SHAPES, (BY_ROWS, other), False)
    assert errors[0] == errors[1]
    assert "Rank 0, the pass for values: 2 passes of at most 2 rows over 3 rows" in errors[0]
    assert f"Rank 1, {message}" in errors[0]
