"""Algorithms in whole steps: every estimator with every loss, DAPO, ReMax, PF-PPO, the corrections,
and resume."""

import logging
import math
import runpy
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainer.runs import (
    command_line,
    run,
    same_bits,
    start_trainer,
    step_lines,
    weights,
    without_times,
)
from verl.algorithms.advantages import advantage_estimators
from verl.algorithms.policy_losses import policy_losses
from verl.config import load_config
from verl.protocol import DataProto
from verl.trainer.dapo import DAPOTrainer, joined, rows_that_differ
from verl.trainer.ppo_trainer import PPOTrainer
from verl.trainer.remax import ReMaxTrainer
from verl.utils.errors import ConfigError, DataError, RewardError
from verl.workers.policy_objective import PolicyObjective

ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"
FILTER = "algorithm.filter_groups"
LOSSES = sorted(name for name in policy_losses if not name.startswith("test_"))
# turn_rloo reads the turns of agent loops, which this trainer does not play.
ESTIMATORS = sorted(
    name for name in advantage_estimators if not name.startswith("test_") and name != "turn_rloo"
)


def varied_reward(data: DataProto, return_dict: bool = False) -> Any:
    """Return a reward that differs between samples: the fraction of tokens with an even number."""
    mask = data.batch["response_mask"]
    even = ((data.batch["responses"] % 2 == 0) & mask.bool()).sum(-1) / mask.sum(-1)
    scores = torch.zeros(mask.shape)
    scores[torch.arange(len(mask)), mask.sum(-1) - 1] = even
    extra = {"even": even.tolist(), "length": mask.sum(-1).tolist()}
    return {"reward_tensor": scores, "reward_extra_info": extra} if return_dict else scores


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


# ---------------------------------------------------------------- the planned pre-pass of the covar


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


# ---------------------------------------------------------------- DAPO


def scored_batch(scores: list[float], uids: list[str], dropped: tuple[int, ...] = ()) -> DataProto:
    mask = torch.ones(len(scores), 2, dtype=torch.int64)
    mask[list(dropped)] = 0
    columns = {
        "token_level_scores": torch.tensor([[0.0, score] for score in scores]),
        "response_mask": mask,
    }
    extra = {
        "uid": np.array(uids, dtype=object),
        "acc": np.array([score > 0.5 for score in scores], dtype=object),
    }
    return DataProto.from_dict(
        tensors=columns, non_tensors=extra, meta_info={"reward_fields": ["acc"]}
    )


def test_prompts_with_equal_rewards_are_identified():
    batch = scored_batch([0.0, 1.0, 0.6, 0.9, 1.0, 1.0], ["a", "a", "b", "b", "c", "c"])
    assert rows_that_differ(batch, "score").tolist() == [True, True, True, True, False, False]
    assert rows_that_differ(batch, "seq_final_reward").tolist() == [True] * 4 + [False] * 2
    assert rows_that_differ(batch, "acc").tolist() == [True, True, False, False, False, False]
    dropped = scored_batch([0.0, 1.0, 1.0, 0.5, 0.5, 0.0], ["a"] * 3 + ["b"] * 3, dropped=(0, 5))
    assert not rows_that_differ(dropped, "score").any(), (
        "a reward that could not be had is no difference"
    )
    with pytest.raises(ConfigError, match=r"metric='accuracy'.*score, acc"):
        rows_that_differ(batch, "accuracy")


def test_the_filter_metric_needs_one_value_per_response():
    batch = scored_batch([0.0, 1.0], ["a", "a"])
    batch.non_tensor_batch["acc"] = np.array(
        [torch.tensor(1.0), torch.tensor(1.0), None], dtype=object
    )[:-1]
    assert not rows_that_differ(batch, "acc").any()
    batch.non_tensor_batch["acc"] = np.array([["1"], ["2"], None], dtype=object)[:-1]
    with pytest.raises(
        ConfigError,
        match=r"metric='acc' must be a field of one number or text .*\['1'\] of type list",
    ):
        rows_that_differ(batch, "acc")


def test_batches_with_different_reward_fields_join():
    one = scored_batch([0.0], ["a"])
    other = scored_batch([1.0], ["b"])
    other.non_tensor_batch["note"] = np.array(["x"], dtype=object)
    other.meta_info["reward_fields"] = ["acc", "note"]
    whole = joined([one, other])
    assert whole.non_tensor_batch["note"].tolist() == [None, "x"]
    assert whole.meta_info["reward_fields"] == ["acc", "note"]


