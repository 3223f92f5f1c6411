"""Algorithms in whole steps: every estimator with every loss, PF-PPO, losses of the whole mini-batch,
controllers and the log."""

import logging
import math
from collections.abc import Iterator

import pytest
import torch

from tests.trainer.runs import (
    command_line,
    run,
    same_bits,
    start_trainer,
    step_lines,
    varied_reward,
    weights,
    without_times,
)
from verl.algorithms.advantages import advantage_estimators
from verl.algorithms.policy_losses import policy_losses
from verl.config import load_config
from verl.protocol import DataProto
from verl.trainer.ppo_trainer import PPOTrainer
from verl.utils.errors import ConfigError
from verl.workers.policy_objective import PolicyObjective

ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"
FILTER = "algorithm.filter_groups"
LOSSES = sorted(name for name in policy_losses if not name.startswith("test_"))
# turn_rloo reads the turns of agent loops, which this trainer does not play.
ESTIMATORS = sorted(
    name for name in advantage_estimators if not name.startswith("test_") and name != "turn_rloo"
)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PPOTrainer]:
    """Build a trainer with critic, reference and greedy scores, as some estimators read them.

    It makes two updates a step.
    """
    folder = tmp_path_factory.mktemp("pairs")
    given = [
        "algorithm.adv_estimator=remax",
        "critic.enable=True",
        "data.train_batch_size=4",
        "trainer.logger=[]",
        "data.max_response_length=4",
        "actor_rollout_ref.rollout.n=2",
        f"{ACTOR}.ppo_mini_batch_size=2",
        f"{ACTOR}.use_kl_loss=True",
        f"{ACTOR}.policy_loss.clip_cov_lb=0",
        f"{ACTOR}.policy_loss.clip_cov_ratio=0.2",
        "algorithm.gdpo_reward_keys=[score,length]",
    ]

    trainer = start_trainer(folder, *given, reward_fn=varied_reward, val_reward_fn=varied_reward)
    trainer.sync_weights()
    yield trainer
    trainer.tracker.finish()


def third_of_losses(estimator: str) -> list[str]:
    """Return losses for `estimator` such that all estimators together meet every loss."""
    return LOSSES[ESTIMATORS.index(estimator) % 3 :: 3]


PAIRS = [
    *(pytest.param(name, third_of_losses(name), id=name) for name in ESTIMATORS),
    *(
        pytest.param(name, LOSSES, marks=pytest.mark.slow, id=f"{name}, every loss")
        for name in ESTIMATORS
    ),
]


@pytest.mark.parametrize(("estimator", "losses"), PAIRS)
def test_every_estimator_takes_a_step_with_every_loss(trainer, monkeypatch, estimator, losses):
    trainer.config.algorithm.adv_estimator = estimator
    if estimator != "gae":
        monkeypatch.setattr(trainer, "critic_wg", None)
    if estimator != "remax":  # no greedy scores
        monkeypatch.setattr(
            trainer, "collect", lambda prompts: PPOTrainer.collect(trainer, prompts)
        )

    trainer.estimator = advantage_estimators.get(estimator)
    worker = trainer.actor_wg.worker
    for loss in losses:
        worker.config.actor.policy_loss.loss_mode = loss
        worker.objective = PolicyObjective(worker.config.actor)
        before = {
            name: tensor.clone() for name, tensor in worker.engine.hf_model.state_dict().items()
        }
        trainer.global_step += 1
        trainer.metrics = {}
        batch = trainer.step(next(iter(trainer.train_loader)))
        assert batch.batch["advantages"].isfinite().all()
        assert all(map(math.isfinite, trainer.metrics.values())), (estimator, loss)
        assert trainer.metrics["actor/skipped_updates"] == 0
        assert trainer.metrics["actor/grad_norm"] > 0
        assert not same_bits(before, worker.engine.hf_model.state_dict())


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov"])
def test_a_loss_of_the_whole_mini_batch_is_independent_of_micro_batches(tmp_path, loss):
    own = [
        f"{ACTOR}.policy_loss.loss_mode={loss}",
        f"{ACTOR}.policy_loss.clip_cov_lb=0",
        "trainer.max_steps=1",
        f"{ACTOR}.policy_loss.{loss}_ratio=0.2",
        f"{ACTOR}.ppo_epochs=2",
    ]
    whole = tmp_path / "whole"

    cut = tmp_path / "cut"
    other = tmp_path / "other"
    assert run(whole, *own) == 0
    assert run(cut, *own, f"{ACTOR}.ppo_micro_batch_size_per_gpu=3") == 0
    assert run(other, *own, f"{ACTOR}.policy_loss.{loss}_ratio=0.4") == 0
    one, another, more = (
        [step_lines(folder)[0][f"actor/{name}"] for name in ("pg_clipfrac", "pg_loss", "grad_norm")]
        for folder in (whole, cut, other)
    )

    assert another[0] == pytest.approx(one[0], rel=1e-6), "as many tokens are selected"
    assert abs(more[0] / one[0] - 1) > 0.1
    assert another[1:] == pytest.approx(one[1:], rel=1e-4)


