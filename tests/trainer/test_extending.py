"""A new algorithm is a short user file: a subclass of the trainer, or a file that registers its new
parts."""

import sys
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainer.runs import run, same_bits, start_trainer, step_lines, weights
from verl.algorithms.policy_losses import extra_losses
from verl.trainer import PPOTrainer, RayPPOTrainer
from verl.utils.errors import AlgorithmError, ConfigError
from verl.utils.logging import logger
from verl.utils.phases import phase
from verl.workers import ActorWorker


def train(kind: type[PPOTrainer], folder, *overrides: str, **parts) -> Any:
    trainer = start_trainer(folder, *overrides, kind=kind, **parts)
    trainer.fit()
    return trainer


def calls_of(patch: pytest.MonkeyPatch, name: str) -> list[int]:
    """Return a list that gets the number of rows of every call of an actor method."""
    calls: list[int] = []
    original = getattr(ActorWorker, name)

    def counted(self, batch, *args, **kwargs):
        calls.append(len(batch))
        return original(self, batch, *args, **kwargs)

    counted.__dict__.update(original.__dict__)  # attributes set by @register
    patch.setattr(ActorWorker, name, counted)
    return calls


def test_one_update_of_the_whole_batch_needs_no_old_log_probs(tmp_path, monkeypatch):
    calls = calls_of(monkeypatch, "compute_log_prob")
    train(PPOTrainer, tmp_path)
    assert calls == []


@pytest.mark.parametrize(
    "override",
    [
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "algorithm.use_kl_in_reward=True",
    ],
)
def test_several_updates_or_a_kl_reward_need_them(tmp_path, monkeypatch, override):
    calls = calls_of(monkeypatch, "compute_log_prob")
    train(PPOTrainer, tmp_path, override)
    assert calls == [16, 16]


class DeclaredAdvantages(PPOTrainer):
    """Declare the columns that it reads, so that no unused column is computed."""

    @phase(reads="token_level_scores response_mask uid", writes="advantages returns")
    def estimate_advantages(self, batch):
        return super().estimate_advantages(batch)


def test_a_phase_with_declared_columns_costs_no_pass(tmp_path, monkeypatch):
    calls = calls_of(monkeypatch, "compute_log_prob")
    train(DeclaredAdvantages, tmp_path)
    assert calls == []


@pytest.mark.parametrize(
    ("declaration", "expected"),
    [("", [16, 16]), ("@phase(reads='token_level_rewards response_mask')", [])],
    ids=["undeclared", "declared"],
)
def test_a_custom_estimator_may_read_old_log_probs_unless_it_declares_its_columns(
    tmp_path, monkeypatch, declaration: str, expected: list[int]
):
    name = f"test_{'declared' if declaration else 'undeclared'}"
    file = tmp_path / "mine.py"
    file.write_text(
        "from verl.algorithms.advantages import advantage_estimators\n"
        "from verl.utils.phases import phase\n"
        f"@advantage_estimators.register('{name}')\n"
        f"{declaration}\n"
        "def estimate(inputs):\n"
        "    advantages = inputs.token_level_rewards.sum(-1, keepdim=True) * inputs.response_mask\n"
        "    return advantages, advantages\n"
    )

    calls = calls_of(monkeypatch, "compute_log_prob")
    own = [f"actor_rollout_ref.model.external_lib={file}", f"algorithm.adv_estimator={name}"]
    train(PPOTrainer, tmp_path / "run", *own)
    assert calls == expected


class OwnAdvantages(PPOTrainer):
    """Read columns without a declaration: likelier samples count less."""

    def estimate_advantages(self, batch):
        batch = super().estimate_advantages(batch)
        batch.batch["advantages"] = batch.batch["advantages"] * (
            1 - batch.batch["old_log_probs"].exp()
        )
        return batch


@pytest.mark.parametrize("key", ["filter_groups.enable=True", "adv_estimator=remax"])
def test_a_subclass_of_the_plain_trainer_does_not_leave_out_the_step_of_dapo_or_remax(
    tmp_path, key
):
    with pytest.raises(ConfigError, match=f"algorithm.{key} needs .* got OwnAdvantages"):
        start_trainer(tmp_path, f"algorithm.{key}", kind=OwnAdvantages)


class Difficulty(PPOTrainer):
    """Add a column with one number for each row."""

    def estimate_advantages(self, batch):
        batch = super().estimate_advantages(batch)
        batch.batch["difficulty"] = torch.ones(len(batch))
        return batch


def test_a_column_of_one_number_a_row_does_not_disturb_an_extra_term(tmp_path):
    extra_losses.register("test_old")(lambda inputs, columns: (columns["returns"] * 0).sum())
    train(Difficulty, tmp_path, "actor_rollout_ref.actor.loss_extra=[{name: test_old, coef: 1.0}]")
    assert len(step_lines(tmp_path)) == 2


