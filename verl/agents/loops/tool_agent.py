"""Turns of the model between tools and a simulated user."""

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.agents.conversation import Conversation
from verl.agents.engine_client import Generated
from verl.agents.formats import ParsedReply, ToolCall, new_call_id
from verl.agents.interactions import InteractionSession
from verl.agents.loops.base import AgentContext, Episode, agent_loops, require_sound
from verl.agents.row_options import offered_tools
from verl.agents.tools import ToolResult, ToolSession
from verl.agents.tools.agent_data import AgentData
from verl.data.chat import Message
from verl.models.pictures import Pictures
from verl.rollout.trajectory import DROPPED_BECAUSE, Trajectory, fields_of_user
from verl.utils.errors import DataError, RolloutError


@dataclass(kw_only=True)
class _Play:
    """The state of one episode."""

    episode: Episode
    conversation: Conversation
    offered: list[str] | None  # names of tools; None: all
    schemas: list[dict[str, Any]]
    data: AgentData
    tools: ToolSession | None = None
    user: InteractionSession | None = None
    user_turns: int = 0
    calls: int = 0
    failure: str | None = None
    ended_by: str = ""
    turn_rewards: dict[int, float] = field(default_factory=dict)
    turn_scores: list[float] = field(default_factory=list)
    step_rewards: list[float] = field(default_factory=list)  # of tools, in the order of the calls
    seconds: dict[str, float] = field(
        default_factory=lambda: {"generate_sequences": 0.0, "tool_calls": 0.0}
    )

    def add_reward(self, reward: float) -> None:
        """Credit the last turn of the model."""
        turn = self.conversation.turns - 1
        self.turn_rewards[turn] = self.turn_rewards.get(turn, 0.0) + reward

    def data_of_turn(self, drawn: Generated, reply: Message) -> AgentData:
        """Bring `data` up to date with the turn just drawn, for its tools."""
        data = self.data
        data.messages = [*self.conversation.messages, reply]
        data.prompt_ids = list(self.conversation.ids)
        data.response_ids = list(drawn.token_ids)
        data.tool_calls = list(reply.get("tool_calls", ()))
        data.turn_scores = list(self.turn_scores)
        data.tool_rewards = list(self.step_rewards)
        data.user_turns = self.user_turns
        data.assistant_turns = self.conversation.turns
        return data

    def drop(self, why: str) -> None:
        """End the episode, of which nothing is learned."""
        self.failure = why
        self.ended_by = "dropped"


