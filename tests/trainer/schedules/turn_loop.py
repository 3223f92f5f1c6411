"""`model.external_lib` of runs with agents: episodes of several turns, with a tool after each."""

import asyncio
import threading
from functools import partial

from verl.agents.loops.base import AgentContext, Episode, agent_loops
from verl.rollout.trajectory import Trajectory

TURNS = 3


class TurnLoop:
    """Draws turns of few tokens.

    Args:
        is_uneven: whether prompts differ in turns, and their tools in the rounds of the event loop
            that they take. If not, all samples of a step are in the same turn.
        is_rare: whether one episode in four has a score, so that some prompts have none.
    """

    def __init__(self, context: AgentContext, is_uneven: bool, is_rare: bool = False) -> None:
        self.context = context
        self.is_uneven = is_uneven
        self.is_rare = is_rare

    async def play(self, episode: Episode) -> list[Trajectory]:
        """See `AgentLoop.play`."""
        kind = episode.own_row // 4 % 3 if self.is_uneven else 0
        conversation = self.context.conversation(episode)
        thread = threading.get_ident()
        for turn in range(TURNS + kind):
            drawn = await self.context.draw(conversation)
            reply = {"role": "assistant", "content": self.context.text_of(drawn.token_ids)}
            for _ in range(7 * kind):
                await asyncio.sleep(0)
            assert threading.get_ident() == thread, "an episode stays in its event loop"
            is_last = turn == TURNS + kind - 1
            asked = [{"role": "user", "content": "go on"}]
            if is_last or not conversation.extend(reply, asked, "tool"):
                break

        trajectories = conversation.trajectories()
        for trajectory in trajectories:
            tokens = trajectory.response_ids
            trajectory.reward = len(set(tokens)) / len(tokens)
            if self.is_rare:
                trajectory.reward = float(sum(tokens) % 4 == 0)
        return trajectories


agent_loops.register("turns")(partial(TurnLoop, is_uneven=False))
agent_loops.register("uneven_turns")(partial(TurnLoop, is_uneven=True))
agent_loops.register("rare_turns")(partial(TurnLoop, is_uneven=False, is_rare=True))
agent_loops.register("rare_uneven_turns")(partial(TurnLoop, is_uneven=True, is_rare=True))
