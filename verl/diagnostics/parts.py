"""Look up the parts that a configuration names: the registered ones, and those of the user."""

from typing import Any

from verl.algorithms.advantages import advantage_estimators
from verl.algorithms.padded import PaddedEstimator, PaddedPolicyLoss, loss_settings
from verl.algorithms.policy_losses import extra_losses, policy_losses
from verl.config import TrainConfig
from verl.rewards.managers import reward_managers
from verl.rollout import check_engine
from verl.utils.errors import ConfigError
from verl.utils.imports import import_user_code
from verl.utils.signatures import keywords_of, takes_any_keyword


def load_user_code(config: TrainConfig) -> None:
    """Import the modules or .py files that `model.external_lib` of the roles names."""
    roles = (config.actor_rollout_ref, config.critic, config.reward_model)
    import_user_code(*(role.model.external_lib for role in roles))


def check_names(config: TrainConfig) -> None:
    """Check every name in the configuration against its registry, before any weight is loaded.

    Raises ConfigError for an unknown name, with the nearest known ones, and for a part that does
    not take its settings.
    """
    actor = config.actor_rollout_ref.actor
    advantage_estimators.get(config.algorithm.adv_estimator)
    for term in actor.loss_extra:
        extra_losses.get(term.name)
    reward_managers.get(config.reward_model.reward_manager)
    check_engine(config.actor_rollout_ref.rollout)
    loss = policy_losses.get(actor.policy_loss.loss_mode)

    if (
        isinstance(loss, PaddedPolicyLoss)
        and config.algorithm.rollout_correction.rollout_is is not None
    ):
        raise ConfigError(
            f"The policy loss '{actor.policy_loss.loss_mode}' of verl's padded signature cannot "
            "weigh its tokens, which algorithm.rollout_correction.rollout_is asks for. Register it "
            "by verl.algorithms.policy_losses.policy_losses, or set rollout_is=null."
        )
    _check_keywords(config)


def _check_keywords(config: TrainConfig) -> None:
    """Check that estimator and policy loss take the keywords that they will get."""
    algorithm = config.algorithm
    actor = config.actor_rollout_ref.actor
    policy_loss = actor.policy_loss
    estimator: Any = advantage_estimators.get(algorithm.adv_estimator)
    loss: Any = policy_losses.get(policy_loss.loss_mode)
    if isinstance(estimator, PaddedEstimator):
        estimator = estimator.function

    for key, part, given in (
        ("algorithm.adv_kwargs", estimator, algorithm.adv_kwargs),
        ("actor_rollout_ref.actor.policy_loss.loss_kwargs", loss, policy_loss.loss_kwargs),
    ):
        # A loss of verl's signature reads its section of the configuration instead.
        known = keywords_of(part)
        wrong = [] if isinstance(part, PaddedPolicyLoss) else sorted(given.keys() - set(known))
        if wrong:
            raise ConfigError(
                f"{key}.{wrong[0]}: the function takes {', '.join(known)}. Declare a keyword of "
                "that name, or correct the key."
            )

    declared = keywords_of(loss)
    refused = [name for name in (*loss_settings(actor), "loss_agg_mode") if name not in declared]
    if refused and not takes_any_keyword(loss):
        raise ConfigError(
            f"The policy loss '{policy_loss.loss_mode}' does not take all settings that every loss "
            f"gets, such as {refused[0]}. Let its function take those that it does not read as "
            "`**_`."
        )
