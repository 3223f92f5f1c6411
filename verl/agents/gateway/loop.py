"""Episodes that a user's unmodified agent plays against the gateway."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from verl.agents.engine_client import EngineClient
from verl.agents.gateway.agents import Agent, AgentTimeoutError, read_reward
from verl.agents.gateway.recorder import SessionRecorder
from verl.agents.gateway.server import GatewayServer
from verl.agents.gateway.sessions import SessionBackend
from verl.agents.gateway.wording import Wording
from verl.config.gateway import GatewayConfig
from verl.rollout.trajectory import Trajectory, fields_of_user
from verl.utils.errors import VerlError

if TYPE_CHECKING:
    from verl.agents.loops.base import Episode


class GatewayLoop:
    """Play each episode as a session of a running gateway.

    Args:
        agent: of the user.
        server: listens already.
        recorder: of its sessions.
        timeout_s: longest time of an episode.
    """

    def __init__(
        self, agent: Agent, server: GatewayServer, recorder: SessionRecorder, *, timeout_s: float
    ) -> None:
        self.agent = agent
        self.server = server
        self.recorder = recorder
        self.timeout_s = timeout_s
        self.causes: dict[str, str] = {}  # session -> the reason why it has no trajectory
        self._failures: Counter[str] = Counter()

    async def play(self, episode: "Episode") -> list[Trajectory]:
        """Play an episode. Return its trajectories.

        An episode that failed has none. It is counted, and `causes` has the reason for the caller,
        which logs it.
        """
        session = episode.name
        key = self.recorder.open(session, row=episode.row)
        row = {"messages": [dict(message) for message in episode.messages], **episode.fields}
        playing = asyncio.ensure_future(
            self.agent.play(self.server.session_url(session), key, row, timeout_s=self.timeout_s)
        )
        try:
            await self._until_over(session, playing)
            if not self.recorder.is_open(session):
                self.causes[session] = f"it sent no request for {self.recorder.idle_s:g} s"
                return []  # abandoned, and counted so
            reward, extra = read_reward(playing.result())
        except asyncio.CancelledError:
            self._drop(session, "cancelled", None)
            raise
        except AgentTimeoutError as error:
            self._drop(session, "timeout", error)
            return []
        except VerlError as error:
            self._drop(session, "error", error)
            return []
        finally:
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)

        trajectories = self.recorder.finish(session, reward)
        if not trajectories:
            self.causes[session] = "its agent got no reply of the model"
        fields = fields_of_user(extra)
        for trajectory in trajectories:
            trajectory.extra.update({**fields, "reward_extra_info": fields})
        return trajectories

    def counts(self) -> dict[str, int]:
        """Return how sessions ended, and how many failed by which cause."""
        counts = self.recorder.counts()
        for cause in ("error", "timeout", "cancelled"):
            counts[f"failed/{cause}"] = self._failures[cause]
        return counts

    async def _until_over(self, session: str, playing: "asyncio.Future[Any]") -> None:
        """Wait until an agent ends, or until its session does, because it was abandoned."""
        while not playing.done() and self.recorder.is_open(session):
            await asyncio.wait({playing}, timeout=self.recorder.look_interval_s)

    def _drop(self, session: str, cause: str, error: VerlError | None) -> None:
        """End a session of which nothing is learned."""
        if not self.recorder.is_open(session):
            return
        self.recorder.fail(session)
        self._failures[cause] += 1
        self.causes[session] = cause if error is None else str(error)


@asynccontextmanager
async def gateway_loop(
    agent: Agent,
    config: GatewayConfig,
    client: EngineClient,
    wording: Wording,
    *,
    max_prompt_tokens: int,
    max_response_tokens: int,
) -> AsyncIterator[GatewayLoop]:
    """Start a gateway for the episodes of a batch, and stop it at the end.

    Runs in the event loop that steps the engine.

    Args:
        agent: plays the episodes.
        config: the section `rollout.agent.gateway`.
        client: draws the turns.
        wording: between messages and tokens.
        max_prompt_tokens: width of the prompt column.
        max_response_tokens: most tokens after the prompt.
    """
    recorder = SessionRecorder(
        wording,
        max_prompt_tokens=max_prompt_tokens,
        max_response_tokens=max_response_tokens,
        idle_s=config.idle_s,
    )

    backend = SessionBackend(client, recorder, on_mismatch=config.on_mismatch)
    server = GatewayServer(
        backend,
        host=config.host,
        port=config.port,
        max_request_mib=config.max_request_mib,
        timeout_s=config.request_timeout_s,
    )

    async with server:
        yield GatewayLoop(agent, server, recorder, timeout_s=config.timeout_s)
