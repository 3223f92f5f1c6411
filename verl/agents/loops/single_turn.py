"""One turn of the model, without tools: the plain rollout as an agent loop."""

from verl.agents.loops.base import AgentContext, Episode, agent_loops
from verl.rollout.trajectory import Trajectory


class SingleTurnLoop:
    """Draw one answer to the prompt: the tokens of the rollout without agents."""

    def __init__(self, context: AgentContext) -> None:
        self.context = context

    async def play(self, episode: Episode) -> list[Trajectory]:
        """See `AgentLoop.play`."""
        conversation = self.context.conversation(episode)
        drawn = await self.context.draw(conversation)
        reply = {"role": "assistant", "content": self.context.text_of(drawn.token_ids)}
        conversation.add_reply(reply)

        (trajectory,) = conversation.trajectories()
        trajectory.extra = {"messages": conversation.messages}
        return [trajectory]


agent_loops.register("single_turn_agent")(SingleTurnLoop)
