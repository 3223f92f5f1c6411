"""Agent loops: the built-in ones, and those of users."""

from verl.agents.loops import (  # noqa: F401  (register)
    environment,
    gateway,
    single_turn,
    tool_agent,
)
from verl.agents.loops.base import AgentContext, AgentLoop, Episode, Tally, agent_loops
from verl.agents.loops.config import register_loops
from verl.agents.loops.server_manager import ServerManager, TokenOutput
from verl.agents.loops.user_base import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
from verl.agents.loops.user_loop import register

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
