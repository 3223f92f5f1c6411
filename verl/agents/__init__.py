"""Agents: loops of several turns with tools, interactions and environments.

Public names load on first use: the helper processes of tools import little.
"""

from typing import TYPE_CHECKING

from verl.utils.lazy import lazy_names

if TYPE_CHECKING:
    from verl.agents.engine_client import EngineClient, EngineSteps, Generated, Work
    from verl.agents.live import LiveEpisodes
    from verl.agents.loops import (
        AgentContext,
        AgentLoop,
        AgentLoopBase,
        AgentLoopMetrics,
        AgentLoopOutput,
        Episode,
        agent_loops,
        register,
    )
    from verl.agents.policies import Copies, FrozenPolicy, PartnerPolicy, host_dtype, make_policies
    from verl.agents.runner import AgentRunner, episodes_of

_CLIENT = "verl.agents.engine_client"
_LIVE = "verl.agents.live"
_LOOPS = "verl.agents.loops"
_POLICIES = "verl.agents.policies"
_RUNNER = "verl.agents.runner"

_HOMES = {
    "AgentContext": _LOOPS,
    "AgentLoop": _LOOPS,
    "AgentLoopBase": _LOOPS,
    "AgentLoopMetrics": _LOOPS,
    "AgentLoopOutput": _LOOPS,
    "AgentRunner": _RUNNER,
    "Copies": _POLICIES,
    "EngineClient": _CLIENT,
    "EngineSteps": _CLIENT,
    "Episode": _LOOPS,
    "Generated": _CLIENT,
    "FrozenPolicy": _POLICIES,
    "LiveEpisodes": _LIVE,
    "PartnerPolicy": _POLICIES,
    "Work": _CLIENT,
    "agent_loops": _LOOPS,
    "episodes_of": _RUNNER,
    "host_dtype": _POLICIES,
    "make_policies": _POLICIES,
    "register": _LOOPS,
}

__all__ = [
    "AgentContext",
    "AgentLoop",
    "AgentLoopBase",
    "AgentLoopMetrics",
    "AgentLoopOutput",
    "AgentRunner",
    "Copies",
    "EngineClient",
    "EngineSteps",
    "Episode",
    "FrozenPolicy",
    "Generated",
    "LiveEpisodes",
    "PartnerPolicy",
    "Work",
    "agent_loops",
    "episodes_of",
    "host_dtype",
    "make_policies",
    "register",
]

__getattr__ = lazy_names(__name__, _HOMES)
