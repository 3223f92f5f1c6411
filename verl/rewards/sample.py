"""One response of a batch, as a reward function gets it."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


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
