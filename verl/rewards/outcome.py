"""The arguments and the result of one call of a reward function."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

RewardFunction = Callable[..., Any]  # plain or async; its parameters depend on the manager
Arguments = Callable[[], dict[str, Any]]  # returns a call's arguments, in the thread of the call


@dataclass(slots=True)
class Outcome:
    """The value of a call, or the error it raised, or neither if it timed out."""

    value: Any = None
    error: BaseException | None = None
    timed_out: bool = False

    @property
    def failed(self) -> bool:
        """Return whether the call raised or was late. A value may still be no score."""
        return self.timed_out or self.error is not None


Outcomes = list[Outcome | None]  # None: not called, because another call had failed