@pytest.mark.parametrize("override", ["algorithm.adv_estimator=remax", f"{FILTER}.enable=True"])
def test_the_plain_step_rejects_settings_that_it_would_ignore(tmp_path, override):
    with pytest.raises(ConfigError, match=r"needs verl\.trainer\.\w+\.\w+Trainer"):
        PPOTrainer(load_config(command_line(tmp_path, override)))


def test_pf_ppo_learns_from_samples_with_a_reward(tmp_path, monkeypatch):
    trainer = start_trainer(
        tmp_path, "algorithm.use_pf_ppo=True", "algorithm.adv_estimator=gae", "trainer.max_steps=1"
    )
    seen = []
    for group, name in (
        (trainer.actor_wg, "update_actor"),
        (trainer.critic_wg, "update_critic"),
    ):
        update = getattr(group, name)
        monkeypatch.setattr(
            group, name, lambda rows, *args, update=update: seen.append(rows) or update(rows, *args)
        )

    trainer.fit()
    critic, actor = (rows.batch["token_level_scores"].sum(-1) for rows in seen)
    assert torch.equal(critic, actor)
    assert len(actor) == 16
    assert (actor == 1).all(), "weights are |score|^2 and scores 0 or 1"


def test_the_entropy_coefficient_is_moved_and_resumes(tmp_path):
    given = [
        "algorithm.entropy_ctrl.type=adaptive",
        "algorithm.entropy_ctrl.target_entropy=20",
        "trainer.save_freq=2",
    ]
    assert run(tmp_path / "moved", *given, "algorithm.entropy_ctrl.delta=0.5") == 0
    assert run(tmp_path / "still", *given, "algorithm.entropy_ctrl.delta=1e-12") == 0
    moved, still = (without_times(step_lines(tmp_path / name)) for name in ("moved", "still"))
    assert moved[0] == still[0], "it starts from actor.entropy_coeff"
    assert not same_bits(weights(tmp_path / "moved", 2), weights(tmp_path / "still", 2))
    state = torch.load(
        tmp_path / "moved" / "global_step_2" / "trainer" / "state.pt", weights_only=False
    )
    assert state["entropy_controller"] == {"coef": 1.0, "value": 1.0}


def test_the_log_states_advantage_and_loss_as_formulas(tmp_path, capfd):
    own = [
        f"{ACTOR}.use_kl_loss=True",
        f"{ACTOR}.entropy_coeff=0.01",
        f"{ACTOR}.clip_ratio_high=0.28",
        "trainer.max_steps=1",
        f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm",
        "algorithm.norm_adv_by_std_in_grpo=False",
        f"{CORRECTION}.rollout_is=token",
    ]
    assert run(tmp_path, *own) == 0

    said = capfd.readouterr()
    text = said.out + said.err
    assert "A = grpo: r - mean of the group\n" in text
    assert "vanilla: max(-r A, -A clip(r, 1 - 0.2, 1 + 0.28)), at most -3.0 A where A < 0" in text
    assert "- 0.01 entropy + 0.001 KL(pi, reference) by low_var_kl" in text
    assert (
        "sum over a response's tokens / data.max_response_length, mean over the responses" in text
    )

    assert "weighted by pi_old / rollout by token, bounded above by 2 (truncate)" in text


