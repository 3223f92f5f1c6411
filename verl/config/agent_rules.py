"""Contradictions and doubts about agent loops, tools and environments."""

from verl.config.keys import value_at, written
from verl.config.policies import SELF, PolicyConfig
from verl.config.rule_table import Messages, Rows, table
from verl.config.train import TrainConfig

_ROLLOUT = "actor_rollout_ref.rollout"


@table
def turns_have_an_answer(config: TrainConfig) -> Rows:
    rollout = config.actor_rollout_ref.rollout
    agent = rollout.agent
    answers = rollout.multi_turn.answers
    has_answers = any(answers)
    has_tools = any(answers[:2])
    two_agents = agent.gateway.path is not None and agent.gateway.command is not None
    is_recorded = agent.record_path is not None

    return (
        (
            two_agents,
            "actor_rollout_ref.rollout.agent.gateway.path and gateway.command both name an agent. "
            "Leave one out.",
        ),
        (
            rollout.multi_turn.enable and not any((*answers, *agent.loops)),
            "actor_rollout_ref.rollout.multi_turn.enable=True needs something that answers the "
            "model, got nothing: no turn would follow the first. Set multi_turn.tool_config_path, "
            "multi_turn.function_tool_path, multi_turn.interaction_config_path, "
            "agent.environment.name, agent.gateway.path, agent.agent_loop_config_path or, for a "
            "registered loop, agent.default_agent_loop.",
        ),
        (
            agent.environment.name is not None and has_answers,
            "{actor_rollout_ref.rollout.agent.environment.name=} answers the model itself, so "
            "tools and interactions would never be reached. Leave either out.",
        ),
        (
            has_answers and agent.default_agent_loop == "single_turn_agent",
            "actor_rollout_ref.rollout.agent.default_agent_loop=single_turn_agent ends after one "
            "turn, so tools and interactions would never be reached. Set it to tool_agent, or "
            "leave it out.",
        ),
        (
            is_recorded and not has_tools,
            "{actor_rollout_ref.rollout.agent.record_path=} needs tools, got none. Set "
            "multi_turn.tool_config_path or multi_turn.function_tool_path, or leave it out.",
        ),
        (
            is_recorded and agent.replay_path is not None,
            "actor_rollout_ref.rollout.agent.replay_path and record_path are both set. Replay the "
            "recording, or record anew.",
        ),
    )


@table
def scores_and_turns_fit(config: TrainConfig) -> Rows:
    rollout = config.actor_rollout_ref.rollout
    algorithm = config.algorithm
    one_turn = not rollout.uses_agents

    return (
        (
            config.reward_model.enable and rollout.scores_itself,
            "reward_model.enable=True would replace the scores that agent loops or environments "
            "give. Leave the reward model out, or actor_rollout_ref.rollout.agent.gives_reward and "
            "agent.environment.name.",
        ),
        (
            algorithm.adv_estimator == "turn_rloo" and one_turn,
            "algorithm.adv_estimator=turn_rloo needs agent loops, got a rollout of one turn. "
            "Configure tools, interactions or an environment, or use adv_estimator=rloo.",
        ),
        (
            algorithm.turn_rewards and one_turn,
            "algorithm.turn_rewards=True needs agent loops, got a rollout of one turn. Configure "
            "tools, interactions or an environment, or leave it out.",
        ),
        (
            algorithm.turn_rewards and rollout.multi_turn.use_inference_chat_template,
            "algorithm.turn_rewards=True needs all turns of an episode in one row, which "
            "actor_rollout_ref.rollout.multi_turn.use_inference_chat_template=True does not keep. "
            "Leave either out.",
        ),
    )


def policies_can_play(config: TrainConfig) -> Messages:
    rollout = config.actor_rollout_ref.rollout
    policies = rollout.agent.policies
    if policies and not rollout.uses_agents:
        yield (
            f"{_ROLLOUT}.agent.policies needs an agent loop with roles, got a rollout of one turn. "
            "Set agent.environment.name or agent.agent_loop_config_path, or leave it out."
        )

    for role, policy in policies.items():
        key = f"{_ROLLOUT}.agent.policies.{role}"
        yield from _policy_is_one_model(key, policy)
        if policy.path == SELF and not policy.trained:
            yield from _copies_can_be_made(config, key, policy.update_freq)
        is_local = policy.path is not None and not policy.trained
        if is_local and config.trainer.mode == "fully_async":
            yield (
                f"{key}.path={policy.path} is played between two steps of the rollout's engine, "
                "which trainer.mode=fully_async does not wait for. Serve the model and set url, or "
                "set trainer.mode=sync."
            )

    if policies and not any(each.trained and each.path is None for each in policies.values()):
        yield (
            f"{_ROLLOUT}.agent.policies names no role that the actor plays, got "
            f"{', '.join(policies)}. Set trained=true, without a path, for one."
        )


