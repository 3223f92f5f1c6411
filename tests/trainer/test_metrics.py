"""The numbers of a step and of a validation, against counts by hand."""

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.runs import start_trainer
from verl.protocol import DataProto
from verl.rewards.results import checked_result
from verl.trainer import scored
from verl.trainer.metrics import data_metrics, explained_variance, timing_metrics
from verl.trainer.rows import group_numbers
from verl.trainer.validation import validation_metrics
from verl.utils.errors import RewardError


def batch_of(*, with_values: bool = False) -> DataProto:
    """Return three rows: prompts of 1, 2, 2 tokens (P = 3), responses of 2, 4, 1 (R = 4)."""
    lengths = [(1, 2), (2, 4), (2, 1)]
    prompt = torch.tensor([[i >= 3 - p for i in range(3)] for p, _ in lengths]).long()
    response = torch.tensor([[i < r for i in range(4)] for _, r in lengths]).long()
    scores = torch.zeros(3, 4)
    scores[0, 1], scores[1, 3], scores[2, 0] = 1.0, -2.0, 4.0
    columns = {
        "prompts": prompt * 7,
        "responses": response * 9,
        "attention_mask": torch.cat([prompt, response], dim=1),
        "response_mask": response.clone(),
        "token_level_scores": scores,
        "token_level_rewards": scores - 0.5 * response,
        "advantages": torch.where(response.bool(), torch.arange(12.0).reshape(3, 4), math.nan),
        "returns": torch.where(response.bool(), torch.arange(12.0).reshape(3, 4) * 2, math.nan),
    }
    if with_values:
        columns["values"] = torch.where(response.bool(), torch.arange(12.0).reshape(3, 4), math.nan)

    return DataProto.from_dict(tensors=columns, non_tensors={"uid": ["a", "a", "b"]})


def test_data_metrics_count_only_real_tokens():
    metrics = data_metrics(batch_of())
    assert metrics["critic/score/mean"] == 1.0
    assert (metrics["critic/score/max"], metrics["critic/score/min"]) == (4.0, -2.0)
    assert metrics["critic/rewards/mean"] == pytest.approx((0.0 - 4.0 + 3.5) / 3)
    assert metrics["critic/advantages/mean"] == pytest.approx((0 + 1 + 4 + 5 + 6 + 7 + 8) / 7)
    assert (metrics["critic/returns/max"], metrics["critic/returns/min"]) == (16.0, 0.0)
    assert metrics["response_length/mean"] == pytest.approx(7 / 3)
    assert metrics["response_length/clip_ratio"] == pytest.approx(1 / 3)
    assert metrics["prompt_length/mean"] == pytest.approx(5 / 3)
    assert metrics["prompt_length/clip_ratio"] == 0
    assert not any("values" in name or "vf" in name for name in metrics)


def test_data_metrics_include_the_quality_of_the_critic():
    metrics = data_metrics(batch_of(with_values=True))
    assert metrics["critic/values/max"] == 8.0
    # returns are twice the values: the residual has a quarter of the variance
    assert metrics["critic/vf_explained_var"] == pytest.approx(0.75)


def test_a_dropped_row_has_no_score():
    batch = batch_of()
    batch.batch["response_mask"][2] = 0
    metrics = data_metrics(batch)
    assert metrics["critic/score/max"] == 1.0
    assert metrics["critic/advantages/max"] == 7.0
    assert metrics["response_length/min"] == 1, "it was generated all the same"


@given(st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=20), st.floats(-3, 3, width=32))
def test_explained_variance_of_perfect_and_of_constant_values(returns, constant):
    returns = torch.tensor(returns)
    spread = returns.var(unbiased=False).item()
    assert explained_variance(returns, returns) == (1.0 if spread >= 1e-12 else 0.0)
    assert explained_variance(torch.full_like(returns, constant), returns) == pytest.approx(
        0.0, abs=1e-3 / max(spread, 1e-3)
    )


def test_explained_variance_of_no_token_is_zero():
    assert explained_variance(torch.zeros(0), torch.zeros(0)) == 0.0


