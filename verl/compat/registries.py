"""The registries of verl 0.5: dictionaries of functions by its signatures, over the registries of
the package."""

import functools
from collections.abc import Callable
from enum import Enum
from typing import Any

from verl.algorithms import advantages, group_advantages, reinforce
from verl.algorithms.advantages import AdvantageInputs, advantage_estimators
from verl.algorithms.group_advantages import group_ids
from verl.algorithms.padded import PaddedEstimator, PaddedPolicyLoss, padded_signature
from verl.algorithms.policy_losses import policy_losses
from verl.compat import signatures
from verl.rewards.managers import REWARD_MANAGER_REGISTRY
from verl.utils.errors import ConfigError
from verl.utils.registry import RegistryDict, nearest_names, plain

Function = Callable[..., Any]


class AdvantageEstimator(str, Enum):
    """Names of the estimators that come with the package."""

    GAE = "gae"
    GRPO = "grpo"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    REMAX = "remax"
    RLOO = "rloo"
    OPO = "opo"
    GRPO_PASSK = "grpo_passk"
    GPG = "gpg"
    GDPO = "gdpo"


_SIGNATURES: dict[Function, Function] = {
    advantages.gae: signatures.compute_gae_advantage_return,
    group_advantages.grpo: signatures.compute_grpo_outcome_advantage,
    group_advantages.grpo_passk: signatures.compute_grpo_passk_outcome_advantage,
    group_advantages.rloo: signatures.compute_rloo_outcome_advantage,
    group_advantages.opo: signatures.compute_opo_outcome_advantage,
    group_advantages.gpg: signatures.compute_gpg_outcome_advantage,
    reinforce.reinforce_plus_plus: signatures.compute_reinforce_plus_plus_outcome_advantage,
    group_advantages.reinforce_plus_plus_baseline: (
        signatures.compute_reinforce_plus_plus_baseline_outcome_advantage
    ),
    reinforce.remax: signatures.compute_remax_outcome_advantage,
}


def _estimator(name: str) -> Function:
    estimator = advantage_estimators.get(name)
    if isinstance(estimator, PaddedEstimator):
        return estimator.function
    return _SIGNATURES.get(estimator) or _by_names(estimator)


@functools.cache
def _by_names(estimator: Callable[[AdvantageInputs], Any]) -> Function:
    """The estimator as a function of verl's parameters, by name."""

    def by_names(
        token_level_rewards: Any,
        response_mask: Any,
        index: Any = None,
        *,
        config: Any = None,
        **given: Any,
    ) -> Any:
        fields = {**given, "norm_by_std": given.get("norm_adv_by_std_in_grpo", True)}
        known = {
            name: fields[name]
            for name in ("values", "gamma", "lam", "norm_by_std")
            if name in fields
        }
        group = None if index is None else group_ids(index)
        return estimator(
            AdvantageInputs(token_level_rewards, response_mask, group=group, config=config, **known)
        )

    return by_names


POLICY_LOSS_REGISTRY = RegistryDict(policy_losses, PaddedPolicyLoss, padded_signature)
ADV_ESTIMATOR_REGISTRY = RegistryDict(advantage_estimators, PaddedEstimator, _estimator)


def register_policy_loss(name: str) -> Callable[[Function], Function]:
    """Decorator for fn(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config),
    see `padded`."""

    def add(function: Function) -> Function:
        POLICY_LOSS_REGISTRY[name] = function
        return function

    return add


def get_policy_loss_fn(name: str) -> Function:
    """The loss by that signature. ConfigError (a ValueError) for an unknown name."""
    return _registered(POLICY_LOSS_REGISTRY, "loss mode", name)


def register_adv_est(name_or_enum: str | AdvantageEstimator) -> Callable[[Function], Function]:
    """Decorator for fn(token_level_rewards, response_mask, index, config, ...) -> (advantages,
    returns)."""

    def add(function: Function) -> Function:
        ADV_ESTIMATOR_REGISTRY[name_or_enum] = function
        return function

    return add


def get_adv_estimator_fn(name_or_enum: str | AdvantageEstimator) -> Function:
    """The estimator by that signature. ConfigError (a ValueError) for an unknown name."""
    return _registered(ADV_ESTIMATOR_REGISTRY, "advantage estimator", plain(name_or_enum))


def get_reward_manager_cls(name: str) -> Callable[..., Any]:
    """The reward manager under that name. ConfigError (a ValueError) for an unknown name."""
    return _registered(REWARD_MANAGER_REGISTRY, "reward manager", name)


def _registered(registry: RegistryDict, kind: str, name: str) -> Any:
    """The value under `name`; an unknown name raises in the words of verl 0.5."""
    if name not in registry:
        near = nearest_names(name, list(registry))
        raise ConfigError(f"Unknown {kind}: {name}. Nearest known: {near}.")
    return registry[name]
