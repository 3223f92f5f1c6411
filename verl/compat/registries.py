"""The registries of verl 0.5: dictionaries of functions with its signatures."""

import functools
from collections.abc import Callable, MutableMapping
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
from verl.utils.registry import RegistryDict, is_loaded_again, nearest_names, plain

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
    """Return the estimator as a function of verl 0.5's named parameters."""

    def by_names(
        token_level_rewards: Any,
        response_mask: Any,
        index: Any = None,
        *,
        config: Any = None,
        **given: Any,
    ) -> Any:
        known = {"norm_by_std": given.get("norm_adv_by_std_in_grpo", True)}
        for name in ("values", "gamma", "lam"):
            if name in given:
                known[name] = given[name]

        group = None if index is None else group_ids(index)
        inputs = AdvantageInputs(
            token_level_rewards, response_mask, group=group, config=config, **known
        )
        return estimator(inputs)

    return by_names


POLICY_LOSS_REGISTRY = RegistryDict(policy_losses, PaddedPolicyLoss, padded_signature)
ADV_ESTIMATOR_REGISTRY = RegistryDict(advantage_estimators, PaddedEstimator, _estimator)


def register_policy_loss(name: str) -> Callable[[Function], Function]:
    """Register fn(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config).

    See `verl.algorithms.padded` for its arguments. Raises ConfigError (a ValueError) if another
    function has that name.
    """

    def add(function: Function) -> Function:
        return _register(POLICY_LOSS_REGISTRY, "policy loss", name, function)

    return add


def get_policy_loss_fn(name: str) -> Function:
    """Return a loss with that signature. Raises ConfigError (a ValueError) for an unknown name."""
    return _registered(POLICY_LOSS_REGISTRY, "loss mode", name)


def register_adv_est(name_or_enum: str | AdvantageEstimator) -> Callable[[Function], Function]:
    """Register fn(token_level_rewards, response_mask, index, config, ...).

    It returns (advantages, returns). Raises ConfigError (a ValueError) if another function has that
    name.
    """
    name = plain(name_or_enum)

    def add(function: Function) -> Function:
        return _register(ADV_ESTIMATOR_REGISTRY, "advantage estimator", name, function)

    return add


def get_adv_estimator_fn(name_or_enum: str | AdvantageEstimator) -> Function:
    """Return an estimator with that signature.

    Raises ConfigError (a ValueError) for an unknown name.
    """
    # "simply" is in the message of verl 0.5, which recipes' tests match.
    return _registered(ADV_ESTIMATOR_REGISTRY, "advantage estimator simply", plain(name_or_enum))


def get_reward_manager_cls(name: str) -> Callable[..., Any]:
    """Return a reward manager by name. Raises ConfigError (a ValueError) for an unknown name."""
    return _registered(REWARD_MANAGER_REGISTRY, "reward manager", name)


def _register(
    registry: MutableMapping[str, Any], kind: str, name: str, function: Function
) -> Function:
    # Recipes and tests replace a registry by a plain dictionary, which refuses nothing.
    known = registry.get(name, function)
    if is_loaded_again(known, function):
        return function
    if known is not function:
        raise ConfigError(f"{kind} '{name}' has already been registered; give yours another name.")
    registry[name] = function
    return function


def _registered(registry: RegistryDict, kind: str, name: str) -> Any:
    """Return the value under `name`. The error for an unknown name has the text of verl 0.5."""
    if name not in registry:
        near = nearest_names(name, list(registry))
        raise ConfigError(f"Unknown {kind}: {name}. Nearest known: {near}.")
    return registry[name]
