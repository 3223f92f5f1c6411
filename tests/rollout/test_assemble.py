"""Completions to columns, and every error that an engine could make in them."""

import numpy as np
import pytest
import torch

from verl.columns import COLUMNS
from verl.rollout import Completion, Segment, Trajectory, assemble, trajectories_of
from verl.utils.errors import RolloutError


def completion(sample_id: int, *token_ids: int, log_probs: list[float] | None = None) -> Completion:
    own = [-0.5 * (i + 1) for i in range(len(token_ids))] if log_probs is None else log_probs
    return Completion(
        sample_id=sample_id, token_ids=list(token_ids), log_probs=own, finish_reason="stop"
    )


def columns(prompts, completions, vocabulary=None):
    trajectories = trajectories_of(prompts, completions)
    return assemble(
        trajectories, prompt_length=4, response_length=3, pad_token_id=9, vocabulary=vocabulary
    )


def test_prompts_are_padded_left_and_responses_right():
    batch = columns([[1, 2], [3, 4, 5, 6]], [completion(1, 7), completion(0, 5, 6, 8)])
    assert batch["prompts"].tolist() == [[9, 9, 1, 2], [3, 4, 5, 6]]
    assert batch["responses"].tolist() == [[5, 6, 8], [7, 9, 9]]
    assert batch["input_ids"].tolist() == [[9, 9, 1, 2, 5, 6, 8], [3, 4, 5, 6, 7, 9, 9]]
    assert batch["attention_mask"].tolist() == [[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 0, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 4, 4]]
    assert batch["response_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["rollout_log_probs"].tolist() == [[-0.5, -1.0, -1.5], [-0.5, 0.0, 0.0]]


def test_the_columns_match_the_table():
    batch = columns([[1]], [completion(0, 2)])
    sizes = {"B": 1, "P": 4, "R": 3, "T": 7}
    expected = {
        c.name: c for c in COLUMNS.values() if c.written_by == "generate" and c.dtype != "object"
    }
    assert set(batch) == set(expected)
    for name, tensor in batch.items():
        assert tensor.dtype == getattr(torch, expected[name].dtype)
        assert list(tensor.shape) == [sizes[letter] for letter in expected[name].shape.split()]


@pytest.mark.parametrize(
    ("completions", "message"),
    [
        ([completion(0, 2)], "Expected 2 samples from the engine, 1 are missing: 1"),
        ([completion(0, 2), completion(1, 2), completion(0, 2)], "sample 0 twice"),
        ([completion(0, 2), completion(2, 2)], "sample 2, but 0..1"),
        ([completion(0, 2), completion(1)], "empty response for sample 1"),
        (
            [completion(0, 2), completion(1, 2, 2, 2, 2)],
            "response of sample 1 has 4 tokens, its column 3",
        ),
        (
            [completion(0, 2), completion(1, 2, 3, log_probs=[-1.0])],
            "2 finite log-probs for sample 1, got 1",
        ),
        ([completion(0, 2), completion(1, 2, log_probs=[float("nan")])], "some of them not finite"),
        (
            [completion(0, 2), completion(1, 2, 3, log_probs=[-1.0, 2.5])],
            "log-prob is at most 0, but the engine returned 2.5 for a token of sample 1",
        ),
    ],
)
def test_errors_of_an_engine_name_the_sample(completions, message):
    with pytest.raises(RolloutError, match=message):
        columns([[1], [1]], completions)


@pytest.mark.parametrize("wrong", [10, 10_000, -1, 2**70, 1.5, None, "a", np.int64(10)])
def test_a_token_id_outside_of_the_vocabulary_names_sample_and_id(wrong):
    message = rf"token ids 0\.\.9, because the model embeds 10 .* sample 1 has {wrong}\."
    with pytest.raises(RolloutError, match=message):
        columns([[1], [1]], [completion(0, 2, 9), completion(1, 0, wrong)], vocabulary=10)


def test_without_a_vocabulary_token_ids_are_integers_from_zero_on():
    assert columns([[1]], [completion(0, 10_000)])["responses"].tolist() == [[10_000, 9, 9]]
    with pytest.raises(RolloutError, match="integers of at least 0.* sample 0 has -1"):
        columns([[1]], [completion(0, -1)])


def test_token_ids_may_be_integers_of_numpy():
    drawn = completion(0, *np.array([5, 6], dtype=np.uint32))
    assert columns([[1]], [drawn], vocabulary=10)["responses"].tolist() == [[5, 6, 9]]


def test_a_log_prob_may_be_rounded_above_zero():
    batch = columns([[1]], [completion(0, 2, 3, log_probs=[0.0, 1e-6])])
    assert batch["rollout_log_probs"].tolist() == [[0.0, pytest.approx(1e-6), 0.0]]


def test_an_overlong_prompt_is_an_error():
    with pytest.raises(RolloutError, match="prompt of sample 0 has 5 tokens, its column 4"):
        columns([[1, 2, 3, 4, 5]], [completion(0, 2)])


def test_only_drawn_tokens_have_a_mask_and_a_log_prob():
    episode = Trajectory(
        row=0,
        prompt_ids=[1, 2],
        segments=[
            Segment(source="model", token_ids=[5], log_probs=[-0.5], turn=0),
            Segment(source="tool", token_ids=[6, 7], turn=1),
            Segment(source="model", token_ids=[8, 3], log_probs=[-1.0, -2.0], turn=1),
        ],
    )
    batch = assemble([episode], prompt_length=3, response_length=6, pad_token_id=9, with_turns=True)

    assert batch["responses"].tolist() == [[5, 6, 7, 8, 3, 9]]
    assert batch["response_mask"].tolist() == [[1, 0, 0, 1, 1, 0]]
    assert batch["attention_mask"].tolist() == [[0, 1, 1, 1, 1, 1, 1, 1, 0]]
    assert batch["rollout_log_probs"].tolist() == [[-0.5, 0.0, 0.0, -1.0, -2.0, 0.0]]
    assert batch["turn_of_token"].tolist() == [[0, -1, -1, 1, 1, -1]]


@pytest.mark.parametrize("dropped", ["the segment", "the episode"])
def test_dropped_tokens_keep_their_log_probs_but_no_mask(dropped: str):
    drawn = Segment(
        source="model", token_ids=[5], log_probs=[-0.5], is_trained=dropped == "the episode"
    )
    episode = Trajectory(
        row=0, prompt_ids=[1], segments=[drawn], is_dropped=dropped == "the episode"
    )
    batch = assemble([episode], prompt_length=1, response_length=1, pad_token_id=9)
    assert batch["response_mask"].tolist() == [[0]]
    assert batch["rollout_log_probs"].tolist() == [[-0.5]]
