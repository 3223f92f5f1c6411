"""The contract of an agent loop, what it is given, and the registry."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from verl.agents.boundary import ChatBoundary
from verl.agents.conversation import Conversation
from verl.agents.engine_client import EngineClient, Generated
from verl.agents.formats import CallFormat, ParsedReply, parse_reply, recognise_format
from verl.agents.formats.base import ToolSchemas
from verl.agents.interactions import InteractionSet
from verl.agents.policies import FrozenPolicy, PartnerPolicy
from verl.agents.row_options import option_of
from verl.agents.tools import ToolSet
from verl.agents.user_thread import UserCall
from verl.config.model import ModelConfig
from verl.config.rollout import RolloutConfig
from verl.config.train import TrainConfig
from verl.data.chat import Message
from verl.data.pictures import PictureReader
from verl.models.pictures import Pictures
from verl.rollout.trajectory import Trajectory
from verl.utils.errors import DataError, RolloutError
from verl.utils.registry import Registry


@dataclass(frozen=True, kw_only=True)
class Episode:
    """One sample of a prompt, which an agent loop plays to its end.

    Args:
        row: number of the sample among all that are played at once, which the engine knows it by.
            In one batch: prompt number * n + sample of the prompt.
        row_in_batch: its number in its own batch, where episodes of several are played at once.
        messages: of the prompt.
        prompt_ids: the tokens of `messages` without tools.
        pictures: of the prompt.
        fields: all columns of the row.
        record_step: number of the batch within the run, below 0 for validation. With the row in
            the batch it is the key of recorded tool calls.
        step: the step that draws depend on: of the training, or the number of the batch within a
            validation, which is alike in every validation.
    """

    row: int
    messages: Sequence[Message]
    prompt_ids: Sequence[int]
    fields: Mapping[str, Any]
    record_step: int = 0
    step: int = 0
    pictures: Pictures = ()
    row_in_batch: int | None = None

    @property
    def own_row(self) -> int:
        """Number of the sample in its own batch."""
        return self.row if self.row_in_batch is None else self.row_in_batch

    @property
    def name(self) -> str:
        """Name of the episode within a run."""
        return f"{self.record_step}-{self.own_row}"

    @property
    def is_validation(self) -> bool:
        """Whether nothing is learned from it."""
        return self.record_step < 0

    def option(self, name: str) -> Any:
        """Return a field of the row or, where it has none, of its `extra_info`."""
        return option_of(self.fields, name)


@dataclass(kw_only=True)
class Tally:
    """Seconds and counts of the episodes of a batch."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def note(self, name: str, seconds: float) -> None:
        """Note the seconds that one episode spent on something."""
        self.seconds.setdefault(name, []).append(seconds)


