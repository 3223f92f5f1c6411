"""A trajectory: the tokens of one episode with the source of each."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl.models.pictures import Pictures
from verl.rollout.types import RouteArray
from verl.utils.logging import say_once

MODEL = "model"  # drawn by the engine: the only tokens that are trained on
SOURCES = (MODEL, "tool", "user", "template")
# Key of `Trajectory.extra`, next to a user's own keys: why validation leaves the episode out.
DROPPED_BECAUSE = "dropped_because"
# Likewise: facts of the environment's last observation, numbers and texts by name.
ENVIRONMENT_INFO = "environment_info"
# Entries of `extra_info` that the trainer sets.
_OWN_FIELDS = ("num_turns", DROPPED_BECAUSE, ENVIRONMENT_INFO)


@dataclass(kw_only=True)
class Segment:
    """Consecutive tokens of one source.

    Args:
        source: one of `SOURCES`. "template" is text that a chat template puts between turns.
        token_ids: the tokens, as the model saw or drew them.
        log_probs: one for each token of the model; None for other sources.
        version: number of the weights that drew the tokens.
        versions: one for each token, where several weights drew them.
        turn: number of the model's turn within its episode, from 0.
        is_trained: whether the model's tokens are learned from.
        routed_experts: of a completion, see `Completion.routed_experts`.
    """

    source: str
    token_ids: Sequence[int]
    log_probs: Sequence[float] | None = None
    version: int = 0
    versions: Sequence[int] | None = None
    turn: int = 0
    is_trained: bool = True
    routed_experts: RouteArray | None = None

    @property
    def is_model(self) -> bool:
        """Return whether the engine drew these tokens."""
        return self.source == MODEL

    @property
    def version_range(self) -> tuple[int, int]:
        """Return the oldest and the newest version among the tokens."""
        if not self.versions:
            return self.version, self.version
        return min(self.versions), max(self.versions)


@dataclass(kw_only=True)
class Trajectory:
    """A prompt and the segments that follow it. One row of a batch.

    An episode has several of them where its context was rewritten between two turns, or where
    several agents took part.

    Args:
        row: number of the sample in the whole batch: prompt number * n + sample of the prompt.
        prompt_ids: the tokens before the first segment.
        pictures: of prompt and segments, in the order of their tokens.
        segments: at least one of the model.
        part: number of this trajectory among those of its episode.
        role: the agent that drew it, where an episode has several. Roles are compared apart.
        reward: score of the episode, from the agent loop; None: the reward function gives it.
        turn_rewards: reward of single turns, by the number of the turn.
        num_turns: messages of the conversation, the prompt counted as one.
        is_dropped: whether the episode failed, so that nothing is learned from it.
        extra: further fields of `extra_info` for the reward function, in addition to the row's own.
    """

    row: int
    prompt_ids: Sequence[int]
    segments: list[Segment]
    pictures: Pictures = ()
    part: int = 0
    role: str = ""
    reward: float | None = None
    turn_rewards: dict[int, float] = field(default_factory=dict)
    num_turns: int = 2
    is_dropped: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def response_ids(self) -> list[int]:
        """Return all tokens after the prompt."""
        ids: list[int] = []
        for segment in self.segments:
            ids += segment.token_ids
        return ids


def fields_of_user(fields: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what a user's agent adds to `extra_info`, without entries that the trainer sets.

    Those are logged.
    """
    kept = dict(fields or {})
    for name in _OWN_FIELDS:
        if name in kept:
            del kept[name]
            say_once(
                f"agents: the field '{name}' of an agent or tool is ignored, since the trainer sets "
                f"extra_info['{name}'] itself. Give yours another name.",
                logging.WARNING,
            )
    return kept