DAPO = [f"{FILTER}.enable=True", f"{ACTOR}.clip_ratio_high=0.28", "trainer.max_steps=4"]


class Watched(DAPOTrainer):
    """Record the batch that every step trained on, and the prompts that it drew."""

    def collect(self, prompts, first_row=0):
        batch = super().collect(prompts, first_row)
        self.batches = [*getattr(self, "batches", []), batch]
        return batch


def test_a_dapo_batch_is_full_of_prompts_with_unequal_rewards(tmp_path):
    trainer = start_trainer(tmp_path, *DAPO, kind=Watched)
    trainer.fit()
    lines = step_lines(tmp_path)

    for batch, line in zip(trainer.batches, lines, strict=True):
        assert len(batch) == 16
        assert len(set(batch.non_tensor_batch["uid"])) == 4
        assert rows_that_differ(batch, "score").all()
        assert 0 < line["train/kept_prompts"] <= 1

    rounds = [line["train/num_gen_batches"] for line in lines]
    assert max(rounds) > 1, "some prompts of the toy set have no spread"
    assert trainer.train_loader.state_dict()["epoch"] == int(sum(rounds)) // 2, (
        "two batches an epoch, counted all"
    )
    newest_batches = np.cumsum(rounds).astype(int) - 1  # counted from 0
    assert [line["training/epoch"] for line in lines] == (newest_batches // 2).tolist()
    later = next(batch for batch, number in zip(trainer.batches, rounds) if number > 1)
    numbers = [int(uid.split("-")[1]) for uid in later.non_tensor_batch["uid"]]
    assert max(numbers) >= 4, "further prompts have numbers, and with them noise, of their own"


@pytest.mark.parametrize("name", ["dapo.main_dapo", "entropy.main_entropy"])
def test_old_names_of_recipes_run_the_same_program(monkeypatch, capsys, name):
    monkeypatch.setattr(sys, "argv", [name, *DAPO, "--cfg", "job"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"recipe.{name}", run_name="__main__")
    assert ended.value.code == 0
    assert "clip_ratio_high: 0.28" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("prime.main_prime", "reward_model.model.path"),
        ("spin.main_spin", "register_policy_loss"),
        ("gkd.main_gkd", "distillation.enabled=True"),
    ],
)
def test_recipes_that_are_not_here_name_another_way(name, way):
    with pytest.raises(ImportError, match=f"recipe '{name.split('.')[0]}' is not here: .*{way}"):
        runpy.run_module(f"recipe.{name}", run_name="__main__")


def test_a_dapo_run_resumes_with_the_same_bits(tmp_path):
    """Restore the loader position, which counts the prompts that dynamic sampling drew."""
    whole = tmp_path / "whole"
    cut = tmp_path / "cut"
    assert run(whole, *DAPO, "trainer.save_freq=2") == 0
    assert run(cut, *DAPO, "trainer.save_freq=2", "trainer.max_steps=2", base=None) == 0
    assert run(cut, *DAPO, "trainer.save_freq=2") == 0
    assert same_bits(weights(whole, 4), weights(cut, 4))
    assert without_times(step_lines(whole))[2:] == without_times(step_lines(cut))[2:]


def alike(data: DataProto, return_dict: bool = False) -> Any:
    scores = torch.zeros(data.batch["response_mask"].shape)
    return {"reward_tensor": scores, "reward_extra_info": {}} if return_dict else scores


def test_the_limit_of_dynamic_sampling(tmp_path):
    bound = [*DAPO, f"{FILTER}.max_num_gen_batches=2", "trainer.max_steps=1"]
    stopped = start_trainer(tmp_path / "error", *bound, reward_fn=alike, val_reward_fn=alike)
    with pytest.raises(
        DataError, match=r"2 batches of prompts gave 0 .*4 are wanted.*on_exhausted=fill"
    ):
        stopped.fit()

    filled = start_trainer(
        tmp_path / "fill",
        *bound,
        f"{FILTER}.on_exhausted=fill",
        reward_fn=alike,
        val_reward_fn=alike,
    )
    filled.fit()

    (line,) = step_lines(tmp_path / "fill")
    assert (line["train/num_gen_batches"], line["train/kept_prompts"]) == (2, 0)
    assert line["actor/grad_norm"] == 0


# ---------------------------------------------------------------- ReMax, PF-PPO


