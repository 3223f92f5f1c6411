"""Agents: loops of several turns with tools, interactions and environments.

Public names load on first use: the helper processes of tools import little.
"""

from typing import TYPE_CHECKING

from verl.utils.lazy import lazy_names

if TYPE_CHECKING:
    from verl.agents.engine_client import EngineClient as EngineClient
    from verl.agents.engine_client import EngineSteps as EngineSteps
    from verl.agents.engine_client import Generated as Generated
    from verl.agents.engine_client import Work as Work
    from verl.agents.live import LiveEpisodes as LiveEpisodes
    from verl.agents.loops import AgentContext as AgentContext
    from verl.agents.loops import AgentLoop as AgentLoop
    from verl.agents.loops import AgentLoopBase as AgentLoopBase
    from verl.agents.loops import AgentLoopMetrics as AgentLoopMetrics
    from verl.agents.loops import AgentLoopOutput as AgentLoopOutput
    from verl.agents.loops import Episode as Episode
    from verl.agents.loops import agent_loops as agent_loops
    from verl.agents.loops import register as register
    from verl.agents.policies import Copies as Copies
    from verl.agents.policies import FrozenPolicy as FrozenPolicy
    from verl.agents.policies import PartnerPolicy as PartnerPolicy
    from verl.agents.policies import host_dtype as host_dtype
    from verl.agents.policies import make_policies as make_policies
    from verl.agents.runner import AgentRunner as AgentRunner
    from verl.agents.runner import episodes_of as episodes_of

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
