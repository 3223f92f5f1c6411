"""A `fit` of a recipe in the form of verl 0.5: it has the bits of the trainer's own steps."""

import warnings
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from tests.launches import launch
from tests.trainer.runs import command_line, moments, run
from verl.config import config_to_dict, load_config
from verl.protocol import DataProto
from verl.tracking import TrackerBackend, tracker_backends
from verl.trainer.main_ppo import main
from verl.trainer.setup import build_reward, build_tokenizer
from verl.utils.errors import BatchError, ConfigError

pytest.importorskip("ray", reason="Role is part of the optional backend")

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from verl.trainer.ppo.metric_utils import reduce_metrics  # pyright: ignore
    from verl.trainer.ppo.ray_trainer import (  # pyright: ignore
        RayPPOTrainer,
        apply_kl_penalty,
        compute_advantage,
        compute_response_mask,
    )
    from verl.utils.tracking import Tracking  # pyright: ignore


class OwnFit(RayPPOTrainer):
    """Trains as a recipe does, without the phases of PPOTrainer."""

    repeats_prompts = True

    def fit(self):
        self._load_checkpoint()
        n = self.config.actor_rollout_ref.rollout.n
        while self.global_steps < self.total_training_steps:
            for batch_dict in self.train_dataloader:
                batch = DataProto.from_single_dict(batch_dict)
                self.global_steps += 1
                prompts = batch.pop(
                    batch_keys=["input_ids", "attention_mask", "position_ids"],
                    non_tensor_batch_keys=["raw_prompt_ids"],
                )
                if self.repeats_prompts:
                    prompts = prompts.repeat(repeat_times=n, interleave=True)
                generated = self.actor_rollout_wg.generate_sequences(prompts)
                assert generated.meta_info.pop("timing")["generate_sequences"] > 0

                rows = range(len(batch))
                batch.non_tensor_batch["uid"] = np.array([f"u{row}" for row in rows], dtype=object)
                batch = batch.repeat(repeat_times=n, interleave=True).union(generated)
                self.learn(batch)
                if self.config.trainer.get("save_freq", -1) > 0:
                    self._save_checkpoint()
                if self.global_steps >= self.total_training_steps:
                    return

    def learn(self, batch):
        algorithm = self.config.algorithm
        batch.batch["token_level_scores"] = self.reward_fn(batch, return_dict=True)["reward_tensor"]
        batch.batch["response_mask"] = compute_response_mask(batch)
        self._balance_batch(batch, metrics=self.metrics)
        batch = batch.union(self.actor_rollout_wg.compute_log_prob(batch))
        if self.use_reference_policy:
            group = self.actor_rollout_wg if self.ref_in_actor else self.ref_policy_wg
            batch = batch.union(group.compute_ref_log_prob(batch))
        if self.use_critic:
            batch = batch.union(self.critic_wg.compute_values(batch))

        if algorithm.use_kl_in_reward:
            controller = self.kl_ctrl_in_reward
            batch, _ = apply_kl_penalty(batch, controller, algorithm.get("kl_penalty", "kl"))
        else:
            batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
        batch = compute_advantage(
            batch,
            adv_estimator=algorithm.adv_estimator,
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            num_repeat=self.config.actor_rollout_ref.rollout.n,
            norm_adv_by_std_in_grpo=algorithm.get("norm_adv_by_std_in_grpo", True),
            config=algorithm,
        )
        if self.use_critic:
            answer = self.critic_wg.update_critic(batch)
            self.metrics.update(reduce_metrics(answer.meta_info["metrics"]))
        answer = self.actor_rollout_wg.update_actor(batch)
        self.metrics.update(reduce_metrics(answer.meta_info["metrics"]))


class WithoutRepeat(OwnFit):
    repeats_prompts = False


def started(kind, folder, *overrides):
    config = load_config(command_line(folder, *overrides))
    tokenizer = build_tokenizer(config)
    reward = build_reward(config, tokenizer, num_examine=0)
    trainer = kind(config, tokenizer=tokenizer, reward_fn=reward, val_reward_fn=reward)
    trainer.init_workers()
    return trainer