def test_timing_metrics():
    seconds = {"gen": 2.0, "update_actor": 6.0, "testing": 5.0, "step": 8.0}
    metrics = timing_metrics(batch_of(), seconds, num_devices=2)
    assert metrics["timing_s/testing"] == 5.0
    assert metrics["timing_per_token_ms/gen"] == pytest.approx(2000 / 7)
    assert metrics["timing_per_token_ms/update_actor"] == pytest.approx(6000 / 12)
    assert "timing_per_token_ms/testing" not in metrics
    assert metrics["perf/total_num_tokens"] == 12
    assert metrics["perf/throughput"] == pytest.approx(12 / 16)


# ---- validation ----------------------------------------------------------------------------------


def test_mean_best_and_majority_by_source():
    sources = ["a"] * 6 + ["b"] * 2
    prompts = [0, 0, 0, 1, 1, 1, 2, 3]
    scores = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.25, 0.75]
    answers = ["x", "y", "y", "z", "w", "w", None, None]
    metrics = validation_metrics(sources, prompts, scores, answers)
    assert metrics == {
        "val-core/a/reward/mean@3": pytest.approx(0.5),
        "val-core/a/reward/best@3": 1.0,
        "val-core/a/reward/maj@3": 0.5,
        "val-core/b/reward/mean@1": 0.5,
    }


def test_prompts_count_the_same_for_any_number_of_samples():
    assert (
        validation_metrics(["a"] * 3, [0, 0, 1], [1.0, 1.0, 0.0])["val-core/a/reward/mean@2"] == 0.5
    )


def test_a_tie_between_answers_goes_to_the_first():
    metrics = validation_metrics(["a"] * 4, [0] * 4, [0.0, 1.0, 0.0, 1.0], ["x", "y", "x", "y"])
    assert metrics["val-core/a/reward/maj@4"] == 0.0


def test_no_majority_without_answers():
    assert "val-core/a/reward/maj@2" not in validation_metrics(["a"] * 2, [0, 0], [1.0, 0.0])
    assert "val-core/a/reward/maj@2" not in validation_metrics(
        ["a"] * 2, [0, 0], [1.0, 0.0], [None, None]
    )


def test_any_value_can_be_an_answer():
    assert [scored.vote(answer) for answer in (None, math.nan, [1, 2], 3, "x")] == [
        None,
        None,
        "[1, 2]",
        "3",
        "x",
    ]


def test_a_response_without_answer_does_not_vote():
    answers = [None, None, "x", None, None, None]
    metrics = validation_metrics(
        ["a"] * 6, [0, 0, 0, 1, 1, 1], [0.0, 0.0, 1.0, 0.0, 0.0, 0.75], answers
    )
    assert metrics["val-core/a/reward/maj@3"] == pytest.approx((1.0 + 0.25) / 2)


def test_numeric_fields_of_the_reward_have_metrics_of_their_own():
    fields = {
        "acc": [True, False, 1.0, None, math.nan],
        "length": [1, 2, 3, 4, np.float32(6)],
        "note": ["x", None, None, "y", None],
    }
    metrics = validation_metrics(
        ["a"] * 3 + ["b"] * 2, [0, 0, 1, 2, 3], [0.5, -0.5, 1.0, 0.25, 0.75], fields=fields
    )
    assert metrics == {
        "val-core/a/acc/mean@2": 0.75,
        "val-core/a/acc/best@2": 1.0,
        "val-aux/a/reward/mean@2": 0.5,
        "val-aux/a/reward/best@2": 0.75,
        "val-aux/a/length/mean@2": 2.25,
        "val-aux/a/length/best@2": 2.5,
        "val-core/b/reward/mean@1": 0.5,
        "val-aux/b/length/mean@1": 5.0,
    }


