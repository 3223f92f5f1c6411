"""Turns of the model in an environment that observes, rewards and ends the episode."""

import time
import zlib
from typing import Any

from verl.agents.environments import EnvironmentSession, open_environment
from verl.agents.loops.base import AgentContext, Episode, agent_loops, require_sound
from verl.rollout.trajectory import Trajectory


class EnvironmentLoop:
    """Play an environment: drawn turns are actions, its observations are the messages after them.

    Its opening messages follow the prompt of the row, or replace it. An environment that raises
    stops the run or drops the episode, as `agent.on_error` says; one that is late drops it. The
    score of the episode is the sum of the rewards; each also counts for its turn.
    """

    def __init__(self, context: AgentContext) -> None:
        self.context = context

    async def play(self, episode: Episode) -> list[Trajectory]:
        """See `AgentLoop.play`."""
        started = time.perf_counter()
        asked = self.context.config.agent.environment
        session = open_environment(
            {"name": asked.name, "config": asked.kwargs, "timeout_s": asked.timeout_s}
        )
        try:
            return await self._play(episode, session)
        finally:
            await session.close()
            self.context.tally.note("environment", time.perf_counter() - started)

    async def _play(self, episode: Episode, session: EnvironmentSession) -> list[Trajectory]:
        context = self.context
        first = await session.reset(**{"seed": seed_of(episode), **episode.fields})
        require_sound(session.failure, context.config.agent.on_error)
        if first.done:
            return []  # late, or over before the model's first turn
        opening = [*([] if first.replaces_prompt else episode.messages), *first.messages]
        conversation = context.conversation(episode, opening)
        rewards: dict[int, float] = {}
        ended_by = ""

        while not ended_by:
            drawn = await context.draw(conversation)
            turn = conversation.turns - 1
            action = context.text_of(drawn.token_ids)
            reply = {"role": "assistant", "content": action}
            observation = await session.step(action)
            require_sound(session.failure, context.config.agent.on_error)
            rewards[turn] = float(observation.reward)

            if observation.done:
                ended_by = "environment"
            elif drawn.finish_reason == "length" or conversation.room <= 0:
                ended_by = "length"
            elif self._is_last(conversation.turns):
                ended_by = "turns"
            if ended_by:
                conversation.add_reply(reply)
            elif not conversation.extend(reply, observation.messages, "user"):
                ended_by = "length"

        context.tally.counts[f"ended_by/{ended_by}"] += 1
        extra: dict[str, Any] = {
            "messages": conversation.messages,
            "turn_scores": list(rewards.values()),
            "ended_by": ended_by,
        }
        if session.failure is not None:
            extra["failure"] = session.failure.error
        trajectories = conversation.trajectories()
        for trajectory in trajectories:
            trajectory.reward = sum(rewards.values())
            trajectory.turn_rewards = rewards
            trajectory.num_turns = 2 * conversation.turns
            trajectory.is_dropped = session.failure is not None
            trajectory.extra = extra
        return trajectories

    def _is_last(self, turns: int) -> bool:
        """Check whether the limits allow no turn after `turns` of them."""
        limits = self.context.config.multi_turn
        num_answers = turns - 1
        return turns == limits.max_assistant_turns or num_answers == limits.max_user_turns


def seed_of(episode: Episode) -> int:
    """Return the seed of a world: the samples of a prompt are compared, so they share it.

    Validations are compared as well, so a row has one world in all of them.
    """
    prompt_row = int(episode.fields.get("prompt_row", episode.row))
    kind = "validation-" if episode.is_validation else ""
    return zlib.crc32(f"{kind}{episode.step}-{prompt_row}".encode())


agent_loops.register("environment_agent")(EnvironmentLoop)