@dataclass(kw_only=True)
class AgentContext:
    """Everything that the loops of one process share.

    Args:
        config: the section `rollout`.
        tokenizer: the model's.
        model: the section `model`, for loops that read it; None: there is none.
        run: the configuration of the whole run, likewise.
        boundary: of its chat template.
        format: how the model writes tool calls; None where there are no tools.
        tools: of the run; None without tools.
        interactions: simulated users of the run; None without.
        pictures: reads the images of tools; None: the model reads text alone.
        policies: frozen ones, by the role that they play.
        partners: policies that are trained next to the actor, by their roles.
        closers: called at the end of the run, by each loop that keeps threads or connections.
        client: draws turns. Set for each batch.
        tally: of the batch.
    """

    config: RolloutConfig
    tokenizer: Any
    boundary: ChatBoundary
    model: ModelConfig | None = None
    run: TrainConfig | None = None
    format: CallFormat | None = None
    tools: ToolSet | None = None
    interactions: InteractionSet | None = None
    pictures: PictureReader | None = None
    policies: Mapping[str, FrozenPolicy] = field(default_factory=dict)
    partners: Mapping[str, PartnerPolicy] = field(default_factory=dict)
    closers: list[Callable[[], None]] = field(default_factory=list)
    client: EngineClient = field(init=False)
    tally: Tally = field(default_factory=Tally)

    @property
    def max_response_tokens(self) -> int:
        """Most tokens after the prompt, those of tools included."""
        return self.config.response_length

    @property
    def format_name(self) -> str | None:
        """Name of the configured tool-call format, or else of the one that the template shows."""
        return self.config.multi_turn.format or recognise_format(self.tokenizer.chat_template)

    def conversation(
        self,
        episode: Episode,
        messages: Sequence[Message] | None = None,
        tools: ToolSchemas = (),
    ) -> Conversation:
        """Begin the conversation of an episode, by default with its own prompt."""
        is_own = messages is None and not tools
        if messages is None:
            messages = episode.messages

        prompt_ids = episode.prompt_ids
        if not is_own:
            prompt_ids = self.boundary.prompt(messages, tools)
            if self.pictures is not None:
                prompt_ids = self.pictures.expand(prompt_ids, episode.pictures)
            check_prompt(episode, prompt_ids, self.config.prompt_length)

        return Conversation(
            episode.row,
            messages,
            prompt_ids,
            self.boundary,
            tools=tools,
            max_response_tokens=self.max_response_tokens,
            follow_template=self.config.multi_turn.use_inference_chat_template,
            pictures=episode.pictures,
            reader=self.pictures,
        )

    def policy_of(self, role: str) -> str:
        """Return the role of the partner that draws for `role`; empty: the actor does."""
        return role if role in self.partners else ""

    def client_of(self, policy: str) -> EngineClient:
        """Return the client of a policy, as `policy_of` names it."""
        if not policy:
            return self.client
        own = self.partners[policy].client
        assert own is not None, "serve comes first"
        return own

    async def draw(
        self, conversation: Conversation, number: int | None = None, role: str = ""
    ) -> Generated:
        """Draw the next turn of a conversation and append it.

        Args:
            number: of the turn among all that the actor draws in the episode, which fixes its
                noise; None: the episode has one conversation.
            role: draws by the partner that plays it, or else by the actor.
        """
        limit = conversation.room
        most = self.config.multi_turn.max_tokens_per_turn
        if most is not None:
            limit = min(limit, most)
        drawn = await self.client_of(self.policy_of(role)).generate(
            prompt_ids=conversation.ids,
            row=conversation.row,
            turn=conversation.turns if number is None else number,
            limit=limit,
            pictures=conversation.pictures,
        )
        conversation.add_drawn(drawn)
        return drawn

    async def reply_of(
        self, role: str, messages: Sequence[Message], episode: Episode, turn: int
    ) -> str:
        """Return the next turn of a frozen role, as text.

        Args:
            messages: of the conversation as the role sees it.
            turn: number of the turn among all turns of frozen roles in the episode.
        """
        if role not in self.policies:
            raise RolloutError(
                f"No frozen policy plays the role '{role}'. Frozen roles are: "
                f"{', '.join(self.policies) or 'none'}. Set "
                f"actor_rollout_ref.rollout.agent.policies.{role}.path or .url."
            )
        self.tally.counts[f"policy/{role}/turns"] += 1
        return await self.policies[role].reply(
            messages, step=episode.step, row=episode.own_row, turn=turn
        )

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Decode a drawn turn without its end. Other special tokens stay, such as <think>."""
        return self.boundary.text_of(token_ids)

    async def parse(self, token_ids: Sequence[int], tools: ToolSchemas) -> ParsedReply:
        """Read the tool calls of a drawn turn."""
        text = self.text_of(token_ids)
        if self.format is None or not tools:
            return ParsedReply(content=text, calls=())
        return await parse_reply(self.format, token_ids, text, tools)


def check_prompt(episode: Episode, prompt_ids: Sequence[int], limit: int) -> None:
    """Raise DataError for a prompt of a loop's own that is longer than its column."""
    if len(prompt_ids) > limit:
        raise DataError(
            f"The prompt of sample {episode.row} has {len(prompt_ids)} tokens as its agent loop "
            f"renders it, data.max_prompt_length allows {limit}. Raise it, shorten what the loop "
            "adds, or drop such episodes: actor_rollout_ref.rollout.agent.on_error=drop."
        )


def require_sound(failure: UserCall | None, on_error: str) -> None:
    """Raise RolloutError where an environment or simulated user raised, if that is to stop the run.

    A late one only costs its episode.
    """
    if failure is not None and failure.outcome == "crashed" and on_error == "stop":
        raise RolloutError(
            f"{failure.error.rstrip('.')}. Fix it, or drop such episodes: "
            "actor_rollout_ref.rollout.agent.on_error=drop."
        )


class EpisodeDropped(Exception):
    """Ends an episode that has no trajectory. It is dropped, also with `agent.on_error=stop`."""


class AgentLoop(Protocol):
    """Plays episodes. One object plays those of a batch, many at a time."""

    async def play(self, episode: Episode) -> list[Trajectory]:
        """Play an episode to its end. Return one trajectory or several.

        Raises EpisodeDropped with the reason where there is none.
        """
        ...


# name -> class or factory, called with the AgentContext
agent_loops: Registry[Callable[[AgentContext], AgentLoop]] = Registry(
    "agent loop (the column agent_name, or actor_rollout_ref.rollout.agent.default_agent_loop)"
)
