"""The toy run: its output, that it learns, and that frozen parts do not move."""

import re

import pytest

from tests.trainer.runs import PPO, TOY, metric_lines, run, same_bits, step_lines, weights


def test_ten_steps_print_ten_lines_and_the_end(tmp_path, capfd):
    assert (
        run(
            tmp_path,
            "trainer.max_steps=10",
            "data.train_batch_size=8",
            base=["data.dataset_name=toy"],
        )
        == 0
    )
    out = capfd.readouterr().out
    lines = re.findall(
        r"^\[Step (\d+)/10\] Actor loss: \S+ \| Reward: \S+ \| KL: \S+", out, flags=re.M
    )
    assert lines == [str(step) for step in range(1, 11)]
    assert re.search(r"^Training completed in \d+\.\ds$", out, flags=re.M)
    assert "Device: cpu" in out
    assert "; 1 rank on 1 node" in out

    rewards = [line["critic/score/mean"] for line in step_lines(tmp_path)]
    assert sum(rewards[-3:]) / 3 >= sum(rewards[:3]) / 3 + 0.25


def test_ppo_learns_too(tmp_path):
    assert (
        run(
            tmp_path,
            *PPO,
            "trainer.max_steps=7",
            "data.train_batch_size=8",
            "actor_rollout_ref.rollout.n=8",
        )
        == 0
    )
    rewards = [line["critic/score/mean"] for line in step_lines(tmp_path)]
    assert rewards[-1] + rewards[-2] > rewards[0] + rewards[1] + 0.2


@pytest.mark.parametrize("algorithm", [[], PPO], ids=["grpo", "ppo"])
def test_a_learning_rate_of_zero_moves_nothing(tmp_path, algorithm):
    still = ["actor_rollout_ref.actor.optim.lr=0", "critic.optim.lr=0", "trainer.save_freq=1"]
    algorithm = [override for override in algorithm if "lr" not in override]
    assert run(tmp_path, *algorithm, *still) == 0
    assert same_bits(weights(tmp_path, 1), weights(tmp_path, 2))
    if algorithm:
        assert same_bits(weights(tmp_path, 1, "critic"), weights(tmp_path, 2, "critic"))
    assert all(
        line["actor/lr"] == 0 and line["actor/grad_norm"] > 0 for line in step_lines(tmp_path)
    )


def test_the_critic_warms_up_alone(tmp_path):
    saved = ["trainer.save_freq=1", "trainer.critic_warmup=1"]
    assert run(tmp_path, *PPO, *saved) == 0
    first, second = step_lines(tmp_path)
    assert "actor/pg_loss" not in first
    assert "critic/vf_loss" in first
    assert "actor/pg_loss" in second
    assert not same_bits(weights(tmp_path, 1), weights(tmp_path, 2))


def test_the_same_seed_gives_the_same_run_and_another_seed_another(tmp_path):
    for name, seed in (("one", 0), ("two", 0), ("three", 1)):
        assert (
            run(tmp_path / name, f"actor_rollout_ref.rollout.seed={seed}", "trainer.save_freq=2")
            == 0
        )
    one, two, three = (weights(tmp_path / name, 2) for name in ("one", "two", "three"))
    assert same_bits(one, two)
    assert not same_bits(one, three)


def test_a_last_epoch_ends_the_run(tmp_path):
    """Split ten prompts into two whole batches of four an epoch."""
    base = [override for override in TOY if "max_steps" not in override]
    assert run(tmp_path, "trainer.total_epochs=2", base=base) == 0
    assert [line["training/epoch"] for line in metric_lines(tmp_path)] == [0, 0, 1, 1]


def test_the_log_interval_thins_only_the_console(tmp_path, capfd):
    assert run(tmp_path, "trainer.log_interval=3", "trainer.max_steps=4") == 0
    assert re.findall(r"^\[Step (\d)/4\]", capfd.readouterr().out, flags=re.M) == ["1", "3", "4"]
    assert [line["step"] for line in metric_lines(tmp_path)] == [1, 2, 3, 4]
