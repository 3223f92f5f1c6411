"""The contract of a rollout engine, and the registry of engines."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch

from verl.rollout.types import Completion, Request, SamplingParams
from verl.utils.registry import Registry
from verl.weight_sync import WeightTaker


class RolloutEngine(WeightTaker, Protocol):
    """Turns requests into completions.

    The engine owns its KV cache; where its dtype and layout agree with the trainer's, its weights
    alias them, otherwise it owns copies at stable addresses. Between `sleep` and `wake` no page and
    no weight copy stays on the device and `generate` raises EngineAsleepError. Completions come as
    they finish, each sample exactly once.
    """

    def generate(
        self, requests: Sequence[Request], params: SamplingParams, *, seed: int, step: int
    ) -> Iterator[Completion]:
        """Sample every request. The noise of a sample depends on (seed, step, sample id, position)
        alone."""
        ...

    def update_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take new weights, named as in the Hugging Face module's `named_parameters`. All are
        given, or an error."""
        ...

    def sleep(self) -> None:
        """Give the device memory back for training."""
        ...

    def wake(self) -> None:
        """Make `generate` possible again."""
        ...

    def forget_prefixes(self) -> None:
        """Keep nothing of earlier prompts. A resumed run starts without them, and draws what this
        one draws only if this one does, too."""
        ...

    def statistics(self) -> dict[str, float]:
        """Counters of the last `generate`: prefill_tokens, decode_steps, preemptions, peak_pages
        ..."""
        ...


# name -> factory(model, tokenizer, rollout config, device) -> engine
rollout_engines: Registry[Callable[..., RolloutEngine]] = Registry(
    "rollout engine (actor_rollout_ref.rollout.name)"
)