class Written(PPOTrainer):
    """Write a column as a function gives it, after a phase."""

    column = ""

    def write(self, batch, name):
        if name == self.column:
            batch.batch[name] = self.changed(batch.batch[name])
        return batch

    def score(self, batch):
        return self.write(super().score(batch), "token_level_scores")

    def estimate_advantages(self, batch):
        return self.write(super().estimate_advantages(batch), "advantages")


@pytest.mark.parametrize(
    ("column", "phase_name"),
    [("token_level_scores", "score"), ("advantages", "estimate_advantages")],
)
@pytest.mark.parametrize(
    ("changed", "found"),
    [
        (lambda column: column.sum(-1), r"torch.float32 Tensor of shape \(16,\)"),
        (lambda column: column[:, :1], r"torch.float32 Tensor of shape \(16, 1\)"),
        (lambda column: column.long(), r"torch.int64 Tensor of shape \(16, 8\)"),
    ],
    ids=["one a row", "one column", "whole numbers"],
)
def test_a_phase_writes_floats_for_each_token(tmp_path, column, phase_name, changed, found):
    kind = type("Own", (Written,), {"column": column, "changed": staticmethod(changed)})
    with pytest.raises(
        AlgorithmError, match=rf"`{phase_name}` must write .*{column}.* got {found}"
    ):
        train(kind, tmp_path)


class Silent(PPOTrainer):
    """Forget to return the batch."""

    def estimate_advantages(self, batch):
        super().estimate_advantages(batch)


def test_a_phase_without_a_return_is_named(tmp_path):
    with pytest.raises(
        AlgorithmError, match="`estimate_advantages` must return its batch, got None"
    ):
        train(Silent, tmp_path)


class OwnDynamicSampling(PPOTrainer):
    """Draw prompts in a way of its own."""

    def collect(self, prompts, first_row=0):
        return super().collect(prompts, first_row)


def test_a_collect_of_ones_own_may_do_dynamic_sampling(tmp_path):
    start_trainer(tmp_path, "algorithm.filter_groups.enable=True", kind=OwnDynamicSampling)


def test_a_custom_estimate_advantages_finds_old_log_probs(tmp_path, monkeypatch):
    calls = calls_of(monkeypatch, "compute_log_prob")
    train(OwnAdvantages, tmp_path / "own", "trainer.save_freq=2")
    assert calls == [16, 16]
    train(PPOTrainer, tmp_path / "ours", "trainer.save_freq=2")
    assert not same_bits(weights(tmp_path / "own", 2), weights(tmp_path / "ours", 2))


def test_a_program_with_a_trainer_of_its_own_shows_the_log(tmp_path, capsys):
    train(OwnAdvantages, tmp_path)
    said = capsys.readouterr().out
    assert "I Loss of a token, where r = pi / pi_old: vanilla" in said
    assert "I Time: 2 steps took" in said


class DynamicSampling(RayPPOTrainer):
    """Drop prompts with equal scores for all samples before the update: they give no gradient."""

    def fit(self):
        self.kept = []
        self.load_checkpoint()
        for prompts in self.train_loader:
            self.global_step += 1
            batch = self.score(self.generate(prompts))
            scores = batch.batch["token_level_scores"].sum(-1).reshape(len(prompts), -1)
            rows = torch.repeat_interleave(scores.std(dim=1) > 0, scores.shape[1])
            batch = self.evaluate_policies(batch.select_idxs(rows))
            assert "old_log_probs" in batch.batch.keys()
            batch = self.estimate_advantages(batch)
            self.update(batch)
            self.sync_weights()
            self.kept.append((len(batch), np.unique(batch.non_tensor_batch["uid"]).size))
            self.tracker.log(self.metrics, self.global_step)

        self.tracker.finish()


def test_a_custom_fit_composes_the_phases(tmp_path):
    trainer = train(DynamicSampling, tmp_path)
    assert len(trainer.kept) == 2  # batches of four out of ten prompts: one epoch
    assert all(rows == 4 * prompts for rows, prompts in trainer.kept)
    assert sum(rows for rows, _ in trainer.kept) < 32, "some prompts of the toy set have no spread"
    assert all(line["actor/grad_norm"] > 0 for line in step_lines(tmp_path))


class ForgetfulFit(PPOTrainer):
    """Train on one epoch, from its beginning."""

    def fit(self):
        for prompts in self.train_loader:
            self.run_step(prompts)