def test_remax_compares_with_the_greedy_response(tmp_path):
    trainer = start_trainer(
        tmp_path, "algorithm.adv_estimator=remax", "actor_rollout_ref.rollout.n=3"
    )
    assert isinstance(trainer, ReMaxTrainer)
    trainer.load_checkpoint()
    prompts = next(iter(trainer.train_loader))
    greedy = trainer.reward_fn(trainer.generate_greedy(prompts)).sum(-1)
    batch = trainer.estimate_advantages(trainer.collect(prompts))
    trainer.tracker.finish()
    assert torch.equal(batch.batch["reward_baselines"], greedy.repeat_interleave(3))
    scores = batch.batch["token_level_scores"].sum(-1)
    torch.testing.assert_close(
        batch.batch["advantages"][:, 0], scores - greedy.repeat_interleave(3)
    )


def test_remax_drops_a_prompt_if_its_greedy_response_has_no_score(tmp_path):
    lost = {0}  # rows of greedy responses, one for each prompt

    def reward(data: DataProto, return_dict: bool = False) -> Any:
        result = varied_reward(data, return_dict=True)
        dropped = sorted(lost) if len(data) == 4 else [11]
        result["reward_tensor"][dropped] = 0
        result |= {"dropped": dropped, "metrics": {"reward/num_errors": len(dropped), "own": 1.0}}
        return result if return_dict else result["reward_tensor"]

    own = ["algorithm.adv_estimator=remax", "actor_rollout_ref.rollout.n=3", "trainer.logger=[]"]
    trainer = start_trainer(tmp_path, *own, reward_fn=reward, val_reward_fn=reward)
    trainer.load_checkpoint()
    prompts = next(iter(trainer.train_loader))
    batch = trainer.estimate_advantages(trainer.collect(prompts))
    counted = batch.batch["response_mask"].any(-1)
    assert (~counted).nonzero().flatten().tolist() == [0, 1, 2, 11]
    assert not batch.batch["advantages"][:3].any()
    assert (trainer.metrics["reward/num_errors"], trainer.metrics["own"]) == (2, 1.0)
    kept = batch.batch["reward_baselines"][3:]
    assert trainer.metrics["critic/greedy_score/mean"] == pytest.approx(kept.mean().item())
    lost |= {1, 2, 3}
    with pytest.raises(
        RewardError, match="All samples of this step were dropped: .* greedy response"
    ):
        trainer.collect(prompts)


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


# ---------------------------------------------------------------- correction of the rollout


def off_policy(trainer: PPOTrainer, shift: torch.Tensor) -> DataProto:
    """Return a batch with rollout log-probs that are off by `shift` (B, 1)."""
    trainer.load_checkpoint()
    trainer.global_step = 1
    batch = trainer.collect(next(iter(trainer.train_loader)))
    batch.batch["rollout_log_probs"] = batch.batch["rollout_log_probs"] + shift
    return trainer.estimate_advantages(trainer.evaluate_policies(batch))