class ToolAgentLoop:
    """Let the model call tools, and a simulated user answer where it calls none.

    Both routes of verl 0.5 (the multi-turn route and the agent-loop route) are this loop. A turn is
    the last one if, in this order: the response is full; the turn was cut; the model drew the token
    that stands for a picture, which no prompt may contain without one; the model has had
    `max_assistant_turns`, or tools and user `max_user_turns`; the model calls no tool and no user
    answers; the user ends the conversation; the answer of tools or user leaves no room for a turn.
    """

    def __init__(self, context: AgentContext) -> None:
        self.context = context
        self.limits = context.config.multi_turn

    async def play(self, episode: Episode) -> list[Trajectory]:
        """See `AgentLoop.play`."""
        play = self._begin(episode)
        tool_rewards: dict[str, float] = {}
        try:
            await self._open(play)
            while not play.ended_by:
                await self._turn(play)
        finally:
            # Also where the episode is cancelled: tools and users may hold resources.
            try:
                if play.tools is not None:
                    tool_rewards = await play.tools.finish()
                    if play.tools.consequence == "drop" and play.failure is None:
                        play.drop("calc_reward of a tool failed")
            finally:
                if play.user is not None:
                    await play.user.finalize()

        for name, seconds in play.seconds.items():
            self.context.tally.note(name, seconds)
        self.context.tally.counts[f"ended_by/{play.ended_by}"] += 1
        return self._trajectories(play, tool_rewards)

    def _begin(self, episode: Episode) -> _Play:
        context = self.context
        offered = None
        schemas: list[dict[str, Any]] = []
        if context.tools is not None:
            kwargs = episode.option("tools_kwargs")
            offered = offered_tools(episode.option("tool_selection"), kwargs)
            schemas = context.tools.schemas(offered)

        return _Play(
            episode=episode,
            conversation=context.conversation(episode, tools=schemas),
            offered=offered,
            schemas=schemas,
            data=AgentData(
                request_id=episode.name,
                tools_kwargs=episode.option("tools_kwargs") or {},
                interaction_kwargs=episode.option("interaction_kwargs") or {},
            ),
        )

    async def _open(self, play: _Play) -> None:
        """Open the tools, and begin with the user. Whatever was begun is ended by `play`."""
        context = self.context
        episode = play.episode
        if context.tools is not None:
            play.tools = await context.tools.open(
                episode.name,
                episode.option("tools_kwargs"),
                names=play.offered,
                step=episode.record_step,
                row=episode.own_row,
            )

        asked = episode.option("interaction_kwargs")
        if context.interactions is not None and asked:
            play.user = context.interactions.session(asked, instance_id=episode.name)
            await play.user.start_interaction()

    async def _turn(self, play: _Play) -> None:
        """Draw one turn, and let tools or the user answer it."""
        conversation = play.conversation
        started = time.perf_counter()
        drawn = await self.context.draw(conversation)
        play.seconds["generate_sequences"] += time.perf_counter() - started

        parsed = await self.context.parse(drawn.token_ids, play.schemas)
        reply = message_of(parsed, turn=conversation.turns - 1)
        play.ended_by = self._reason_to_end(play, drawn, parsed)
        if play.ended_by:
            conversation.add_reply(reply)
            return

        pictures: Pictures = ()
        if parsed.calls:
            data = play.data_of_turn(drawn, reply)
            new, pictures = await self._call_tools(play, parsed.calls, data)
            source = "tool"
        else:
            new = await self._ask_user(play, [*conversation.messages, reply])
            source = "user"
        if play.ended_by:
            conversation.messages += [reply, *new]
            return

        if not conversation.extend(reply, new, source, pictures):
            play.ended_by = "length"
            return
        play.user_turns += 1

    def _reason_to_end(self, play: _Play, drawn: Generated, parsed: ParsedReply) -> str:
        """Return why the episode ends with the turn just drawn; "" if it goes on."""
        limits = self.limits
        most_turns = limits.max_assistant_turns
        most_answers = limits.max_user_turns
        reader = self.context.pictures

        if drawn.finish_reason == "length" or play.conversation.room <= 0:
            return "length"
        if reader is not None and reader.processor.token_id in drawn.token_ids:
            return "picture_token"
        if most_turns is not None and play.conversation.turns >= most_turns:
            return "turns"
        if most_answers is not None and play.user_turns >= most_answers:
            return "turns"

        can_call = bool(parsed.calls) and play.tools is not None
        if not can_call and play.user is None:
            return "answer"
        return ""

    async def _call_tools(
        self, play: _Play, calls: tuple[ToolCall, ...], data: AgentData
    ) -> tuple[list[Message], Pictures]:
        """Return the tools' answers as messages, one for each call, and the pictures in them."""
        assert play.tools is not None
        started = time.perf_counter()
        turn = play.conversation.turns - 1
        results = await play.tools.call(calls, turn=turn, agent_data=data)
        play.seconds["tool_calls"] += time.perf_counter() - started
        play.calls += len(calls)

        messages: list[Message] = []
        pictures: Pictures = ()
        for number, (call, result) in enumerate(zip(calls, results)):
            self._note_result(play, result)
            pictures += await self._read_images(call.name, result)
            call_id = call.call_id or new_call_id(turn, number)
            messages.append(
                {
                    "role": "tool",
                    "content": _content_of(result),
                    "name": call.name,
                    "tool_call_id": call_id,
                }
            )
        return messages, pictures

    async def _read_images(self, tool: str, result: ToolResult) -> Pictures:
        """Prepare the images that a tool returned, in a thread: other episodes go on."""
        reader = self.context.pictures
        if result.videos:
            raise RolloutError(f"The tool '{tool}' returned videos. Return images of their frames.")
        if not result.images:
            return ()

        if reader is None:
            raise RolloutError(_no_reader(tool, self.context))

        try:
            return await asyncio.to_thread(reader.prepare_all, result.images, Path())
        except DataError as error:
            raise DataError(
                f"The tool '{tool}' returned images that cannot be read: {error}."
            ) from error

    def _note_result(self, play: _Play, result: ToolResult) -> None:
        if result.reward is not None:
            play.step_rewards.append(result.reward)
            play.add_reward(result.reward)
        if result.consequence == "mask":
            play.conversation.mask_last_turn()
        elif result.consequence == "drop":
            play.drop(f"a tool call failed: {result.text}")

    async def _ask_user(self, play: _Play, messages: list[Message]) -> list[Message]:
        """Return the user's answer as a message. The user may end the conversation."""
        assert play.user is not None
        answer = await play.user.generate_response(messages)
        failure = play.user.failure
        require_sound(failure, self.context.config.agent.on_error)
        if failure is not None:
            play.drop(failure.error)
            return []
        play.turn_scores.append(answer.score)
        play.add_reward(answer.score)
        if answer.should_terminate:
            play.ended_by = "user"
        return [{"role": "user", "content": answer.content}]

    def _trajectories(self, play: _Play, tool_rewards: dict[str, float]) -> list[Trajectory]:
        trajectories = play.conversation.trajectories()
        extra: dict[str, Any] = {
            **fields_of_user(play.data.extra_fields),
            "messages": play.conversation.messages,
            "turn_scores": play.turn_scores,
            "tool_rewards": play.step_rewards,
            "rollout_reward_scores": {**tool_rewards, "user_turn_rewards": play.turn_scores},
            "num_tool_calls": play.calls,
            "ended_by": play.ended_by,
        }

        if play.failure is not None:
            extra[DROPPED_BECAUSE] = play.failure

        for trajectory in trajectories:
            trajectory.extra = extra
            # The prompt counts as one message, as in verl.
            trajectory.num_turns = play.conversation.turns + play.user_turns + 1
            trajectory.turn_rewards = play.turn_rewards
            trajectory.is_dropped = play.failure is not None
        return trajectories


