"""Agent loops: the built-in ones, and those of users."""

from verl.agents.loops import environment, single_turn, tool_agent  # noqa: F401  (register)
from verl.agents.loops.base import AgentContext, AgentLoop, Episode, Tally, agent_loops
from verl.agents.loops.config import register_loops
from verl.agents.loops.user_loop import (
    AgentLoopBase,
    AgentLoopMetrics,
    AgentLoopOutput,
    ServerManager,
    TokenOutput,
    register,
)

__all__ = [
    "AgentContext",
    "AgentLoop",
    "AgentLoopBase",
    "AgentLoopMetrics",
    "AgentLoopOutput",
    "Episode",
    "ServerManager",
    "Tally",
    "TokenOutput",
    "agent_loops",
    "register",
    "register_loops",
]