def test_the_actor_gets_weights_and_rejections_and_the_batch_is_unchanged(tmp_path):
    shift = torch.zeros(16, 1)
    # the trainer finds row 3 far less likely, and row 5 slightly more likely, a token
    shift[3], shift[5] = 2.0, -0.3
    given = [f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_rs=geometric"]
    trainer = start_trainer(tmp_path, *given, "trainer.logger=[]")
    batch = off_policy(trainer, shift)
    mask = batch.batch["response_mask"].clone()
    corrected = trainer.correct_rollout(batch)
    assert torch.equal(batch.batch["response_mask"], mask)

    assert "rollout_is_weights" not in batch.batch.keys()
    assert not corrected.batch["response_mask"][3].any()
    others = torch.arange(16) != 3
    assert torch.equal(corrected.batch["response_mask"][others], mask[others])
    own = mask[5].bool()
    assert corrected.batch["rollout_is_weights"][5][own].tolist() == pytest.approx(
        [math.exp(0.3)] * int(own.sum()), rel=1e-4
    )

    assert trainer.metrics["rollout_corr/rejected_seqs"] == pytest.approx(1 / 16)
    trainer.update(batch)
    assert trainer.metrics["actor/grad_norm"] > 0


def test_weights_reach_the_policy_loss_and_nothing_else(tmp_path):
    trainer = start_trainer(
        tmp_path,
        "trainer.logger=[]",
        f"{CORRECTION}.rollout_is=sequence",
        f"{ACTOR}.use_kl_loss=True",
    )
    batch = off_policy(trainer, torch.zeros(16, 1))
    objective = trainer.actor_wg.worker.objective

    names = ["advantages", "old_log_probs", "ref_log_prob", "rollout_log_probs"]
    mask = batch.batch["response_mask"].bool()
    columns = {name: batch.batch[name][mask] for name in names}
    columns |= {
        "response_mask": mask[mask].long(),
        "weights": torch.full_like(columns["advantages"], 0.5),
    }
    outputs = {
        "log_probs": columns["old_log_probs"] - 0.1,
        "entropy": torch.zeros_like(columns["advantages"]),
    }

    sequence = mask.nonzero()[:, 0]
    plain = objective(outputs, columns, sequence)
    halved = objective(
        outputs,
        {**columns, "rollout_is_weights": torch.full_like(columns["advantages"], 0.5)},
        sequence,
    )
    torch.testing.assert_close(halved.sums["actor/pg_loss"], plain.sums["actor/pg_loss"] / 2)

    assert torch.equal(halved.sums["actor/kl_loss"], plain.sums["actor/kl_loss"])
    assert plain.sums["actor/kl_loss"] > 0


def test_bypass_uses_the_log_probs_of_the_rollout(tmp_path, monkeypatch):
    trainer = start_trainer(
        tmp_path, "trainer.logger=[]", f"{CORRECTION}.bypass_mode=True", f"{ACTOR}.ppo_epochs=2"
    )
    monkeypatch.delattr(type(trainer.actor_wg.worker), "compute_log_prob")
    batch = off_policy(trainer, torch.full((16, 1), -0.1))
    assert torch.equal(batch.batch["old_log_probs"], batch.batch["rollout_log_probs"])
    trainer.update(batch)
    assert trainer.metrics["actor/grad_norm"] > 0
    # Of the first epoch alone: the weights change in the second one.
    assert trainer.metrics["training/rollout_kl"] == pytest.approx(-0.1, rel=1e-4)


def test_the_peak_of_the_ranks_is_reported_where_the_driver_has_none(tmp_path, monkeypatch):
    trainer = start_trainer(tmp_path, "trainer.logger=[]", "trainer.save_freq=-1")
    peak = {"perf/max_memory_allocated_gb": 5.0}
    monkeypatch.setattr(trainer.actor_wg.worker, "peak_memory", lambda: peak)
    trainer.load_checkpoint()
    trainer.run_step(next(iter(trainer.train_loader)))
    assert trainer.metrics["perf/max_memory_allocated_gb"] == 5.0
    assert trainer.metrics["perf/max_memory_reserved_gb"] == 0.0


REINFORCE = [
    f"{CORRECTION}.bypass_mode=True",
    f"{CORRECTION}.loss_type=reinforce",
    f"{CORRECTION}.rollout_is=token",
]


def test_reinforce_weights_by_the_policy_against_the_rollout(tmp_path, monkeypatch):
    trainer = start_trainer(tmp_path, "trainer.logger=[]", *REINFORCE)
    monkeypatch.delattr(type(trainer.actor_wg.worker), "compute_log_prob")
    batch = off_policy(trainer, torch.full((16, 1), -0.1))
    trainer.update(batch)
    assert trainer.metrics["actor/grad_norm"] > 0
    assert trainer.metrics["actor/rollout_is_weight"] == pytest.approx(math.exp(0.1), rel=1e-4)
    assert trainer.metrics["actor/pg_clipfrac"] == 0


def test_reinforce_does_not_depend_on_micro_batches(tmp_path, capfd):
    """Train on responses for two epochs; the second one has weights other than 1."""
    own = [*REINFORCE, f"{ACTOR}.ppo_epochs=2", "trainer.max_steps=1"]
    own += [f"{ACTOR}.optim.lr=1e-2", "trainer.test_freq=-1"]
    of_responses = f"{CORRECTION}.rollout_is=sequence"
    assert run(tmp_path / "whole", *own, of_responses) == 0
    said = capfd.readouterr()
    assert "reinforce: -sg(w) A log pi, w = r by sequence" in said.out + said.err
    assert run(tmp_path / "cut", *own, of_responses, f"{ACTOR}.ppo_micro_batch_size_per_gpu=3") == 0
    assert run(tmp_path / "tokens", *own) == 0

    whole, cut, tokens = (step_lines(tmp_path / name)[0] for name in ("whole", "cut", "tokens"))
    for name in ("pg_loss", "grad_norm", "rollout_is_weight", "pg_clipfrac"):
        assert cut[f"actor/{name}"] == pytest.approx(whole[f"actor/{name}"], rel=1e-4)
    assert abs(tokens["actor/grad_norm"] / whole["actor/grad_norm"] - 1) > 0.01


# ---------------------------------------------------------------- controllers, and the log


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