def test_no_samples_no_metrics():
    assert validation_metrics([], [], []) == {}


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(0, 3), st.floats(-1, 1)),
        min_size=1,
        max_size=24,
    )
)
def test_best_is_never_below_the_mean_and_order_does_not_matter(rows):
    rows = [(source, f"{source}{prompt}", score) for source, prompt, score in rows]
    metrics = validation_metrics(*map(list, zip(*rows)))
    for name, value in metrics.items():
        if "best@" in name:
            assert value >= metrics[name.replace("best@", "mean@")] - 1e-12
    turned = validation_metrics(*map(list, zip(*reversed(rows))))
    assert turned == {name: pytest.approx(value) for name, value in metrics.items()}


# ---- fields of a reward in the batch -------------------------------------------------------------


def record(batch: DataProto, result: dict[str, Any]) -> dict[str, Any]:
    checked = checked_result(result, batch.batch["responses"])
    scored.record_scores(batch, checked)
    return checked


def test_record_scores_keeps_extra_fields_but_never_replaces_a_column():
    batch = batch_of()
    extra = {"pred": ["1", None, "3"], "uid": [0, 0, 0], "matrix": [np.ones(2)] * 3}
    record(batch, {"reward_tensor": torch.ones(3, 4), "reward_extra_info": extra, "dropped": [1]})
    assert list(batch.non_tensor_batch["uid"]) == ["a", "a", "b"]
    assert list(batch.non_tensor_batch["pred"]) == ["1", None, "3"]
    assert batch.non_tensor_batch["matrix"].shape == (3,)
    assert batch.batch["response_mask"].sum(-1).tolist() == [2, 0, 1]
    assert batch.batch["attention_mask"].sum(-1).tolist() == [3, 6, 3]
    assert group_numbers(batch).unique().numel() == 3, "the dropped row is out of its group"


def test_record_scores_takes_scores_alone_and_computes_in_float32():
    batch = batch_of()
    scores = torch.ones(3, 4, dtype=torch.bfloat16, requires_grad=True)
    assert scored.reward_metrics(record(batch, {"reward_tensor": scores})) == {}
    written = batch.batch["token_level_scores"]
    assert written.dtype == torch.float32
    assert not written.requires_grad, "the record of the run cannot write it"


def test_record_scores_rejects_a_batch_without_any_score():
    with pytest.raises(RewardError, match="All samples of this step were dropped"):
        record(
            batch_of(),
            {"reward_tensor": torch.zeros(3, 4), "reward_extra_info": {}, "dropped": [0, 1, 2]},
        )


def test_record_scores_names_an_unsupported_field_of_a_custom_manager():
    result = {
        "reward_tensor": torch.ones(3, 4),
        "reward_extra_info": {"match": [None, re.match("a", "a"), None]},
    }
    with pytest.raises(
        RewardError, match="field 'match' of row 1 is of type Match and cannot be sent"
    ):
        record(batch_of(), result)


def test_reward_metrics_are_means_of_numeric_fields():
    extra = {
        "acc": [True, False, np.float32(1.0)],
        "pred": ["1", "2", "3"],
        "some": [2.0, math.nan, 4.0],
        "parsed": [None, 3.0, None],
        "none": [math.nan],
        "complex": [np.complex64(1)],
    }
    metrics = scored.reward_metrics(
        {"reward_extra_info": extra, "metrics": {"reward/num_errors": 0}}
    )

    assert metrics == {
        "reward/num_errors": 0,
        "reward/acc/mean": pytest.approx(2 / 3),
        "reward/some/mean": 3.0,
        "reward/parsed/mean": 3.0,
    }


def test_the_peak_of_the_ranks_is_reported_where_the_driver_has_none(tmp_path, monkeypatch):
    trainer = start_trainer(tmp_path, "trainer.logger=[]", "trainer.save_freq=-1")
    peak = {"perf/max_memory_allocated_gb": 5.0}
    monkeypatch.setattr(trainer.actor_wg.worker, "peak_memory", lambda: peak)
    trainer.load_checkpoint()
    trainer.run_step(next(iter(trainer.train_loader)))
    assert trainer.metrics["perf/max_memory_allocated_gb"] == 5.0
    assert trainer.metrics["perf/max_memory_reserved_gb"] == 0.0
