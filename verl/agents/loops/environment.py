"""Turns of the model in an environment that observes, rewards and ends the episode."""

import logging
import time
import zlib

from verl.agents.environments import (
    EnvironmentSession,
    Observation,
    make_environment,
    open_environment,
    plays_itself,
    roles_of,
)
from verl.agents.environments.base import UNREADABLE_ACTION, logged_info
from verl.agents.gateway.agents import FunctionAgent
from verl.agents.loops.base import (
    AgentContext,
    AgentLoop,
    Episode,
    EpisodeDropped,
    agent_loops,
    require_sound,
)
from verl.agents.loops.gateway import GatewayAgentLoop
from verl.agents.loops.seats import Seat, Seats
from verl.agents.policies import check_roles
from verl.rollout.trajectory import DROPPED_BECAUSE, ENVIRONMENT_INFO, Trajectory
from verl.utils.errors import ConfigError
from verl.utils.logging import say_once


class EnvironmentLoop:
    """Play an environment: turns are actions, its observations are the messages before them.

    The first messages to a role follow the prompt of the row, or replace it. An environment that
    raises stops the run or drops the episode, as `agent.on_error` says; one that is late drops it.
    The score of a role is the sum of its rewards; each also counts for its turn.
    """

    def __init__(self, context: AgentContext) -> None:
        self.context = context
        agent = context.config.agent
        assert agent.environment.name is not None, "environment_loop has checked it"
        self.name = agent.environment.name
        self.roles = roles_of(self.name)
        check_roles(agent.policies, self.roles, f"The environment '{self.name}'")

    async def play(self, episode: Episode) -> list[Trajectory]:
        """See `AgentLoop.play`."""
        started = time.perf_counter()
        asked = self.context.config.agent.environment
        session = open_environment(self.name, asked.kwargs, timeout_s=asked.timeout_s)
        try:
            return await self._play(episode, session)
        finally:
            await session.close()
            self.context.tally.note("environment", time.perf_counter() - started)

    async def _play(self, episode: Episode, session: EnvironmentSession) -> list[Trajectory]:
        context = self.context
        seen = await session.reset(**{"seed": seed_of(episode), **episode.fields})
        require_sound(session.failure, context.config.agent.on_error)
        if session.failure is not None:
            raise EpisodeDropped(session.failure.error)
        if seen.done:
            raise EpisodeDropped("the environment ended it before the first turn")
        if seen.reward or any(seen.rewards.values()):
            say_once(
                f"The environment '{self.name}' gives a reward in reset, where no turn can have "
                "earned it, so nothing is learned from it. Give rewards in step alone.",
                logging.WARNING,
            )
        seats = Seats(context, episode, self.roles)
        ended_by = ""

        while not ended_by:
            seat = seats.of(seen.role)
            if not seat.hear(seen):
                ended_by = "length"
                break
            action = await seats.act(seat)
            seen = await session.step(action)
            require_sound(session.failure, context.config.agent.on_error)
            seats.credit(seat, seen)
            if UNREADABLE_ACTION in seen.info:
                context.tally.counts["unreadable_actions"] += 1
            ended_by = self._end_after(seat, seen)

        context.tally.counts[f"ended_by/{ended_by}"] += 1
        trajectories = seats.trajectories()
        for trajectory in trajectories:
            trajectory.is_dropped = session.failure is not None
            trajectory.extra["ended_by"] = ended_by
            trajectory.extra[ENVIRONMENT_INFO] = logged_info(seen.info)
            if session.failure is not None:
                trajectory.extra[DROPPED_BECAUSE] = session.failure.error
        return trajectories

    def _end_after(self, seat: Seat, seen: Observation) -> str:
        """Return the reason why no turn follows the last one of `seat`, or ""."""
        if seen.done:
            return "environment"
        if seat.is_full:
            return "length"
        limits = self.context.config.multi_turn
        num_answers = seat.turns - 1
        if seat.turns == limits.max_assistant_turns or num_answers == limits.max_user_turns:
            return "turns"
        return ""


def environment_loop(context: AgentContext) -> AgentLoop:
    """Return the loop of the configured environment: by turns, or of one that plays itself."""
    asked = context.config.agent.environment
    if asked.name is None:
        raise ConfigError(
            "The agent loop environment_agent needs an environment. Set "
            "actor_rollout_ref.rollout.agent.environment.name."
        )
    if not plays_itself(asked.name):
        return EnvironmentLoop(context)
    environment = make_environment(asked.name, **asked.kwargs)
    agent = FunctionAgent(environment.play, f"'play' of the environment '{asked.name}'")
    context.closers.append(agent.close)
    return GatewayAgentLoop(context, agent)


def seed_of(episode: Episode) -> int:
    """Return the seed of a world: the samples of a prompt are compared, so they share it.

    Validations are compared as well, so a row has one world in all of them.
    """
    prompt_row = int(episode.fields.get("prompt_row", episode.row))
    kind = "validation-" if episode.is_validation else ""
    return zlib.crc32(f"{kind}{episode.step}-{prompt_row}".encode())


agent_loops.register("environment_agent")(environment_loop)
