"""Planning micro-batches."""

import pytest
from hypothesis import given
from hypothesis.strategies import integers, lists

from verl.engine.microbatch import TokenBudget, plan_micro_batches
from verl.utils.errors import ConfigError

LENGTHS = lists(integers(1, 60), min_size=1, max_size=60)


@given(lengths=LENGTHS, max_tokens=integers(60, 400))
def test_token_plan_places_every_row_once_within_the_budget(lengths, max_tokens):
    plan = plan_micro_batches(lengths, TokenBudget(max_tokens=max_tokens))
    assert sorted(row for rows in plan for row in rows) == list(range(len(lengths)))
    assert all(sum(lengths[row] for row in rows) <= max_tokens for rows in plan)
    assert all(rows == sorted(rows) for rows in plan)
    assert plan == plan_micro_batches(list(lengths), TokenBudget(max_tokens=max_tokens))


@given(lengths=LENGTHS, max_tokens=integers(60, 400))
def test_token_plan_uses_few_bins(lengths, max_tokens):
    plan = plan_micro_batches(lengths, TokenBudget(max_tokens=max_tokens))
    # Any two bins of first-fit hold more than one budget together, and the plan never needs more bins than first-fit.
    assert len(plan) <= 1 or len(plan) * max_tokens < 2 * sum(lengths) + max_tokens


@given(lengths=LENGTHS, max_tokens=integers(60, 400))
def test_token_plan_is_balanced_or_nearly_full(lengths, max_tokens):
    """Longest-first bins differ by at most the longest row; where they overflow, little room was left at all."""
    filled = [
        sum(lengths[row] for row in rows) for rows in plan_micro_batches(lengths, TokenBudget(max_tokens=max_tokens))
    ]
    spread = max(filled) - min(filled)
    assert spread <= max(lengths) or sum(filled) / len(filled) + max(lengths) > max_tokens


def test_token_plan_balances_and_fills():
    assert plan_micro_batches([5, 5, 5, 5, 1, 1], TokenBudget(max_tokens=20)) == [[0, 2, 4], [1, 3, 5]]
    # Even filling fails here (7+5+3, 6+5+4 would need 15), first-fit decreasing finds 7+3, 6+4, 5+5.
    assert plan_micro_batches([7, 6, 5, 5, 4, 3], TokenBudget(max_tokens=10)) == [[0, 5], [1, 4], [2, 3]]


@given(count=integers(0, 40), rows=integers(1, 50))
def test_row_plan_is_consecutive_chunks(count, rows):
    plan = plan_micro_batches([3] * count, TokenBudget(rows=rows))
    assert [row for chunk in plan for row in chunk] == list(range(count))
    assert all(len(chunk) == rows for chunk in plan[:-1])


def test_a_row_longer_than_the_budget_names_the_key_and_the_length():
    budget = TokenBudget(max_tokens=10, key="critic.ppo_max_token_len_per_gpu")
    with pytest.raises(ConfigError, match=r"row 1 has 12.*Raise critic.ppo_max_token_len_per_gpu to at least 13"):
        plan_micro_batches([10, 12, 13], budget)


@pytest.mark.parametrize("sizes", [{}, {"max_tokens": 5, "rows": 5}, {"max_tokens": 0}, {"rows": 0}])
def test_a_budget_is_either_tokens_or_rows(sizes):
    with pytest.raises(ConfigError):
        TokenBudget(**sizes)
