"""The roles of an episode in an environment: each has a conversation of its own, and a policy."""

from collections.abc import Sequence

from verl.agents.conversation import Conversation
from verl.agents.environments import Observation
from verl.agents.loops.base import AgentContext, Episode
from verl.agents.loops.message_roles import warn_of_repeats, warn_of_roles
from verl.data.chat import Message
from verl.rollout.trajectory import Trajectory
from verl.utils.errors import RolloutError


class Seat:
    """A role that a frozen policy plays. Its conversation is text alone."""

    def __init__(self, context: AgentContext, episode: Episode, role: str) -> None:
        self.context = context
        self.episode = episode
        self.role = role
        self.turns = 0
        self._messages: list[Message] = []

    @property
    def is_full(self) -> bool:
        """Whether the last turn was cut, or used the last token of the response."""
        return False

    def hear(self, seen: Observation) -> bool:
        """Append an observation. Returns False where it leaves no room for a turn."""
        if not self.turns:
            self._messages = self._opening(seen)
        else:
            self._messages += seen.messages
        return True

    async def act(self, number: int) -> str:
        """Return the text of the next turn.

        Args:
            number: of the turn among those that its policy draws in the episode.
        """
        text = await self.context.reply_of(self.role, self._messages, self.episode, number)
        self._messages.append({"role": "assistant", "content": text})
        self.turns += 1
        return text

    def credit(self, reward: float) -> None:
        """Add a reward for the last turn."""

    def trajectories(self) -> list[Trajectory]:
        """Return the parts to learn from, with their rewards."""
        return []

    def _opening(self, seen: Observation) -> list[Message]:
        before = [] if seen.replaces_prompt else list(self.episode.messages)
        return [*before, *seen.messages]


class TrainedSeat(Seat):
    """A role that the actor or its partner plays, and learns from."""

    def __init__(self, context: AgentContext, episode: Episode, role: str) -> None:
        super().__init__(context, episode, role)
        self.rewards: dict[int, float] = {}
        self._conversation: Conversation | None = None
        self._reply: Message | None = None  # the last turn, while nothing follows it
        self._is_cut = False
        self._heard: list[Message] = []  # messages of the last observation

    @property
    def is_full(self) -> bool:
        """See `Seat.is_full`."""
        return self._is_cut or self._begun.room <= 0

    def hear(self, seen: Observation) -> bool:
        """See `Seat.hear`."""
        self._warn_of_messages(seen)
        self._heard = seen.messages
        if self._conversation is None:
            self._conversation = self.context.conversation(self.episode, self._opening(seen))
            return True
        assert self._reply is not None, "the role has not acted on the observation before"
        reply = self._reply
        self._reply = None
        return self._conversation.extend(reply, seen.messages, "user")

    def _warn_of_messages(self, seen: Observation) -> None:
        name = self.context.config.agent.environment.name or ""
        template = str(self.context.tokenizer.chat_template or "")
        warn_of_roles(name, seen, template, is_opening=self._conversation is None)
        warn_of_repeats(name, self._heard, seen)

    async def act(self, number: int) -> str:
        """See `Seat.act`."""
        drawn = await self.context.draw(self._begun, number, self.role)
        text = self.context.text_of(drawn.token_ids)
        self._reply = {"role": "assistant", "content": text}
        self._is_cut = drawn.finish_reason == "length"
        self.rewards[self.turns] = 0.0
        self.turns += 1
        return text

    def credit(self, reward: float) -> None:
        """See `Seat.credit`. A role that has not acted yet has no turn to learn from."""
        if self.turns:
            self.rewards[self.turns - 1] += reward

    def trajectories(self) -> list[Trajectory]:
        """See `Seat.trajectories`."""
        if not self.turns:
            return []
        conversation = self._begun
        if self._reply is not None:
            conversation.add_reply(self._reply)
            self._reply = None

        parts = conversation.trajectories()
        for part in parts:
            part.role = self.role
            part.reward = sum(self.rewards.values())
            part.turn_rewards = self.rewards
            part.num_turns = 2 * self.turns
            part.extra = {
                "messages": conversation.messages,
                "turn_scores": list(self.rewards.values()),
            }
        return parts

    @property
    def _begun(self) -> Conversation:
        assert self._conversation is not None, "hear comes first"
        return self._conversation


class Seats:
    """The roles of one episode, taken when each acts for the first time.

    Args:
        roles: of the environment; empty: it has one, which the actor plays.
    """

    def __init__(self, context: AgentContext, episode: Episode, roles: Sequence[str]) -> None:
        self.context = context
        self.episode = episode
        self.roles = roles
        self._taken: dict[str, Seat] = {}

    def of(self, role: str) -> Seat:
        """Return the seat of a role. Raises RolloutError for one that the environment lacks."""
        if role not in (self.roles or ("",)):
            raise RolloutError(
                "The environment "
                f"'{self.context.config.agent.environment.name}' must name one of its roles in "
                f"Observation.role: {', '.join(self.roles) or 'none, it has no `roles`'}; got "
                f"{role!r}."
            )
        if role not in self._taken:
            policies = self.context.config.agent.policies
            is_trained = not role or policies[role].trained
            kind = TrainedSeat if is_trained else Seat
            self._taken[role] = kind(self.context, self.episode, role)
        return self._taken[role]

    async def act(self, seat: Seat) -> str:
        """Return the text of the next turn of a seat."""
        if self._is_actors(seat.role):
            drawn = sum(each.turns for each in self._taken.values() if self._is_actors(each.role))
        else:
            drawn = seat.turns
        return await seat.act(drawn)

    def credit(self, acted: Seat, seen: Observation) -> None:
        """Give the rewards of an observation to the roles."""
        acted.credit(float(seen.reward))
        for role, reward in seen.rewards.items():
            self.of(role).credit(float(reward))

    def trajectories(self) -> list[Trajectory]:
        """Return the trajectories of all roles that the actor plays, in the order of `roles`."""
        parts: list[Trajectory] = []
        for role in self.roles or ("",):
            if role in self._taken:
                parts += self._taken[role].trajectories()
        for number, part in enumerate(parts):
            part.part = number
        return parts

    def _is_actors(self, role: str) -> bool:
        """Return whether the actor plays a role; it may play several."""
        policies = self.context.config.agent.policies
        return not role or (policies[role].trained and not policies[role].is_partner)
