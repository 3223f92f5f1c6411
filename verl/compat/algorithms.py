"""The driver's steps on a DataProto by verl 0.5's names: masks, penalties, advantages, PF-PPO."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from verl.algorithms.padded import setting_of
from verl.algorithms.pf_ppo import pf_ppo_rows, pf_ppo_weights
from verl.compat.configs import PFPPOConfig
from verl.compat.metrics import _compute_response_info
from verl.compat.registries import get_adv_estimator_fn
from verl.protocol import DataProto
from verl.trainer.algorithm import penalised_scores
from verl.utils.errors import BatchError

# Columns, and the calls that write them in a `fit` of verl 0.5.
_BEFORE_PENALTY = {
    "token_level_scores": "reward_fn(batch), and set the column to its reward tensor",
    "old_log_probs": (
        "actor_rollout_wg.compute_log_prob(batch), and unite the batch with its answer"
    ),
    "ref_log_prob": (
        "ref_policy_wg.compute_ref_log_prob(batch), and unite the batch with its answer"
    ),
}
_BEFORE_ADVANTAGE = {
    "token_level_rewards": (
        "apply_kl_penalty(batch, ...), or set the column to token_level_scores without a penalty"
    ),
}
_VALUES = {"values": "critic_wg.compute_values(batch), and unite the batch with its answer"}


def compute_response_mask(data: DataProto) -> torch.Tensor:
    """Return the part (B, R) of `attention_mask` that covers the responses."""
    return _compute_response_info(data)["response_mask"]


def apply_kl_penalty(
    data: DataProto, kl_ctrl: Any, kl_penalty: str = "kl"
) -> tuple[DataProto, dict[str, float]]:
    """Add `token_level_rewards`, the scores minus the KL penalty; return the batch and metrics.

    The controller gets the mean KL of the batch.
    """
    _need_columns(data, "apply_kl_penalty", _BEFORE_PENALTY)
    _need_response_mask(data)
    section = SimpleNamespace(use_kl_in_reward=True, kl_penalty=kl_penalty)
    config: Any = SimpleNamespace(algorithm=section)
    data.batch["token_level_rewards"], metrics = penalised_scores(data, config, kl_ctrl)
    return data, metrics


def compute_advantage(
    data: DataProto,
    adv_estimator: str,
    gamma: float = 1.0,
    lam: float = 1.0,
    num_repeat: int = 1,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> DataProto:
    """Add `advantages` and `returns` by a registered estimator, in place, and return the batch.

    With `use_pf_ppo` of `config`, a mapping or a section, the rows are then resampled, see
    `compute_pf_ppo_reweight_data`.
    """
    name = getattr(adv_estimator, "value", adv_estimator)
    writers = _BEFORE_ADVANTAGE | (_VALUES if name == "gae" else {})
    _need_columns(data, "compute_advantage", writers)
    _need_response_mask(data)
    columns = data.batch
    given = {
        "token_level_rewards": columns["token_level_rewards"],
        "response_mask": columns["response_mask"],
    }
    if name == "gae":
        given.update(values=columns["values"], gamma=gamma, lam=lam)
    else:
        given["config"] = SimpleNamespace(gamma=gamma, lam=lam) if config is None else config
        if "uid" in data.non_tensor_batch:
            given["index"] = data.non_tensor_batch["uid"]
        if "reward_baselines" in columns.keys():
            given["reward_baselines"] = columns["reward_baselines"]
        if name.startswith("grpo"):
            given["norm_adv_by_std_in_grpo"] = norm_adv_by_std_in_grpo

    columns["advantages"], columns["returns"] = get_adv_estimator_fn(name)(**given)

    if not setting_of(config, "use_pf_ppo"):
        return data
    pf_ppo = setting_of(config, "pf_ppo", PFPPOConfig())
    method = setting_of(pf_ppo, "reweight_method", PFPPOConfig.reweight_method)
    power = setting_of(pf_ppo, "weight_pow", PFPPOConfig.weight_pow)
    return compute_pf_ppo_reweight_data(data, method, power)


def compute_pf_ppo_reweight_data(
    data: DataProto, reweight_method: str = "pow", weight_pow: float = 2.0
) -> DataProto:
    """Draw as many rows with replacement, weighted by scores, see `pf_ppo.pf_ppo_weights`.

    The draw uses torch's generator.
    """
    scores = data.batch["token_level_scores"].sum(-1)
    weights = pf_ppo_weights(scores, reweight_method, weight_pow)
    seed = int(torch.randint(2**31, ()))
    return data.select_idxs(pf_ppo_rows(weights, seed))


def _need_columns(data: DataProto, call: str, writers: Mapping[str, str]) -> None:
    """Raise BatchError if a column is missing; `writers` are the calls that write each."""
    for column, writer in writers.items():
        if column not in data.batch.keys():
            raise BatchError(
                f"{call} reads the column {column}, got {sorted(data.batch.keys())}. First call "
                f"{writer}."
            )


def _need_response_mask(data: DataProto) -> None:
    if "response_mask" not in data.batch.keys():
        data.batch["response_mask"] = compute_response_mask(data)