def test_a_custom_fit_does_not_pass_over_a_checkpoint(tmp_path):
    train(ForgetfulFit, tmp_path, "trainer.save_freq=1")
    with pytest.raises(ConfigError, match=r"ForgetfulFit.fit begins with step 1 .*load_checkpoint"):
        train(ForgetfulFit, tmp_path, "trainer.save_freq=1")

    assert [line["step"] for line in step_lines(tmp_path)] == [1, 2]
    train(ForgetfulFit, tmp_path, "trainer.save_freq=1", "trainer.resume_mode=disable")


LIBRARY = '''
import torch
from verl.algorithms.advantages import advantage_estimators
from verl.algorithms.policy_losses import PolicyLossOutput, extra_losses, policy_losses
from verl.rewards.manager import NaiveRewardManager
from verl.rewards.registry import reward_managers


@advantage_estimators.register("plain_score")
def plain_score(inputs):
    """The score itself, where the policy before the update was not yet sure of the token."""
    unsure = inputs.columns["old_log_probs"] < -1e-6
    advantages = inputs.token_level_rewards.sum(-1, keepdim=True) * inputs.response_mask * unsure
    return advantages, advantages


@policy_losses.register("reinforce")
def reinforce(inputs, **settings):
    losses = -inputs.advantages * inputs.log_probs
    return PolicyLossOutput((losses * inputs.weights).sum(), {"own_share": (inputs.advantages > 0).float()})


@extra_losses.register("pull_to_old")
def pull_to_old(inputs, columns):
    return ((inputs.log_probs - columns["old_log_probs"]).square() * inputs.weights).sum()


@reward_managers.register("half")
class Half(NaiveRewardManager):
    def score(self, samples, data):
        result = super().score(samples, data)
        result.scores = [score / 2 for score in result.scores]
        return result
'''


def test_a_users_file_registers_parts_that_the_configuration_names(tmp_path):
    library = tmp_path / "my_parts.py"
    library.write_text(LIBRARY)
    own = [
        f"actor_rollout_ref.model.external_lib={library}",
        "algorithm.adv_estimator=plain_score",
        "actor_rollout_ref.actor.policy_loss.loss_mode=reinforce",
        "reward_model.reward_manager=half",
        "trainer.save_freq=2",
    ]

    pull = "actor_rollout_ref.actor.loss_extra=[{name: pull_to_old, coef: 100.0}]"
    assert run(tmp_path / "without", *own) == 0
    assert run(tmp_path / "with", *own, pull, "actor_rollout_ref.actor.ppo_epochs=2") == 0
    assert run(tmp_path / "without_2", *own, "actor_rollout_ref.actor.ppo_epochs=2") == 0

    for line in step_lines(tmp_path / "without"):
        assert line["critic/score/max"] == 0.5
        assert 0 < line["actor/own_share"] < 1

    # At the first update the term is 0; it slows down the second.
    assert not same_bits(weights(tmp_path / "with", 2), weights(tmp_path / "without_2", 2))


def test_parts_can_be_passed_as_objects(tmp_path):
    """Pass data and a reward function of a notebook, without a file."""

    class Sums:
        def __len__(self):
            return 8

        def __getitem__(self, row):
            ids = [3 + row, 5, 7]
            return {
                "raw_prompt_ids": ids,
                "raw_prompt": [],
                "data_source": "sums",
                "reward_model": {},
                "index": row,
            }

    def reward(data, return_dict=False):
        """Reward longer responses."""
        mask = data.batch["response_mask"]
        scores = torch.zeros(mask.shape)
        scores[torch.arange(len(mask)), mask.sum(-1) - 1] = mask.sum(-1).float()
        extra = {
            "uid": [0] * len(mask),
            "tokens": mask.sum(-1).tolist(),
            "nothing": [float("nan")] * len(mask),
        }
        return {"reward_tensor": scores, "reward_extra_info": extra} if return_dict else scores

    train(PPOTrainer, tmp_path, train_dataset=Sums(), reward_fn=reward, val_reward_fn=reward)
    for line in step_lines(tmp_path):
        assert (
            line["critic/score/mean"] == line["response_length/mean"] == line["reward/tokens/mean"]
        )
        assert "reward/nothing/mean" not in line
        assert line["critic/advantages/max"] > 0, (
            "the reward's field `uid` must not replace the prompts' own"
        )


class Leaves(PPOTrainer):
    def step(self, prompts):
        sys.exit(0)


def test_an_exit_in_a_step_is_no_interrupt(tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda text, *values: said.append(text % values))
    with pytest.raises(SystemExit):
        train(Leaves, tmp_path)

    line = Leaves.step.__code__.co_firstlineno + 1
    assert said[-1].startswith(
        f"Stopped by sys.exit() in line {line} of {__file__} in step 1 of 2."
    )
