"""The configuration's section `algorithm`, as functions of a batch."""

import math
import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.advantages import (
    AdvantageEstimator,
    AdvantageInputs,
    advantage_estimators,
    formula_of,
)
from verl.algorithms.entropy import AdaptiveEntropyController, FixedEntropyController
from verl.algorithms.kl import AdaptiveKLController, FixedKLController, apply_kl_penalty, kl_penalty
from verl.algorithms.pf_ppo import pf_ppo_rows, pf_ppo_weights
from verl.algorithms.rollout_correction import correct_rollout
from verl.config import TrainConfig
from verl.protocol import DataProto
from verl.trainer.episodes import EpisodeRows, episode_rows
from verl.trainer.frozen_models import distillation_term
from verl.trainer.rows import counted_rows, group_numbers
from verl.trainer.scored import NUMBERS
from verl.utils.errors import AlgorithmError, ConfigError, RewardError
from verl.utils.user_parts import NamedPart
from verl.workers.policy_terms import LoglinearProximal, RolloutReinforce, describe_loss


def describe_algorithm(config: TrainConfig) -> list[str]:
    """Return the advantage and the loss as formulas, a line each."""
    algorithm = config.algorithm
    name = algorithm.adv_estimator
    by_std = ", divided by the group's std + 1e-6" if algorithm.norm_adv_by_std_in_grpo else ""
    formula = formula_of(
        advantage_estimators.get(name),
        "an estimator of your own",
        {"gamma": algorithm.gamma, "lam": algorithm.lam, "by_std": by_std},
    )
    loss = describe_loss(
        config.actor_rollout_ref.actor, distillation_term(config), rollout_reinforce(config)
    )
    lines = [
        f"Advantage A = {name}: {formula}",
        f"Loss of a token, where r = pi / pi_old: {loss}",
    ]
    if config.distillation.is_whole_loss:
        lines = lines[1:]

    if config.distillation.is_reward:
        asked = config.distillation.distillation_loss
        from_rewards = "0" if config.distillation.is_whole_loss else "A"
        lines.append(
            f"Advantage of a token = {from_rewards} - {asked.distillation_loss_coef:g} "
            f"{asked.loss_mode}(pi_old, teacher)"
        )

    correction = algorithm.rollout_correction
    if correction.bypass_mode:
        lines.append("pi_old is the rollout's policy, by its own log-probs.")
    elif correction.rollout_is is not None:
        lines.append(
            f"The policy loss is weighted by pi_old / rollout by {correction.rollout_is}, bounded "
            f"above by {correction.rollout_is_threshold:g} ({correction.rollout_is_mode})."
        )

    return lines


def rollout_reinforce(config: TrainConfig) -> RolloutReinforce | None:
    """Return the policy loss of `algorithm.rollout_correction.loss_type=reinforce`, or None."""
    correction = config.algorithm.rollout_correction
    if correction.loss_type != "reinforce":
        return None
    return RolloutReinforce(
        weigh_by=correction.rollout_is,
        weight_band=correction.weight_band,
        outside=correction.rollout_is_mode,
    )


