"""Conversations, tools and agents during rollout."""

from dataclasses import dataclass, field
from typing import Any

from verl.config.gateway import GatewayConfig
from verl.config.policies import PolicyConfig
from verl.config.setting import setting

_RERENDERED = "drawn tokens are never tokenized again, and boundaries are proved at start"
_ONE_PROCESS = "agent loops are coroutines in the engine's own process"


@dataclass(kw_only=True, slots=True)
class MultiTurnConfig:
    enable: bool = setting(False, "several turns with tools or a simulated user")
    max_assistant_turns: int | None = setting(None, "most turns of the model", above=0)
    max_user_turns: int | None = setting(
        None, "most answers of tools and of the user together", above=0
    )
    max_tokens_per_turn: int | None = setting(
        None, "most tokens of one turn of the model; null: all that the response has left", above=0
    )
    tool_config_path: str | None = setting(None, "YAML file of tools", is_path=True)
    function_tool_path: str | None = setting(
        None,
        "Python file of functions as tools: those under @function_tool, or else all public ones",
        is_path=True,
    )
    max_parallel_calls: int = setting(
        1, "tool calls of one turn that run; those beyond it are answered with a note", above=0
    )
    max_tool_response_length: int = setting(256, "longest tool output, in characters", above=0)
    tool_response_truncate_side: str = setting(
        "middle",
        "longer output: left keeps its head, right its tail, middle both ends",
        choices=("left", "right", "middle"),
    )
    interaction_config_path: str | None = setting(
        None, "YAML file of interactions (simulated users)", is_path=True
    )
    completion_callback: str | None = setting(
        None, "class that drives a conversation", planned="write an agent loop instead"
    )
    use_inference_chat_template: bool = setting(
        False,
        "each prompt is the chat template's own rendering; where that changes earlier turns, a "
        "further training sample begins. False: prompts extend the drawn tokens",
    )
    tokenization_sanity_check_mode: str = setting(
        "strict", "check of re-tokenised turns", no_effect=_RERENDERED
    )
    format: str | None = setting(
        None, "tool-call format; null: recognised from the chat template", also=("hermes",)
    )

    @property
    def answers(self) -> tuple[str | None, ...]:
        """Return the files of tools and interactions, which answer the model."""
        return (self.tool_config_path, self.function_tool_path, self.interaction_config_path)


@dataclass(kw_only=True, slots=True)
class CustomAsyncServerConfig:
    path: str | None = setting(
        None, "file of a server class", planned="register a rollout engine instead", is_path=True
    )
    name: str | None = setting(
        None, "name of a server class", no_effect="read together with its path only"
    )


@dataclass(kw_only=True, slots=True)
class EnvironmentConfig:
    name: str | None = setting(
        None, "registered environment, package.module.Class or file.py:Class; null: none"
    )
    kwargs: dict[str, Any] = setting({}, "arguments of the environment")
    timeout_s: float = setting(120.0, "seconds that one call of the environment may take", above=0)


@dataclass(kw_only=True, slots=True)
class AgentConfig:
    num_workers: int = setting(8, "processes that run agent loops", no_effect=_ONE_PROCESS)
    default_agent_loop: str | None = setting(
        None,
        "agent loop of rows without agent_name; null: tool_agent where tools or interactions are "
        "configured, environment_agent with an environment, gateway_agent with a gateway's agent, "
        "else single_turn_agent",
    )
    agent_loop_config_path: str | None = setting(
        None, "YAML file of agent loops: a list of {name, _target_, ...}", is_path=True
    )
    max_episodes: int | None = setting(
        None, "episodes at once on a rank; null: rollout.max_num_seqs", above=0
    )
    episode_timeout_s: float | None = setting(
        None, "seconds after which an episode is dropped; null: no limit", above=0
    )
    on_error: str = setting(
        "stop",
        "after an error in an agent loop or environment: stop the run, or drop the episode",
        choices=("stop", "drop"),
    )
    policies: dict[str, PolicyConfig] = setting(
        {},
        "policies of the roles in an episode, by role: {trained: true} is the actor, with a path a "
        "policy of its own; {path: ...} or {url: ...} is frozen (docs/how_to/agents.md)",
    )
    gives_reward: bool = setting(
        False, "agent loops give the score of every episode (reward_score); environments always do"
    )
    tool_timeout_s: float = setting(30.0, "seconds that one tool call may take", above=0)
    tool_error: str = setting(
        "text",
        "a failed tool call: text shows it to the model, mask also leaves the calling turn out of "
        "the loss, drop drops the episode",
        choices=("text", "mask", "drop"),
    )
    record_path: str | None = setting(
        None, "file that every tool call is recorded in", is_path=True
    )
    replay_path: str | None = setting(
        None, "recorded tool calls that replace the tools", is_path=True
    )
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    custom_async_server: CustomAsyncServerConfig = field(default_factory=CustomAsyncServerConfig)

    @property
    def loops(self) -> tuple[str | None, ...]:
        """Return the settings, each of which sends rows through agent loops."""
        return (
            self.agent_loop_config_path,
            self.default_agent_loop,
            self.environment.name,
            self.replay_path,
            self.gateway.path,
            self.gateway.command,
        )

    @property
    def partners(self) -> dict[str, PolicyConfig]:
        """Return the policies that are trained next to the actor, by their roles."""
        return {role: policy for role, policy in self.policies.items() if policy.is_partner}