def _policy_is_one_model(key: str, policy: PolicyConfig) -> Messages:
    places = [name for name in ("path", "url") if getattr(policy, name) is not None]
    if policy.trained and policy.url is not None:
        yield (
            f"{key} has trained=true and url={policy.url}, but a server's policy is not trained. "
            "Leave url out (the actor), or trained (a frozen model)."
        )
    elif policy.trained and policy.path == SELF:
        yield (
            f"{key} has trained=true and path={SELF}, which is a frozen copy. Leave path out (the "
            "actor), or name the model that its own policy begins with."
        )
    elif not policy.trained and len(places) != 1:
        yield (
            f"{key} needs one of trained=true (the actor), path (a frozen model) and url (a "
            f"server), got {' and '.join(places) or 'none'}."
        )

    if policy.lr is not None and not policy.is_partner:
        yield f"{key}.lr={policy.lr} needs trained=true and a path. Set both, or leave it out."
    if policy.url is not None and policy.model is None:
        yield f"{key}.url={policy.url} needs the name that the server has for its model: set model."
    if policy.url is None and (policy.model is not None or policy.api_key_env is not None):
        yield f"{key}.model and api_key_env are read together with url only. Set url, or leave both."
    if not policy.trained and (policy.path == SELF) != (policy.update_freq is not None):
        yield (
            f"{key}.path={SELF} and update_freq (steps from one copy of the actor to the next) "
            f"belong together, got path={policy.path} and update_freq={policy.update_freq}."
        )


def _copies_can_be_made(config: TrainConfig, key: str, freq: int | None) -> Messages:
    needed = {
        "trainer.mode": "sync",
        f"{_ROLLOUT}.name": "embedded",
        f"{_ROLLOUT}.tensor_model_parallel_size": 1,
        f"{_ROLLOUT}.quantization": None,
    }
    for name, wanted in needed.items():
        given = value_at(config, name)
        if given != wanted:
            yield (
                f"{key}.path={SELF} copies whole weights from the engine of the rollout, which "
                f"{name}={given} does not have in one place. Set it to {written(wanted)}."
            )
    saved_every = config.trainer.save_freq
    if freq is not None and saved_every > 0 and saved_every % freq:
        yield (
            f"{key}.update_freq={freq} must divide trainer.save_freq={saved_every}: a resumed run "
            "copies the weights of its checkpoint."
        )


def agent_doubts(config: TrainConfig) -> Messages:
    """Yield settings of turns, rewards and policies that change nothing."""
    rollout = config.actor_rollout_ref.rollout
    of_turn = rollout.multi_turn.max_tokens_per_turn
    if rollout.uses_agents and of_turn is not None and of_turn > rollout.response_length:
        yield (
            f"{_ROLLOUT}.multi_turn.max_tokens_per_turn={of_turn} has no effect: all turns of an "
            f"episode share data.max_response_length={rollout.response_length} tokens. Lower it, "
            "or raise data.max_response_length."
        )

    reward_path = config.custom_reward_function.path
    if reward_path is not None and rollout.scores_itself:
        source = f"{_ROLLOUT}.agent.environment.name={rollout.agent.environment.name}"
        if rollout.agent.gives_reward:
            source = f"{_ROLLOUT}.agent.gives_reward=True"
        yield (
            f"custom_reward_function.path={reward_path} is never called for episodes that "
            f"{source} scores. Leave it out, or let the environment or the agent compute the score."
        )

    for role, policy in rollout.agent.policies.items():
        unread = _unread_by(policy)
        if unread:
            yield (
                f"{_ROLLOUT}.agent.policies.{role}: {', '.join(unread)} without effect. A trained "
                "policy draws as the actor does (rollout.temperature and so on); timeout_s and "
                "max_concurrent belong to url."
            )


def _unread_by(policy: PolicyConfig) -> list[str]:
    """Return the settings of a policy that are given, and that nothing reads."""
    names = []
    if policy.trained:
        names += ["temperature", "top_k", "top_p", "max_new_tokens", "update_freq"]
    if policy.url is None:
        names += ["timeout_s", "max_concurrent"]
    plain = PolicyConfig()
    return [name for name in names if getattr(policy, name) != getattr(plain, name)]


RULES = (turns_have_an_answer, scores_and_turns_fit, policies_can_play)
