"""The state of an episode, as tools of verl 0.6 and later read it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True)
class AgentData:
    """An episode up to the turn that calls a tool. `execute` gets it as `agent_data`.

    A tool in the trainer's process (`isolation: thread`) has one object for the whole episode, and
    the reward function gets its `extra_fields`. A tool in a helper process gets a copy.

    Args:
        request_id: name of the episode within the run.
        messages: the conversation, with the message that has the calls.
        prompt_ids: all tokens so far.
        response_ids: those of the last turn.
        tools_kwargs: of the row.
        interaction_kwargs: of the row.
        turn_scores: scores of the simulated user.
        tool_rewards: step rewards of the tools, in the order of their calls.
        user_turns: answers of tools and user so far.
        assistant_turns: turns of the model so far.
        tool_calls: calls of the last turn, as in its message.
        extra_fields: entries of the tools' own.
    """

    request_id: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    response_ids: list[int] = field(default_factory=list)
    tools_kwargs: Mapping[str, Any] = field(default_factory=dict)
    interaction_kwargs: Mapping[str, Any] = field(default_factory=dict)
    turn_scores: list[float] = field(default_factory=list)
    tool_rewards: list[float] = field(default_factory=list)
    user_turns: int = 0
    assistant_turns: int = 0
    tool_calls: list[Any] = field(default_factory=list)
    image_data: Any = None
    video_data: Any = None
    metrics: dict[str, Any] = field(default_factory=dict)
    extra_fields: dict[str, Any] = field(default_factory=dict)
