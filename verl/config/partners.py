"""Policies that are trained next to the actor: their settings, and features that they lack."""

import re
from dataclasses import replace

from verl.config.actor_rollout_ref import ActorRolloutRefConfig
from verl.config.keys import value_at
from verl.config.multi_turn import AgentConfig, MultiTurnConfig
from verl.config.placement import rollout_is_apart
from verl.config.policies import PolicyConfig
from verl.config.rule_table import Messages
from verl.config.train import TrainConfig

_ROLLOUT = "actor_rollout_ref.rollout"
# Estimators that compare the samples of one group, and nothing across groups.
_WITHIN_GROUPS = ("grpo", "grpo_passk", "rloo", "opo", "turn_rloo")
# The values of keys with which a second policy can be trained.
_SUPPORTED = {
    "trainer.mode": ("sync",),
    "algorithm.adv_estimator": _WITHIN_GROUPS,
    "algorithm.filter_groups.enable": (False,),
    "algorithm.use_pf_ppo": (False,),
    "algorithm.use_kl_in_reward": (False,),
    "algorithm.rollout_correction.bypass_mode": (False,),
    "actor_rollout_ref.actor.use_kl_loss": (False,),
    "actor_rollout_ref.actor.router_replay.mode": ("disabled",),
    "distillation.enabled": (False,),
    "critic.enable": (False,),
    "actor_rollout_ref.rollout.name": ("embedded",),
    "actor_rollout_ref.rollout.tensor_model_parallel_size": (1,),
}


def partner_section(roles: ActorRolloutRefConfig, policy: PolicyConfig) -> ActorRolloutRefConfig:
    """Return the section of a partner: the actor's, with the model and learning rate of its own."""
    optim = roles.actor.optim
    if policy.lr is not None:
        optim = replace(optim, lr=policy.lr)
    model = replace(roles.model, path=policy.path, trust_remote_code=policy.trust_remote_code)
    # Episodes are played by the actor's rollout, which draws the partner's turns from its engine.
    rollout = replace(roles.rollout, agent=AgentConfig(), multi_turn=MultiTurnConfig(), mode="sync")
    return replace(roles, model=model, actor=replace(roles.actor, optim=optim), rollout=rollout)


def partners_can_learn(config: TrainConfig) -> Messages:
    """Yield settings that a run with several trained policies does not support."""
    roles = config.actor_rollout_ref
    partners = roles.rollout.agent.partners
    if not partners:
        return

    for role in partners:
        if re.fullmatch(r"[\w-]+", role) is None:
            yield (
                f"{_ROLLOUT}.agent.policies: a second trained policy has checkpoints in a folder "
                f"with the name of its role, got {role!r}. Use letters, digits, _ and - alone."
            )

    role = next(iter(partners))
    trained = f"{_ROLLOUT}.agent.policies.{role} (trained, with a path)"
    for key, supported in _SUPPORTED.items():
        given = config.needs_critic if key == "critic.enable" else value_at(config, key)
        if given not in supported:
            yield (
                f"{trained} is a second trained policy, which does not support {key}={given}. Set "
                f"it to {' or '.join(map(str, supported))}, or train one policy: leave out "
                f"{role}.path (the actor) or {role}.trained (frozen)."
            )
    if rollout_is_apart(config):
        yield (
            f"{trained} needs its engine next to its weights. Leave trainer.placement.rollout "
            "unset."
        )
    agent = roles.rollout.agent
    plays = (agent.environment.name, agent.agent_loop_config_path, roles.model.external_lib)
    if not any(plays):
        yield (
            f"{trained} plays in environments and in agent loops of your own. Set {_ROLLOUT}.agent."
            "environment.name, or .agent_loop_config_path."
        )
