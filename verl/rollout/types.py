"""The input and output of a rollout engine."""

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from verl.models.pictures import Pictures
from verl.utils.errors import RolloutError

FINISH_REASONS = ("stop", "length", "abort")
RouteArray: TypeAlias = NDArray[np.integer]  # numbers of experts, a row for each token


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Settings of the draw.

    Log-probs are always those of log_softmax(logits / temperature) over the whole vocabulary,
    before top-k, top-p and min-p. With temperature 0 (greedy) they are those of temperature 1.
    """

    max_new_tokens: int
    temperature: float = 1.0  # 0 is greedy
    top_k: int = -1  # -1 or 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()  # in addition to the model's end-of-sequence ids
    stop: tuple[str, ...] = ()  # text that ends a response; the token that completes it is kept
    ignore_eos: bool = False

    @property
    def is_filtered(self) -> bool:
        """Return whether top-k, top-p or min-p excludes tokens from the draw."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """The noise of a sample that may outlive a call, and the tokens that it has drawn before.

    Position and noise go on after these tokens, so an interruption changes no draw. Only engines
    with the capability `continues` take it.

    Args:
        step: fixes the noise, in place of the call's step.
        number: fixes the noise, in place of the sample's id. The samples of several steps can so
            run at once, under ids that differ.
        token_ids: drawn before, as `abort` returned them.
        log_probs: of these tokens, as `abort` returned them.
    """

    step: int
    number: int
    token_ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt and the ids of its samples.

    `sample_ids` are unique within one `generate` call. With the seed and the step, they fix the
    noise of every sample. `limits` are the most tokens that each sample may draw, where that is
    less than `SamplingParams.max_new_tokens`; tokens of a continuation count. `continuations` has
    one entry for each sample.
    """

    prompt_ids: tuple[int, ...]
    sample_ids: tuple[int, ...]
    limits: tuple[int, ...] | None = None
    continuations: tuple[Continuation, ...] | None = None
    pictures: Pictures = ()  # of the prompt, in the order of their tokens


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One finished sample: R token ids, with the end-of-sequence token, and R log-probs."""

    sample_id: int
    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str  # one of FINISH_REASONS
    # (R, C), where the engine records them: experts of the token before each token, layer by layer.
    # The dtype's largest number stands for a token that was not recorded, as the prompt's last.
    routed_experts: RouteArray | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        """Raise RolloutError for a finish reason that nothing knows; readers compare its text."""
        if self.finish_reason not in FINISH_REASONS:
            raise RolloutError(
                f"The finish_reason of a Completion must be one of {', '.join(FINISH_REASONS)}, "
                f"got {self.finish_reason!r} for sample {self.sample_id}. Give the one that fits: "
                "stop for a response that ended by itself, length for one that was cut."
            )

    @classmethod
    def not_begun(cls, sample_id: int) -> "Completion":
        """Return a sample that was aborted before its first token."""
        return cls(sample_id=sample_id, token_ids=[], log_probs=[], finish_reason="abort")


@dataclass(frozen=True)
class Room:
    """How much an engine will have to hold at once: so many sequences of at most so many tokens.

    Requests that come one by one, as those of agents do, do not show this by themselves.
    """

    sequences: int = 0
    tokens: int = 0