def penalised_scores(
    batch: DataProto, config: TrainConfig, controller: FixedKLController | AdaptiveKLController
) -> tuple[torch.Tensor, dict[str, float]]:
    """Subtract the KL penalty from the scores (B, R) if `algorithm.use_kl_in_reward` asks for it.

    Returns the scores and metrics. Updates the controller with the KL of the batch.
    """
    columns = batch.batch
    algorithm = config.algorithm
    scores = columns["token_level_scores"]
    mask = columns["response_mask"]
    if not algorithm.use_kl_in_reward:
        return scores, {}

    kl = kl_penalty(columns["old_log_probs"], columns["ref_log_prob"], algorithm.kl_penalty)
    coefficient = controller.value
    mean_kl = ((kl * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean().item()
    controller.update(current_kl=mean_kl, n_steps=len(batch))

    metrics = {"actor/reward_kl_penalty": mean_kl, "actor/reward_kl_penalty_coeff": coefficient}
    return apply_kl_penalty(scores, kl, mask, coefficient), metrics


def loglinear(config: TrainConfig) -> LoglinearProximal | None:
    """Return the old log-probs of `algorithm.rollout_correction.proximal=loglinear`, or None."""
    correction = config.algorithm.rollout_correction
    if correction.proximal != "loglinear":
        return None
    return LoglinearProximal(
        weighs=correction.rollout_is is not None,
        weight_band=correction.weight_band,
        outside=correction.rollout_is_mode,
    )


def advantage_inputs(batch: DataProto, config: TrainConfig) -> AdvantageInputs:
    """Collect the inputs of an estimator from a batch with `token_level_rewards`."""
    columns = batch.batch
    algorithm = config.algorithm

    components = None
    if algorithm.gdpo_reward_keys:
        components = _reward_components(batch, algorithm.gdpo_reward_keys)
    component_weights = None
    if algorithm.gdpo_reward_weights:
        component_weights = torch.tensor(algorithm.gdpo_reward_weights)

    return AdvantageInputs(
        token_level_rewards=columns["token_level_rewards"],
        response_mask=columns["response_mask"],
        group=group_numbers(batch),
        values=columns.get("values", None),
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        norm_by_std=algorithm.norm_adv_by_std_in_grpo,
        components=components,
        component_weights=component_weights,
        columns={**batch.non_tensor_batch, **dict(columns.items())},
        config=algorithm,
    )


def estimated(
    estimator: AdvantageEstimator, config: TrainConfig, inputs: AdvantageInputs
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (advantages, returns), (B, R) each, with the configured estimator.

    Both are 0 where `response_mask` is. Raises AlgorithmError where a user's raised, changed its
    inputs in place, or gave another shape or type, or NaN or infinity for finite rewards.
    """
    if config.distillation.is_whole_loss:
        nothing = torch.zeros_like(inputs.token_level_rewards)
        return nothing, nothing.clone()

    part = NamedPart("advantage estimator", config.algorithm.adv_estimator, estimator)
    rewards = inputs.token_level_rewards
    with part.naming_errors(), part.keeping({**inputs._asdict(), **inputs.columns}):
        answer = estimator(inputs, **config.algorithm.adv_kwargs)

    pair = []
    if isinstance(answer, (tuple, list)):
        pair = [_as_floats(column) for column in answer]
    if [column.shape for column in pair] != [rewards.shape, rewards.shape]:
        expected = (
            f"a pair (advantages, returns), both floats of shape {tuple(rewards.shape)} (rows, "
            "response tokens)"
        )
        raise part.must_return(expected, answer)

    own = inputs.response_mask.bool()
    advantages, returns = (torch.where(own, column, 0.0) for column in pair)
    is_finite = advantages.isfinite() & returns.isfinite()
    wrong = (~is_finite).any(-1).nonzero().flatten().tolist()

    # A critic that diverged is for the engine, which skips the update.
    if wrong and all(
        column is None or column[own].isfinite().all() for column in (rewards, inputs.values)
    ):
        raise AlgorithmError(
            f"{part} gave NaN or infinity for finite rewards in {len(wrong)} of {len(own)} rows, "
            f"the first of which is row {wrong[0]}. Add a small number to its divisor, for example."
        )

    return advantages, returns


def _as_floats(column: Any) -> Tensor:
    """Return a tensor or array of floats as a tensor; an empty one for anything else."""
    if isinstance(column, np.ndarray) and column.dtype.kind == "f":
        column = torch.from_numpy(column)
    if isinstance(column, Tensor) and column.is_floating_point():
        return column.detach()
    return torch.empty(0)


def estimated_by_episode(
    estimator: AdvantageEstimator,
    config: TrainConfig,
    inputs: AdvantageInputs,
    rows: EpisodeRows | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `estimated` with each episode counted once.

    Where episodes have several rows, those of a group are compared by their last ones, and every
    row gets the mean advantage of its episode. An estimator with a critic's values takes each row
    by itself.

    Args:
        rows: of the episodes; None where every row is one.
    """
    if rows is None or inputs.values is not None:
        return estimated(estimator, config, inputs)

    last = rows.last
    last_rows = inputs._replace(
        token_level_rewards=inputs.token_level_rewards[last],
        response_mask=inputs.response_mask[last],
        group=None if inputs.group is None else inputs.group[last],
        components=None if inputs.components is None else inputs.components[last],
        columns={
            name: column[last if isinstance(column, Tensor) else last.numpy()]
            for name, column in inputs.columns.items()
        },
    )
    advantages, returns = estimated(estimator, config, last_rows)

    own = inputs.response_mask.bool()
    return spread(advantages, own, rows), spread(returns, own, rows)


def spread(column: torch.Tensor, own: torch.Tensor, rows: EpisodeRows) -> torch.Tensor:
    """Give every row (B, R) the mean of its episode's own tokens, and last rows their column."""
    own_of_last = own[rows.last]
    means = (column * own_of_last).sum(-1) / own_of_last.sum(-1).clamp(min=1)
    whole = torch.where(own, means[rows.episode][:, None], 0.0)
    whole[rows.last] = column
    return whole


def distilled(
    advantages: torch.Tensor, batch: DataProto, config: TrainConfig
) -> tuple[torch.Tensor, dict[str, float]]:
    """Subtract the estimated reverse KL to the teacher from the advantages (B, R).

    Does so where distillation is a reward, and returns the advantages and a metric. Lu and
    Thinking Machines Lab 2025 ("On-Policy Distillation").

        A_t - coef * k_t,    k1: k_t = log pi_old(token) - log teacher(token)

    A token answers for its own KL alone (discount 0).
    """
    if not config.distillation.is_reward:
        return advantages, {}
    columns = batch.batch
    loss = config.distillation.distillation_loss
    mask = columns["response_mask"].bool()
    kl = kl_penalty(columns["old_log_probs"], columns["teacher_log_prob"], loss.loss_mode)
    kl = torch.where(mask, kl, 0.0)
    metrics = {"actor/distillation_loss": (kl.sum() / mask.sum().clamp(min=1)).item()}
    return advantages - loss.distillation_loss_coef * kl, metrics


def _reward_components(batch: DataProto, names: list[str]) -> torch.Tensor:
    """Stack (B, K) numeric fields of the reward, `score` among them; 0 for dropped samples."""
    counted = counted_rows(batch).tolist()
    components = []
    for name in names:
        if name == "score":
            components.append(batch.batch["token_level_rewards"].sum(-1))
            continue

        values: list[Any] = list(batch.non_tensor_batch.get(name, [None] * len(batch)))
        numbers = []
        for row, value in enumerate(values):
            if not counted[row]:
                numbers.append(0.0)
            elif isinstance(value, NUMBERS) and not math.isnan(value):
                numbers.append(float(value))
            else:
                returned = ", ".join(["score", *batch.meta_info.get("reward_fields", ())])
                raise RewardError(
                    "algorithm.gdpo_reward_keys: every sample's reward needs a number as field "
                    f"'{name}', got {value!r} for row {row}. Return it in addition to \"score\"; "
                    f"fields returned in this step: {returned}."
                )
        components.append(torch.tensor(numbers))

    return torch.stack(components, dim=-1)


def chosen_samples(batch: DataProto, config: TrainConfig, step: int) -> DataProto:
    """Select the samples that critic and actor learn from.

    These are all samples, or under PF-PPO as many, drawn by score.
    """
    if not config.algorithm.use_pf_ppo:
        return batch

    scores = batch.batch["token_level_scores"].sum(-1)
    counted = counted_rows(batch)
    episodes = episode_rows(batch)
    if episodes is not None:
        scores = scores[episodes.last]
        num_counted = torch.zeros(len(episodes.last)).index_add_(
            0, episodes.episode, counted.float()
        )
        counted = num_counted > 0

    options = config.algorithm.pf_ppo
    weights = pf_ppo_weights(scores, options.reweight_method, options.weight_pow)
    drawn = pf_ppo_rows(torch.where(counted, weights, 0.0), _seed(config, step))
    if episodes is not None:
        # All parts of an episode are learned from together.
        drawn = torch.cat([(episodes.episode == number).nonzero()[:, 0] for number in drawn])
    return batch.select_idxs(drawn)


def _seed(config: TrainConfig, step: int) -> int:
    return zlib.crc32(f"{config.trainer.seed}-{step}".encode())


def corrected_rollout(batch: DataProto, config: TrainConfig) -> tuple[DataProto, dict[str, float]]:
    """Add `rollout_is_weights` and mask rejected tokens; return the batch and metrics.

    Returns the same batch where no correction is configured.
    """
    options = config.algorithm.rollout_correction
    if not options.changes_update:
        return batch, {}
    columns = batch.batch
    corrected = correct_rollout(
        columns["old_log_probs"],
        columns["rollout_log_probs"],
        columns["response_mask"],
        weigh_by=options.rollout_is,
        weight_band=options.weight_band,
        outside=options.rollout_is_mode,
        normalize=options.rollout_is_batch_normalize,
        reject_by=options.rollout_rs,
        accept_band=options.accept_band,
        veto_below=options.rollout_token_veto_threshold,
    )

    batch = batch.select()  # the caller's keeps its mask
    batch.batch["response_mask"] = corrected.mask.to(columns["response_mask"].dtype)
    batch.batch["rollout_is_weights"] = corrected.weights
    return batch, corrected.metrics


def entropy_controller(config: TrainConfig) -> FixedEntropyController | AdaptiveEntropyController:
    """Build the controller of `algorithm.entropy_ctrl`, starting at `actor.entropy_coeff`."""
    options = config.algorithm.entropy_ctrl
    start = config.actor_rollout_ref.actor.entropy_coeff
    if options.type == "fixed":
        return FixedEntropyController(start)
    if options.type == "adaptive":
        return AdaptiveEntropyController(
            start, target_entropy=options.target_entropy, delta=options.delta
        )
    raise ConfigError(
        f"algorithm.entropy_ctrl.type must be fixed or adaptive, got '{options.type}'."
    )
