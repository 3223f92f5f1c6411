"""An unmodified agent, a function or a program, that talks to the model through the gateway."""

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from verl.agents.formats import CallFormat, tool_format
from verl.agents.gateway import require_aiohttp
from verl.agents.gateway.wording import Wording
from verl.agents.loops.base import AgentContext, Episode, EpisodeDropped, agent_loops
from verl.rollout.trajectory import Trajectory

if TYPE_CHECKING:
    from verl.agents.gateway.agents import Agent
    from verl.agents.gateway.loop import GatewayLoop

GATEWAY_AGENT = "gateway_agent"


class GatewayAgentLoop:
    """Play each episode with an agent that talks to the gateway.

    The gateway listens from the first episode of a batch to the last. The agent stays for the whole
    run, so that clients which it keeps stay in one event loop. An episode that fails has no
    trajectory and is dropped.

    Args:
        agent: plays the episodes; None: the one that `rollout.agent.gateway` names.
    """

    def __init__(self, context: AgentContext, agent: "Agent | None" = None) -> None:
        require_aiohttp("An agent behind the gateway (actor_rollout_ref.rollout.agent.gateway)")
        self.context = context
        self._agent = agent
        self._wording = Wording(context.tokenizer, context.boundary, _tool_format(context))
        self._num_playing = 0
        self._gateway: asyncio.Future[GatewayLoop] | None = None
        self._open = AsyncExitStack()

    async def play(self, episode: Episode) -> list[Trajectory]:
        """See `AgentLoop.play`."""
        self._num_playing += 1
        try:
            if self._gateway is None:
                self._gateway = asyncio.ensure_future(self._start())
            gateway = await asyncio.shield(self._gateway)
            trajectories = await gateway.play(episode)
            if not trajectories:
                raise EpisodeDropped(gateway.causes[episode.name])
            return trajectories
        finally:
            self._num_playing -= 1
            if self._num_playing == 0:
                await self._stop()

    async def _start(self) -> "GatewayLoop":
        from verl.agents.gateway.agents import load_agent
        from verl.agents.gateway.loop import gateway_loop

        config = self.context.config
        asked = config.agent.gateway
        if self._agent is None:
            self._agent = load_agent(asked.path, asked.name, asked.command)
            self.context.closers.append(self._agent.close)

        starting = gateway_loop(
            self._agent,
            asked,
            self.context.client,
            self._wording,
            max_prompt_tokens=config.prompt_length,
            max_response_tokens=self.context.max_response_tokens,
        )
        return await self._open.enter_async_context(starting)

    async def _stop(self) -> None:
        """Stop the gateway, and note its counts. An episode that comes later starts another."""
        started = self._gateway
        opened = self._open
        self._gateway = None
        self._open = AsyncExitStack()
        if started is not None and started.done() and started.exception() is None:
            for name, count in started.result().counts().items():
                self.context.tally.counts[f"gateway/{name}"] += count
        await opened.aclose()


def _tool_format(context: AgentContext) -> CallFormat | None:
    """Return the format of tool calls; None where the chat template shows no known one."""
    name = context.format_name
    return None if name is None else tool_format(name, context.tokenizer)


agent_loops.register(GATEWAY_AGENT)(GatewayAgentLoop)
