"""Metrics with the keys of verl 0.5, on small batches counted by hand."""

import warnings
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from verl.trainer.ppo.metric_utils import (  # pyright: ignore[reportMissingImports]
        bootstrap_metric,
        calc_maj_val,
        compute_data_metrics,
        compute_throughout_metrics,
        compute_timing_metrics,
        process_validation_metrics,
    )
    from verl.utils.metric import reduce_metrics  # pyright: ignore[reportMissingImports]


def batch() -> SimpleNamespace:
    """Make two rows: prompts of 2 and 1 tokens, padded to 2; responses of 3 and 1, padded to 3."""
    columns = {
        "responses": torch.zeros(2, 3),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 0, 0]]),
        "response_mask": torch.tensor([[1, 0, 1], [1, 0, 0]]),  # the middle token comes from a tool
        "token_level_scores": torch.tensor([[0.0, 0.0, 2.0], [4.0, 0.0, 0.0]]),
        "token_level_rewards": torch.tensor([[0.0, 0.0, 1.0], [2.0, 0.0, 0.0]]),
        "advantages": torch.tensor([[1.0, 99.0, 2.0], [6.0, 99.0, 99.0]]),
        "returns": torch.tensor([[1.0, 99.0, 3.0], [8.0, 99.0, 99.0]]),
        "values": torch.tensor([[0.0, 99.0, 4.0], [5.0, 99.0, 99.0]]),
    }
    return SimpleNamespace(
        batch=columns, non_tensor_batch={}, meta_info={"global_token_num": [5, 2]}
    )


def test_numbers_of_a_batch():
    metrics = compute_data_metrics(batch(), use_critic=True)
    spread = {
        name: [metrics.pop(f"{name}/{of}") for of in ("mean", "max", "min")] for name in NAMES
    }
    assert spread == {
        "critic/score": [3, 4, 2],
        "critic/rewards": [1.5, 2, 1],
        "critic/advantages": [3, 6, 1],
        "critic/returns": [4, 8, 1],
        "critic/values": [3, 5, 0],
        "response_length": [2, 3, 1],
        "prompt_length": [1.5, 2, 1],
    }

    errors = torch.tensor([1.0, -1.0, 3.0])
    returns = torch.tensor([1.0, 3.0, 8.0])
    explained = 1 - (errors.var() / (returns.var() + 1e-5)).item()
    assert metrics.pop("critic/vf_explained_var") == pytest.approx(explained)
    assert metrics == {"response_length/clip_ratio": 0.5, "prompt_length/clip_ratio": 0.5}


NAMES = (
    "critic/score",
    "critic/rewards",
    "critic/advantages",
    "critic/returns",
    "critic/values",
    "response_length",
    "prompt_length",
)


def test_turns_are_counted_without_a_critic():
    data = batch()
    data.non_tensor_batch["__num_turns__"] = np.array([2, 4])
    metrics = compute_data_metrics(data, use_critic=False)
    assert not [name for name in metrics if "values" in name or "vf_" in name]
    turns = [metrics[f"num_turns/{of}"] for of in ("min", "max", "mean")]
    assert turns == [2, 4, 3]


def test_generation_time_counts_response_tokens_only():
    metrics = compute_timing_metrics(batch(), {"gen": 0.4, "ref": 0.7, "testing": 3.0})
    assert metrics == pytest.approx(
        {
            "timing_s/gen": 0.4,
            "timing_s/ref": 0.7,
            "timing_s/testing": 3.0,
            "timing_per_token_ms/gen": 100.0,
            "timing_per_token_ms/ref": 100.0,
        }
    )


def test_patch_of_the_old_name_takes_effect():
    info = {"prompt_length": torch.tensor([6.0]), "response_length": torch.tensor([4.0])}
    with patch("verl.trainer.ppo.metric_utils._compute_response_info", return_value=info):
        patched = compute_timing_metrics(batch(), {"gen": 0.4, "ref": 0.7})
    assert patched["timing_per_token_ms/gen"] == pytest.approx(100.0)
    assert patched["timing_per_token_ms/ref"] == pytest.approx(70.0)
    assert compute_timing_metrics(batch(), {"ref": 0.7})["timing_per_token_ms/ref"] == 100.0


def test_throughput():
    assert compute_throughout_metrics(batch(), {"step": 2.0}, n_gpus=2) == {
        "perf/total_num_tokens": 7,
        "perf/time_per_step": 2.0,
        "perf/throughput": 1.75,
    }


def test_lists_are_reduced_by_name():
    metrics = {"loss": [1.0, 2.0, 6.0], "max_reward": [1, 5], "error/min": [3, 2], "one": 4.0}
    assert reduce_metrics(metrics) == {"loss": 3.0, "max_reward": 5, "error/min": 2, "one": 4.0}


def test_bootstrap_draws_with_replacement_reproducibly():
    data = [1.0, 2.0, 3.0, 4.0, 5.0]
    (mean, spread), (largest, _) = bootstrap_metric(data, 3, [np.mean, np.max], n_bootstrap=400)
    assert mean == pytest.approx(3.0, abs=0.2)
    assert spread == pytest.approx(np.std(data) / 3**0.5, abs=0.1)
    # E max of 3 draws from 1..5 with replacement: sum of 1 - (k / 5)^3 for k = 0..4
    assert largest == pytest.approx(5 - (1 + 8 + 27 + 64) / 125, abs=0.15)
    again = bootstrap_metric(data, 3, [np.mean, np.max], n_bootstrap=400)
    assert again[0] == (mean, spread)
    with pytest.raises(ValueError):
        bootstrap_metric([], 3, [np.mean])


def test_majority_answer_has_the_value_of_its_first_vote():
    votes = [("B", 0.2), ("A", 0.9), ("A", 0.1), ("B", 0.3), ("A", 0.5)]
    data = [{"pred": pred, "val": value} for pred, value in votes]
    assert calc_maj_val(data, vote_key="pred", val_key="val") == 0.9
    assert calc_maj_val(data[:2], vote_key="pred", val_key="val") == 0.2


def test_validation_of_two_sources():
    infos = {
        "score": [1.0, 0.0, 0.5, 0.7],
        "pred": ["4", "4", "3", "9"],
        "note": ["a", "b", "c", "d"],
    }
    sources = ["math", "math", "math", "code"]
    prompts = ["p", "p", "p", "q"]
    metrics = process_validation_metrics(sources, prompts, infos, seed=42)

    assert metrics["code"] == {"score": {"mean@1": 0.7}}
    of_math = metrics["math"]["score"]
    assert set(metrics["math"]) == {"score"}, "text has no metrics"
    kinds = {f"{kind}@{k}/{of}" for kind in ("best", "worst", "maj") for k in (2, 3) for of in OF}
    assert set(of_math) == {"mean@3", "std@3"} | kinds
    assert of_math["mean@3"] == 0.5
    assert of_math["std@3"] == pytest.approx(np.std([1.0, 0.0, 0.5]))
    assert of_math["worst@3/mean"] < of_math["worst@2/mean"] < 0.5 < of_math["best@2/mean"]


@pytest.mark.parametrize("preds", [[None, "4"], ["4", None], [None, None]])
def test_an_answer_that_was_not_found_has_no_metrics(preds: list[str | None]):
    infos = {"score": [1.0, 0.0], "pred": preds}
    metrics = process_validation_metrics(["math"] * 2, ["p"] * 2, infos)
    assert set(metrics["math"]) == {"score"}
    assert metrics["math"]["score"]["mean@2"] == 0.5
    assert "maj@2/mean" in metrics["math"]["score"]


OF = ("mean", "std")
