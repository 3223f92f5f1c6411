"""The agent loop of `async_cpu.py`: turns of the model, with a tool that waits after each."""

import asyncio
import os

from digit_task import digit_share

from verl.agents.loops.base import AgentContext, Episode, agent_loops
from verl.rollout.trajectory import Trajectory


class WaitingLoop:
    """Draws turns, and waits for a tool between two of them."""

    def __init__(self, context: AgentContext) -> None:
        self.context = context
        self.turns = int(os.environ["BENCH_TURNS"])
        self.tool_s = float(os.environ["BENCH_TOOL_S"])

    async def play(self, episode: Episode) -> list[Trajectory]:
        conversation = self.context.conversation(episode)
        text = ""
        for turn in range(self.turns):
            drawn = await self.context.draw(conversation)
            reply = {"role": "assistant", "content": self.context.text_of(drawn.token_ids)}
            text += reply["content"]
            await asyncio.sleep(self.tool_s)
            if turn == self.turns - 1:
                conversation.add_reply(reply)
            else:
                conversation.extend(reply, [{"role": "user", "content": "go on"}], "tool")

        (trajectory,) = conversation.trajectories()
        trajectory.reward = digit_share(text)
        return [trajectory]


agent_loops.register("waiting")(WaitingLoop)
