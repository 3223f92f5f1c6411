"""One response of a batch, as a reward function gets it."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl.models.pictures import Pictures


def fields_of_plain_episode() -> dict[str, Any]:
    """Return the entries of `extra_info` that every episode of an agent has, without tools or user.

    verl's single-turn loop has them as well, so one reward function scores rows of all loops.
    """
    return {"turn_scores": [], "tool_rewards": [], "rollout_reward_scores": {}}


def with_images(extra_info: Mapping[str, Any] | None, pictures: Pictures | None) -> dict[str, Any]:
    """Return `extra_info` with the images of a row as PNG files. Videos are left out."""
    images = [picture.png for picture in pictures or () if picture.png is not None]
    return {**(extra_info or {}), "images": images}


@dataclass(slots=True)
class Sample:
    """One response, the arguments of its reward function, and its place in the batch."""

    row: int
    data_source: Any
    solution_str: str
    ground_truth: Any
    extra_info: Any
    last_token: int  # column of the response's last real token
    token_ids: Sequence[int] = ()
    place: str = ""  # in the user's file; "": errors name the response by its place in the batch

    @property
    def name(self) -> str:
        """Return the response's name in errors."""
        return self.place or f"response {self.row} of the batch"

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of one call, as copies.

        A function that changed the originals would change the data of the next epoch and of the
        other samples of the prompt.
        """
        return {
            "data_source": self.data_source,
            "solution_str": self.solution_str,
            "ground_truth": copy.deepcopy(self.ground_truth),
            "extra_info": copy.deepcopy(self.extra_info),
        }
