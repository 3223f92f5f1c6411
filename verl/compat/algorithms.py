"""The driver's steps on a DataProto by verl 0.5's names: masks, penalties, advantages, PF-PPO."""

from types import SimpleNamespace
from typing import Any

import torch

from verl.algorithms.pf_ppo import pf_ppo_rows, pf_ppo_weights
from verl.compat.metrics import _compute_response_info
from verl.compat.registries import get_adv_estimator_fn
from verl.protocol import DataProto
from verl.trainer.algorithm import penalised_scores


def compute_response_mask(data: DataProto) -> torch.Tensor:
    """Return the part (B, R) of `attention_mask` that covers the responses."""
    return _compute_response_info(data)["response_mask"]


def apply_kl_penalty(
    data: DataProto, kl_ctrl: Any, kl_penalty: str = "kl"
) -> tuple[DataProto, dict[str, float]]:
    """Add `token_level_rewards`, the scores minus the KL penalty; return the batch and metrics.

    The controller gets the mean KL of the batch.
    """
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

    With `config.use_pf_ppo` the rows are then resampled, see `compute_pf_ppo_reweight_data`.
    """
    _need_response_mask(data)
    columns = data.batch
    given = {
        "token_level_rewards": columns["token_level_rewards"],
        "response_mask": columns["response_mask"],
    }
    name = getattr(adv_estimator, "value", adv_estimator)
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

    if config is not None and config.use_pf_ppo:
        pf_ppo = config.pf_ppo
        return compute_pf_ppo_reweight_data(data, pf_ppo.reweight_method, pf_ppo.weight_pow)
    return data


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


def _need_response_mask(data: DataProto) -> None:
    if "response_mask" not in data.batch.keys():
        data.batch["response_mask"] = compute_response_mask(data)
