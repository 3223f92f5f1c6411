"""Choices that must not change a run: the split into micro-batches, and log-probs computed twice or
once."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cases import cases
from tests.trainer.runs import PPO, run, step_lines, weights, without_times
from tests.trainer.test_extending import train
from verl.trainer import PPOTrainer

KL = ["actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.entropy_coeff=0.01"]


def assert_close_runs(one, other) -> None:
    for line, expected in zip(
        without_times(step_lines(one)), without_times(step_lines(other)), strict=True
    ):
        assert line.keys() == expected.keys()
        differing = {
            name: (value, expected[name])
            for name, value in line.items()
            if value != pytest.approx(expected[name], rel=1e-5, abs=1e-5)
        }
        assert differing == {}


def relative_distance(one, other) -> float:
    apart = sum(float((one[name] - other[name]).square().sum()) for name in one)
    return (apart / sum(float(other[name].square().sum()) for name in other)) ** 0.5


ALGORITHMS = {"grpo": [], "ppo": PPO}
ONE_STEP = [*KL, "trainer.max_steps=1", "trainer.save_freq=1"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a step without micro-batches, made once for each algorithm."""
    folders: dict[str, Path] = {}

    def folder_of(algorithm: str) -> Path:
        if algorithm not in folders:
            folders[algorithm] = tmp_path_factory.mktemp(algorithm)
            assert run(folders[algorithm], *ALGORITHMS[algorithm], *ONE_STEP) == 0
        return folders[algorithm]

    return folder_of


@pytest.mark.parametrize("algorithm", cases(ALGORITHMS, quick=lambda name: name == "grpo"))
@pytest.mark.parametrize(
    "sizes",
    [
        [
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=3",
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=5",
            "critic.ppo_micro_batch_size_per_gpu=1",
        ],
        [
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=72",
            "critic.ppo_max_token_len_per_gpu=72",
        ],
    ],
    ids=["rows", "tokens"],
)
def test_metrics_do_not_depend_on_micro_batches(tmp_path, whole, algorithm, sizes):
    assert run(tmp_path, *ALGORITHMS[algorithm], *ONE_STEP, *sizes) == 0
    assert_close_runs(tmp_path, whole(algorithm))
    # Adam turns the rounding of a gradient near zero into a full step, but only for few weights.
    assert relative_distance(weights(tmp_path, 1), weights(whole(algorithm), 1)) < 1e-4


class Reading(PPOTrainer):
    reads_old_log_probs = True


def test_old_log_probs_computed_or_skipped_give_the_same_update(tmp_path):
    train(Reading, tmp_path / "computed", *KL, "trainer.save_freq=2")
    train(PPOTrainer, tmp_path / "skipped", *KL, "trainer.save_freq=2")
    computed, skipped = (
        without_times(step_lines(tmp_path / name)) for name in ("computed", "skipped")
    )
    assert computed[0].keys() == skipped[0].keys()
    assert_close_runs(tmp_path / "computed", tmp_path / "skipped")
    assert (
        relative_distance(weights(tmp_path / "computed", 2), weights(tmp_path / "skipped", 2))
        < 1e-5
    )


def test_the_slow_reference_engine_gives_the_same_run(tmp_path):
    """Expect equal tokens from equal logits, and equal numbers in the first step up to rounding."""
    assert run(tmp_path / "hf", "actor_rollout_ref.rollout.name=hf", "trainer.max_steps=1") == 0
    assert run(tmp_path / "embedded", "trainer.max_steps=1") == 0
    hf, embedded = (step_lines(tmp_path / name)[0] for name in ("hf", "embedded"))
    for name in ("critic/score/mean", "response_length/mean", "actor/entropy", "actor/grad_norm"):
        assert hf[name] == pytest.approx(embedded[name], rel=1e-3, abs=1e-5)
    assert hf["training/rollout_probs_diff_max"] < 1e-4