def test_a_padded_loss_and_an_estimator_by_path(tmp_path, capfd):
    """Run a recipe for verl 0.5 unchanged: it registers its loss by the old path.

    The log warns of micro-batches.
    """
    recipe = tmp_path / "recipe.py"
    recipe.write_text(
        "from verl.trainer.ppo.core_algos import agg_loss, register_adv_est, register_policy_loss\n"
        "@register_policy_loss('recipe_loss')\n"
        "def loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode='token-mean', "
        "config=None):\n"
        "    kl = ((old_log_prob - log_prob) * response_mask).sum() / response_mask.sum()\n"
        "    pg = agg_loss(-advantages * (log_prob - old_log_prob).exp(), response_mask, "
        "loss_agg_mode)\n"
        "    return pg, config.clip_ratio_c * kl * 0, kl, kl * 0\n"
        "@register_adv_est('recipe_estimator')\n"
        "def estimator(token_level_rewards, response_mask, index, config=None, **kwargs):\n"
        "    scores = token_level_rewards.sum(-1, keepdim=True) - 0.25\n"
        "    return scores * response_mask, scores * response_mask\n"
    )

    own = [
        f"actor_rollout_ref.model.external_lib={recipe}",
        "algorithm.adv_estimator=recipe_estimator",
        f"{ACTOR}.policy_loss.loss_mode=recipe_loss",
        f"{ACTOR}.ppo_mini_batch_size=2",
    ]
    with pytest.warns(DeprecationWarning, match=r"register_policy_loss is now verl\.compat"):
        assert run(tmp_path / "whole", *own) == 0

    assert "recipe_loss: a loss of verl's padded signature" in "".join(capfd.readouterr())
    assert run(tmp_path / "cut", *own, f"{ACTOR}.ppo_micro_batch_size_per_gpu=3") == 0
    one, other = (step_lines(tmp_path / folder)[0] for folder in ("whole", "cut"))
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/ppo_kl"):
        assert other[name] == pytest.approx(one[name], rel=1e-4)
    assert one["actor/grad_norm"] > 0


def test_a_skipped_update_counts_its_rows_once(tmp_path, monkeypatch):
    """Run the loss again to find the bad rows: the mismatch metric counts only the update."""
    trainer = start_trainer(tmp_path, "trainer.logger=[]", "trainer.max_steps=1")
    objective = trainer.actor_wg.worker.objective
    tokens = []
    take = objective.take_mismatch
    monkeypatch.setattr(
        objective,
        "take_mismatch",
        lambda *args: (
            tokens.append(sum(len(seen[0]) for seen in objective.seen._tokens)) or take(*args)
        ),
    )

    def spoilt(batch: DataProto) -> DataProto:
        batch.batch["advantages"][5, 0] = float("nan")
        return batch

    estimate = trainer.estimate_advantages
    monkeypatch.setattr(trainer, "estimate_advantages", lambda batch: spoilt(estimate(batch)))
    trainer.load_checkpoint()
    trainer.global_step = 1
    batch = trainer.step(next(iter(trainer.train_loader)))
    assert trainer.metrics["actor/skipped_updates"] == 1
    assert tokens == [int(batch.batch["response_mask"].sum())]


def test_the_critic_warms_up_for_exactly_the_configured_steps(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    given = [
        "algorithm.adv_estimator=gae",
        "trainer.critic_warmup=2",
        "trainer.max_steps=4",
        "trainer.save_freq=1",
    ]
    assert run(tmp_path, *given) == 0
    assert ["actor/pg_loss" in line for line in step_lines(tmp_path)] == [False, False, True, True]
    first, second, third = (weights(tmp_path, step) for step in (1, 2, 3))
    assert same_bits(first, second)
    assert not same_bits(second, third)
