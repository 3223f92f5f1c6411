"""One conversation with a simulated user: deadlines, counted outcomes, and an end in every case."""

import logging
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from verl.agents.interactions.base import BaseInteraction
from verl.agents.interactions.registry import (
    choose_interaction,
    initialize_interactions_from_config,
)
from verl.agents.shared_state import describe_overwriting, overwritten
from verl.agents.user_thread import UserCall, UserSession, UserThread, flag_of, is_finite_number
from verl.utils.errors import ConfigError, RolloutError
from verl.utils.json_text import whole_characters
from verl.utils.logging import logger, say_once

DEFAULT_TIMEOUT_S = 60.0


class InteractionReply(NamedTuple):
    """The simulated user's turn, in the order of verl's tuple.

    After a call that failed, the conversation ends with an empty content and score 0, and `data`
    holds "outcome" ("timeout" or "crashed") and "error".
    """

    should_terminate: bool
    content: str
    score: float
    data: dict[str, Any]


class InteractionSession(UserSession):
    """A conversation of one trajectory. Use it as `async with`: `finalize` is then always called.

    Args:
        interaction: the simulated user, shared by many sessions.
        kwargs: `interaction_kwargs` of the row.
        instance_id: id of the conversation; None makes one.
        thread: where calls run, shared by the sessions of an interaction; None makes one.
    """

    def __init__(
        self,
        interaction: BaseInteraction,
        kwargs: Mapping[str, Any] | None = None,
        *,
        instance_id: str | None = None,
        thread: UserThread | None = None,
    ) -> None:
        super().__init__(thread or UserThread(type(interaction).__name__), deadline_of(interaction))
        self.interaction = interaction
        self.kwargs = dict(kwargs or {})
        self.instance_id = instance_id or str(uuid4())
        self._owns_thread = thread is None
        self._is_open = False

    async def __aenter__(self) -> "InteractionSession":
        await self.start_interaction()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.finalize()

    async def start_interaction(self) -> None:
        """Begin the conversation. A failure is kept in `failure` and ends the first turn."""
        self._is_open = True
        started = await self._call(
            self.interaction.start_interaction, self.instance_id, **self.kwargs
        )
        if isinstance(started.value, str):
            self.instance_id = started.value

    async def generate_response(self, messages: list[dict[str, Any]]) -> InteractionReply:
        """Return the simulated user's answer to a conversation.

        Args:
            messages: {"role", "content"} of all turns; the interaction gets a copy.

        Raises:
            RolloutError: the method returned something other than (should_terminate, content,
                score, data), or was called before `start_interaction`.
        """
        if not self._is_open:
            raise RolloutError(
                "generate_response needs a conversation that has begun. Call start_interaction, "
                "or use the session as `async with`."
            )
        if self.failure is None:
            answered = await self._call(
                self.interaction.generate_response,
                self.instance_id,
                deepcopy(messages),
                **self.kwargs,
            )
            if answered.outcome == "ok":
                return as_reply(answered.value, type(self.interaction).__name__)

        assert self.failure is not None
        logger.debug("conversation %s: %s", self.instance_id, self.failure.error)
        return InteractionReply(True, "", 0.0, self.failure.facts)

    async def _call(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> UserCall:
        """Do as `UserSession._call`, and warn of state that all conversations share."""
        shared = getattr(self.interaction, "__dict__", {})
        before = dict(shared)
        call = await super()._call(method, *args, **kwargs)

        attribute = overwritten(before, shared)
        if attribute:
            label = f"The interaction {type(self.interaction).__name__}"
            say_once(describe_overwriting(label, attribute), logging.WARNING)
        return call

    async def finalize(self) -> None:
        """End the conversation, once. Called also after a failure or a cancelled episode."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            await self._call_last(
                self.interaction.finalize_interaction,
                **{**self.kwargs, "instance_id": self.instance_id},
            )
        finally:
            if self._owns_thread:
                self._thread.stop()


class InteractionSet:
    """All interactions of a run, each with the thread that its calls run in."""

    def __init__(self, interactions: Mapping[str, BaseInteraction]) -> None:
        self.interactions = dict(interactions)
        self._threads: dict[str, UserThread] = {}
        for name in interactions:
            self._threads[name] = UserThread(f"interaction-{name}")
        for interaction in interactions.values():
            deadline_of(interaction)  # so that a wrong one fails before the first episode

    @classmethod
    def from_config(cls, path: str | Path) -> "InteractionSet":
        """Make the interactions of `multi_turn.interaction_config_path`."""
        return cls(initialize_interactions_from_config(path))

    @property
    def names(self) -> list[str]:
        """Names that rows may pick."""
        return sorted(self.interactions)

    def session(
        self, kwargs: Mapping[str, Any] | None, *, instance_id: str | None = None
    ) -> InteractionSession:
        """Return the session, not yet begun, that a row's `interaction_kwargs` ask for.

        Raises DataError for a name that is unknown.
        """
        name = choose_interaction(self.interactions, kwargs)
        return InteractionSession(
            self.interactions[name], kwargs, instance_id=instance_id, thread=self._threads[name]
        )

    def close(self) -> None:
        """End the threads."""
        for thread in self._threads.values():
            thread.stop()


def deadline_of(interaction: BaseInteraction) -> float:
    """Return the seconds that each call may take: `timeout_s` of the interaction's config."""
    config = getattr(interaction, "config", None) or {}
    timeout_s = config.get("timeout_s", DEFAULT_TIMEOUT_S)
    if not isinstance(timeout_s, int | float) or not timeout_s > 0:
        raise ConfigError(
            f"config.timeout_s of the interaction {type(interaction).__name__} must be a number "
            f"of seconds above 0, got {timeout_s!r}."
        )
    return float(timeout_s)


def as_reply(value: Any, class_name: str) -> InteractionReply:
    """Check the tuple that `generate_response` returned. RolloutError for anything else."""
    if isinstance(value, tuple | list) and len(value) == 4:
        should_terminate, content, score, data = value
        flag = flag_of(should_terminate)
        if content is None and flag:  # the last answer reaches no model
            content = ""
        has_data = data is None or isinstance(data, Mapping)
        if flag is not None and isinstance(content, str) and is_finite_number(score) and has_data:
            content = whole_characters(content)
            return InteractionReply(flag, content, float(score), dict(data or {}))

    raise RolloutError(
        f"{class_name}.generate_response must return (should_terminate: bool, content: str, "
        f"score: finite number, data: dict), got {str(value)[:120]!r}."
    )