def _no_reader(tool: str, context: AgentContext) -> str:
    """Say why the images of a tool cannot be read, and the way out."""
    model = "the model" if context.model is None else f"the model '{context.model.path}'"
    return (
        f"The tool '{tool}' returned images, but {model} reads text alone. Set "
        "actor_rollout_ref.model.path to a model with a vision tower, or let the tool return text."
    )


def _content_of(result: ToolResult) -> Any:
    """Return the content of a tool's message: images, then the text."""
    if not result.images:
        return result.text
    parts: list[dict[str, Any]] = [{"type": "image"} for _ in result.images]
    if result.text:
        parts.append({"type": "text", "text": result.text})
    return parts


def message_of(parsed: ParsedReply, turn: int) -> Message:
    """Return a drawn turn as a message, with its sound tool calls in the shape of the template."""
    message: Message = {"role": "assistant", "content": parsed.content}
    calls = []
    for number, call in enumerate(parsed.calls):
        if call.arguments is None:
            continue
        calls.append(
            {
                "type": "function",
                "id": call.call_id or new_call_id(turn, number),
                "function": {"name": call.name, "arguments": call.arguments},
            }
        )

    if calls:
        message["tool_calls"] = calls
    return message


agent_loops.register("tool_agent")(ToolAgentLoop)