CRITIC = [
    "algorithm.adv_estimator=gae",
    "critic.optim.lr=1e-3",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
]
PENALTY = ["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.1"]
ADAPTERS = ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.actor.use_kl_loss=True"]
ENTROPY = [
    *("algorithm.entropy_ctrl.type=adaptive", "algorithm.entropy_ctrl.target_entropy=100"),
    *("algorithm.entropy_ctrl.delta=0.1", "trainer.async_save=True"),
]
# All weights are cut to 0.5.
CORRECTION = [
    "algorithm.rollout_correction.rollout_is=token",
    "algorithm.rollout_correction.rollout_is_threshold=0.5",
]


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        pytest.param(OwnFit, CRITIC, marks=pytest.mark.slow),
        (WithoutRepeat, PENALTY),
        pytest.param(OwnFit, ADAPTERS, marks=pytest.mark.slow),
        pytest.param(OwnFit, ENTROPY, marks=pytest.mark.slow),
        pytest.param(OwnFit, CORRECTION, marks=pytest.mark.slow),
    ],
    ids=["critic", "penalty", "adapters", "entropy", "correction"],
)
def test_own_fit_has_the_bits_of_the_steps(tmp_path, kind, overrides):
    length = ["trainer.max_steps=2", "trainer.save_freq=2", "trainer.test_freq=-1"]
    assert run(tmp_path / "steps", *length, *overrides) == 0
    # with a resume in the middle
    own = ["trainer.save_freq=1", "trainer.test_freq=-1", *overrides]
    started(kind, tmp_path / "own", "trainer.max_steps=1", *own).fit()
    trainer = started(kind, tmp_path / "own", "trainer.max_steps=2", *own)
    trainer.fit()

    # The moments follow every bit of the gradients, and adapters have them as well.
    expected, found = moments(tmp_path / "steps", 2), moments(tmp_path / "own", 2)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert trainer.metrics["actor/grad_norm"] > 0


def prompts_of(trainer):
    batch = DataProto.from_single_dict(next(iter(trainer.train_dataloader)))
    names = ["input_ids", "attention_mask", "position_ids"]
    return batch.pop(batch_keys=names, non_tensor_batch_keys=["raw_prompt_ids"])


def test_generated_rows(tmp_path):
    trainer = started(OwnFit, tmp_path)
    group = trainer.actor_rollout_wg
    prompts = prompts_of(trainer)
    width = trainer.config.data.max_prompt_length
    assert prompts.batch["input_ids"].shape == (4, width)
    texts = trainer.tokenizer.batch_decode(prompts.batch["input_ids"], skip_special_tokens=True)
    assert all("?" in text for text in texts)

    drawn = group.generate_sequences(prompts)
    assert len(drawn) == 16
    again = group.generate_sequences(prompts)  # further prompts of the same step, as with DAPO
    assert not torch.equal(drawn.batch["responses"], again.batch["responses"])

    greedy = deepcopy(prompts)
    greedy.meta_info["do_sample"] = False
    likeliest = group.generate_sequences(greedy)
    assert len(likeliest) == 4
    assert torch.equal(
        likeliest.batch["responses"], group.generate_sequences(greedy).batch["responses"]
    )
    greedy.meta_info = {"validate": True}
    assert len(group.generate_sequences(greedy)) == 4

    # The padded columns are enough.
    prompts.non_tensor_batch.clear()
    trainer.global_steps += 1
    from_tensors = group.generate_sequences(prompts)
    assert torch.equal(from_tensors.batch["prompts"], drawn.batch["prompts"])

    with pytest.raises(BatchError, match="raw_prompt_ids"):
        group.generate_sequences(prompts.select(batch_keys=["position_ids"]))
    trainer.config.actor_rollout_ref.rollout.multi_turn.enable = True
    with pytest.raises(ConfigError, match="trainer.generate"):
        group.generate_sequences(prompts)


def test_configuration_of_a_recipe(tmp_path):
    trainer = started(OwnFit, tmp_path)
    assert trainer.config.trainer.get("val_only", True) is False
    assert trainer.config.data.get("none", 3) == 3
    assert config_to_dict(trainer.config)["trainer"]["max_steps"] == 2
    assert trainer.val_dataloader is not None
    assert len(trainer.train_dataloader) == len(trainer.train_loader)
    assert not trainer.async_rollout_mode


class Tracked(OwnFit):
    """Opens its own trackers, as the fit of verl 0.5 does."""

    def fit(self):
        plain = OmegaConf.to_container(self.config, resolve=True)
        assert plain == config_to_dict(self.config)
        assert OmegaConf.to_container(self.config.data)["train_batch_size"] == 4
        assert OmegaConf.to_container(OmegaConf.create({"a": 1, "b": "${a}"}), resolve=True) == {
            "a": 1,
            "b": 1,
        }
        plain["reward_model"]["reward_kwargs"] = {"api_key": "sk-1"}
        self.tracking = Tracking("project", "run", default_backend="seen", config=plain)


