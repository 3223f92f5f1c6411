"""Begin the calls of a reward function while other responses are still generated."""

import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from verl.rewards.calls import Caller
from verl.rewards.outcome import Outcome
from verl.rewards.rules import calls_at_once, require_rules, scores_by_rule
from verl.rewards.sample import Sample
from verl.utils.timeline import note_span


class CallsAhead:
    """Calls for responses that arrive before their batch.

    Args:
        caller: of the reward function; must not be `in_caller`.
        columns: arguments of the function for each prompt, except for the text.
        samples_each: responses of a prompt.
        first_sample: number of the first response.
        stop_at_failure: make no further call after a failure.
    """

    def __init__(
        self,
        caller: Caller,
        tokenizer: Any,
        columns: Sequence[dict[str, Any]],
        *,
        samples_each: int,
        first_sample: int,
        stop_at_failure: bool,
    ) -> None:
        self.caller = caller
        self.tokenizer = tokenizer
        self.columns = columns
        self.samples_each = samples_each
        self.first_sample = first_sample
        self.samples: dict[int, tuple[int, Sample]] = {}  # row -> (index of the outcome, sample)
        if scores_by_rule(caller.function):
            require_rules(
                (f"Prompt {number} of the batch", own["data_source"])
                for number, own in enumerate(columns)
            )
        sources = {own["data_source"] for own in columns}
        self.calls = caller.begin(stop_at_failure, calls_at_once(caller.function, sources))
        self.started_ns: int | None = None
        self.lock = threading.Lock()

    def take(self, response: tuple[int, list[int]]) -> None:
        """Begin the call for (number, token ids) of a finished response."""
        number, token_ids = response
        row = number - self.first_sample
        with self.lock:
            # A rank without work of its own may have got a copy of a prompt.
            if row in self.samples:
                return

            self.started_ns = self.started_ns or time.monotonic_ns()
            columns = self.columns[row // self.samples_each]
            sample = Sample(row=row, solution_str="", last_token=-1, token_ids=token_ids, **columns)
            index = self.calls.add(row, partial(self._arguments, sample))
            self.samples[row] = (index, sample)

    def _arguments(self, sample: Sample) -> dict[str, Any]:
        """Decode the response in the thread of the call, so that the engine does not wait."""
        (sample.solution_str,) = self.tokenizer.batch_decode(
            [sample.token_ids], skip_special_tokens=True
        )
        return sample.arguments()

    def outcomes(self, samples: Sequence[Sample]) -> Sequence[Outcome | None] | None:
        """Return one outcome per sample, as `RewardManager.call` does, or None to call all again.

        That is necessary if the function works only in the caller's thread, or if a response in the
        batch differs from the one that was taken: of copies on two ranks, the batch keeps one.
        """
        for sample in samples:
            taken = self.samples.get(sample.row)
            if taken is not None and taken[1].token_ids != sample.token_ids:
                return None

        indexes: list[int] = []
        for sample in samples:
            taken = self.samples.get(sample.row)
            if taken is None:
                indexes.append(self.calls.add(sample.row, sample.arguments))
            else:
                indexes.append(taken[0])

        outcomes = self.caller.finish(self.calls)
        if self.started_ns is not None:
            note_span("reward, from the first response", "rewards", self.started_ns)
        if self.caller.in_caller:
            return None
        return [outcomes[index] for index in indexes]
