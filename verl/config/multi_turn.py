"""Conversations, tools and agents during rollout."""

from dataclasses import dataclass, field

from verl.config.setting import setting

_MULTI_TURN = "only single-turn rollouts are built"
_UNREAD = "read in multi-turn rollouts only, which are not available in this version"


@dataclass(kw_only=True, slots=True)
class MultiTurnConfig:
    enable: bool = setting(
        False, "several turns with tools or a simulated user", planned=_MULTI_TURN
    )
    max_assistant_turns: int | None = setting(None, "most turns of the model", no_effect=_UNREAD)
    tool_config_path: str | None = setting(
        None, "YAML file of tools", planned=_MULTI_TURN, is_path=True
    )
    max_user_turns: int | None = setting(None, "most turns of the user", no_effect=_UNREAD)
    max_parallel_calls: int = setting(1, "tool calls at once", no_effect=_UNREAD)
    max_tool_response_length: int = setting(256, "longest tool output", no_effect=_UNREAD)
    tool_response_truncate_side: str = setting(
        "middle", "where longer output is cut", no_effect=_UNREAD
    )
    interaction_config_path: str | None = setting(
        None, "YAML file of interactions", planned=_MULTI_TURN, is_path=True
    )
    completion_callback: str | None = setting(
        None, "class that drives a conversation", planned=_MULTI_TURN
    )
    use_inference_chat_template: bool = setting(
        False, "template as at inference", no_effect=_UNREAD
    )
    tokenization_sanity_check_mode: str = setting(
        "strict", "check of re-tokenised turns", no_effect=_UNREAD
    )
    format: str = setting("hermes", "tool-call format", no_effect=_UNREAD)


@dataclass(kw_only=True, slots=True)
class CustomAsyncServerConfig:
    path: str | None = setting(None, "file of a server class", planned=_MULTI_TURN, is_path=True)
    name: str | None = setting(None, "name of a server class", no_effect=_UNREAD)


@dataclass(kw_only=True, slots=True)
class AgentConfig:
    num_workers: int = setting(8, "processes that run agent loops", no_effect=_UNREAD)
    agent_loop_config_path: str | None = setting(
        None, "YAML file of agent loops", planned=_MULTI_TURN, is_path=True
    )
    custom_async_server: CustomAsyncServerConfig = field(default_factory=CustomAsyncServerConfig)