def test_own_fit_hands_its_configuration_to_trackers(tmp_path):
    seen = []

    @tracker_backends.register("seen")
    class Seen(TrackerBackend):
        def __init__(self, settings):
            super().__init__(settings)
            seen.append(settings.config)

    try:
        trainer = started(Tracked, tmp_path)
        trainer.fit()
    finally:
        tracker_backends.remove("seen")
    assert seen[0]["data"]["train_batch_size"] == 4
    assert seen[0]["reward_model"]["reward_kwargs"] == {"api_key": "***"}
    with pytest.raises(ValueError, match="not an OmegaConf config object"):
        OmegaConf.to_container(trainer.config)


class OwnReMax(OwnFit):
    """Draws the baselines as verl 0.5 does: greedy answers to prompts that are not repeated yet."""

    def fit(self):
        n = self.config.actor_rollout_ref.rollout.n
        batch = DataProto.from_single_dict(next(iter(self.train_dataloader)))
        self.global_steps += 1
        prompts = batch.pop(
            batch_keys=["input_ids", "attention_mask", "position_ids"],
            non_tensor_batch_keys=["raw_prompt_ids"],
        )
        greedy_prompts = deepcopy(prompts)
        greedy_prompts.meta_info["do_sample"] = False
        greedy = self.actor_rollout_wg.generate_sequences(greedy_prompts)
        batch = batch.union(greedy)
        baselines = self.reward_fn(batch).sum(dim=-1)
        batch.pop(batch_keys=list(greedy.batch.keys()))
        batch.batch["reward_baselines"] = baselines

        generated = self.actor_rollout_wg.generate_sequences(prompts.repeat(n, interleave=True))
        generated.meta_info.pop("timing")
        rows = range(len(batch))
        batch.non_tensor_batch["uid"] = np.array([f"u{row}" for row in rows], dtype=object)
        batch = batch.repeat(repeat_times=n, interleave=True).union(generated)
        self.learn(batch)
        self._save_checkpoint()


@pytest.mark.parametrize("n", [1, 4])
def test_own_remax_has_the_bits_of_the_step(tmp_path, n):
    keys = ["algorithm.adv_estimator=remax", f"actor_rollout_ref.rollout.n={n}"]
    keys += ["trainer.max_steps=1", "trainer.save_freq=1", "trainer.test_freq=-1"]
    assert run(tmp_path / "steps", *keys) == 0
    trainer = started(OwnReMax, tmp_path / "own", *keys)
    trainer.fit()
    expected, found = moments(tmp_path / "steps", 1), moments(tmp_path / "own", 1)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert trainer.metrics["actor/grad_norm"] > 0


class Interrupted(OwnFit):
    """Starts another run in its folder after the first batch."""

    def learn(self, batch):
        folder = Path(self.config.trainer.default_local_dir)
        self.other = launch(1, main, command_line(folder))
        raise KeyboardInterrupt


def test_own_fit_holds_its_folder(tmp_path):
    trainer = started(Interrupted, tmp_path, "trainer.max_steps=1", "trainer.save_freq=1")
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    assert trainer.other.returncode == 1
    assert "Another run (pid " in trainer.other.stderr


class Wrapping(RayPPOTrainer):
    """Does something after the training, as a recipe that evaluates or exports."""

    def fit(self):
        super().fit()
        self.held_at_end = self.checkpoints.is_claimed


def test_own_fit_holds_its_folder_after_the_fit_that_it_calls(tmp_path):
    trainer = started(Wrapping, tmp_path, "trainer.max_steps=1", "trainer.save_freq=1")
    trainer.fit()
    assert trainer.held_at_end
    assert not trainer.checkpoints.is_claimed


def test_calls_in_another_order_name_the_missing_one(tmp_path):
    trainer = started(OwnFit, tmp_path, *PENALTY)
    drawn = trainer.actor_rollout_wg.generate_sequences(prompts_of(trainer))
    drawn.batch["token_level_scores"] = torch.zeros_like(drawn.batch["responses"]).float()
    with pytest.raises(BatchError, match="old_log_probs.*actor_rollout_wg.compute_log_prob"):
        apply_kl_penalty(drawn, trainer.kl_ctrl_in_reward)
    with pytest.raises(BatchError, match="token_level_rewards.*First call apply_kl_penalty"):
        compute_advantage(drawn, adv_estimator="grpo")
