"""Planning micro-batches."""

from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis.strategies import integers, lists, tuples

from verl.engine.microbatch import SharedPrompts, TokenBudget, plan_micro_batches
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
def test_token_plan_needs_few_bins(lengths, max_tokens):
    plan = plan_micro_batches(lengths, TokenBudget(max_tokens=max_tokens))
    # Any two bins of first-fit together exceed one budget, and the plan needs no more bins than it.
    assert len(plan) <= 1 or len(plan) * max_tokens < 2 * sum(lengths) + max_tokens


@given(lengths=LENGTHS, max_tokens=integers(60, 400))
def test_token_plan_is_balanced_or_nearly_full(lengths, max_tokens):
    """Allow a difference of at most the longest row, unless the bins are nearly full."""
    filled = [
        sum(lengths[row] for row in rows)
        for rows in plan_micro_batches(lengths, TokenBudget(max_tokens=max_tokens))
    ]
    spread = max(filled) - min(filled)
    assert spread <= max(lengths) or sum(filled) / len(filled) + max(lengths) > max_tokens


def test_token_plan_balances_and_fills():
    assert plan_micro_batches([5, 5, 5, 5, 1, 1], TokenBudget(max_tokens=20)) == [
        [0, 2, 4],
        [1, 3, 5],
    ]
    # Even filling fails here (7+5+3 and 6+5+4 need 15); first-fit decreasing finds 7+3, 6+4, 5+5.
    assert plan_micro_batches([7, 6, 5, 5, 4, 3], TokenBudget(max_tokens=10)) == [
        [0, 5],
        [1, 4],
        [2, 3],
    ]


def shared(groups: list[tuple[int, list[int]]]) -> tuple[list[int], SharedPrompts]:
    """Return lengths and prompts of the rows of all groups.

    A group has the number of tokens of a prompt and of each of its responses.
    """
    prompts = [
        (number, prompt) for number, (prompt, responses) in enumerate(groups) for _ in responses
    ]
    lengths = [prompt + response for prompt, responses in groups for response in responses]
    return lengths, SharedPrompts(*(list(column) for column in zip(*prompts)))


def tokens_of(rows: list[int], lengths: list[int], prompts: SharedPrompts) -> int:
    return sum({prompts.number[row]: prompts.lengths[row] for row in rows}.values()) + sum(
        lengths[row] - prompts.lengths[row] for row in rows
    )


GROUPS = lists(
    tuples(integers(1, 40), lists(integers(0, 40), min_size=1, max_size=12)), min_size=1, max_size=8
)


@given(groups=GROUPS, max_tokens=integers(80, 600))
@example(groups=[(60, [0, 0, 0]), (60, [20] * 9)], max_tokens=80)
def test_shared_prompts_count_once_and_rows_stay_together(groups, max_tokens):
    lengths, prompts = shared(groups)
    plan = plan_micro_batches(lengths, TokenBudget(max_tokens=max_tokens), prompts)
    assert sorted(row for rows in plan for row in rows) == list(range(len(lengths)))
    assert all(rows == sorted(rows) for rows in plan)
    assert plan == sorted(plan)
    filled = [tokens_of(rows, lengths, prompts) for rows in plan]
    assert max(filled) <= max_tokens
    parts = Counter(number for rows in plan for number in {prompts.number[row] for row in rows})
    for number, (prompt, responses) in enumerate(groups):
        if prompt + sum(responses) <= max_tokens:
            assert parts[number] == 1
        else:  # no more parts than with half of the space for responses
            assert parts[number] <= 2 * sum(responses) / (max_tokens - prompt) + 1
    assert len(plan) <= 1 or len(plan) * max_tokens < 2 * sum(filled) + max_tokens


def test_group_too_large_for_one_micro_batch_is_split_evenly():
    lengths, prompts = shared([(10, [20, 20, 20, 20]), (5, [5, 5])])
    assert plan_micro_batches(lengths, TokenBudget(max_tokens=75), prompts) == [
        [0, 2, 4, 5],
        [1, 3],
    ]


def test_slightly_too_large_groups_fill_their_micro_batches():
    """Avoid halves of 16 responses, which would leave half of every micro-batch empty."""
    lengths, prompts = shared([(256, [1024] * 16)] * 12)
    plan = plan_micro_batches(lengths, TokenBudget(max_tokens=16_384), prompts)
    assert len(plan) == 13


@given(lengths=LENGTHS, max_tokens=integers(60, 400))
def test_prompts_with_one_row_keep_the_plan(lengths, max_tokens):
    alone = SharedPrompts(list(range(len(lengths))), [1] * len(lengths))
    budget = TokenBudget(max_tokens=max_tokens)
    assert plan_micro_batches(lengths, budget, alone) == plan_micro_batches(lengths, budget)


@given(count=integers(0, 40), rows=integers(1, 50))
def test_row_plan_is_consecutive_chunks(count, rows):
    plan = plan_micro_batches([3] * count, TokenBudget(rows=rows))
    assert [row for chunk in plan for row in chunk] == list(range(count))
    assert all(len(chunk) == rows for chunk in plan[:-1])


def test_error_for_a_long_row_names_key_and_length():
    budget = TokenBudget(max_tokens=10, key="critic.ppo_max_token_len_per_gpu")
    with pytest.raises(
        ConfigError, match=r"row 1 has 12.*Raise critic.ppo_max_token_len_per_gpu to at least 13"
    ):
        plan_micro_batches([10, 12, 13], budget)


@pytest.mark.parametrize("sizes", [{"max_tokens": 5, "rows": 5}, {"max_tokens": 0}, {"rows": 0}])
def test_budget_is_either_tokens_or_rows(sizes):
    with pytest.raises(ConfigError):
        TokenBudget(**sizes)
