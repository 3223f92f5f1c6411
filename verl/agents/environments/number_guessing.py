"""Guess a number from the answers "higher" and "lower"."""

import random
from typing import Any

from verl.agents.environments.base import (
    Observation,
    environments,
    last_whole_number,
    user_message,
)


@environments.register("number_guessing")
class NumberGuessing:
    """A secret number from 1 to `largest`. The reward falls with the guesses used.

    A right guess at turn t of `max_turns` is worth 1 - (t - 1) / max_turns, and ends the episode.
    The last whole number of an action is the guess; a turn without one is used up.

    Args:
        largest: the largest possible secret.
        max_turns: guesses of an episode.
    """

    def __init__(self, largest: int = 100, max_turns: int = 10) -> None:
        self.largest = largest
        self.max_turns = max_turns
        self.secret = 0
        self.turns = 0

    async def reset(self, seed: int = 0, **_: Any) -> Observation:
        """Draw the secret of `seed` and ask for a guess."""
        self.secret = random.Random(seed).randint(1, self.largest)
        self.turns = 0
        question = f"Guess my number from 1 to {self.largest}. I answer higher or lower."
        return Observation([user_message(question)])

    async def step(self, action: str) -> Observation:
        """Answer a guess."""
        self.turns += 1
        guess = last_whole_number(action)
        if guess == self.secret:
            reward = 1.0 - (self.turns - 1) / self.max_turns
            return Observation([user_message("correct")], reward, True, self._info(solved=True))

        if guess is None:
            answer = "Write a number."
        else:
            answer = "higher" if guess < self.secret else "lower"
        is_over = self.turns >= self.max_turns
        return Observation([user_message(answer)], 0.0, is_over, self._info(solved=False))

    async def close(self) -> None:
        """Nothing to free."""

    def _info(self, *, solved: bool) -> dict[str, Any]:
        return {"turns": self.turns, "solved": float(solved)}
