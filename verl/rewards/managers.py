"""Further managers: one call for a whole batch, calls in processes, a penalty for overlong text."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from verl.protocol import DataProto
from verl.rewards.calls import Caller
from verl.rewards.fields import shown
from verl.rewards.manager import READ, NaiveRewardManager, RewardManager, Scores
from verl.rewards.outcome import Outcome, RewardFunction
from verl.rewards.processes import ProcessFunction
from verl.rewards.registry import (
    REWARD_MANAGER_REGISTRY,
    get_reward_manager_cls,
    register_reward_manager,
    reward_managers,
)
from verl.rewards.sample import Sample
from verl.rewards.sandbox.runner import count_cores
from verl.utils.errors import ConfigError, RewardError
from verl.utils.phases import phase

__all__ = [
    "REWARD_MANAGER_REGISTRY",
    "BatchRewardManager",
    "DAPORewardManager",
    "NaiveRewardManager",
    "PrimeRewardManager",
    "get_reward_manager_cls",
    "register_reward_manager",
    "reward_managers",
]


@reward_managers.register("batch")
class BatchRewardManager(RewardManager):
    """Make one call for the whole batch.

    The function is `f(data_sources, solution_strs, ground_truths, extra_infos)` and returns one
    score per response. `timeout_s` applies to the one call; if it fails, all samples fail. Without
    a user's function, rules score one sample after another.
    """

    def ahead(
        self, prompts: DataProto, samples_each: int, first_sample: int = 0
    ) -> AbstractContextManager[Any]:
        """Start calls early if rules score the batch; see `RewardManager.ahead`.

        A user's function needs the whole batch, so it yields None.
        """
        if not self.by_rule:
            return nullcontext()
        return super().ahead(prompts, samples_each, first_sample)

    @phase()
    def call(
        self,
        samples: Sequence[Sample],
        *,
        stop_at_failure: bool = False,
        timeout_s: float | None = None,
    ) -> Sequence[Outcome | None]:
        if self.by_rule or not samples:
            return super().call(samples, stop_at_failure=stop_at_failure, timeout_s=timeout_s)

        arguments = [sample.arguments() for sample in samples]
        batch: dict[str, list[Any]] = {}
        for name in arguments[0]:
            batch[f"{name}s"] = [entry[name] for entry in arguments]

        (outcome,) = self._caller([batch], timeout_s=timeout_s)
        assert outcome is not None, "a single call is always made"
        if outcome.failed:
            return [outcome] * len(samples)

        has_length = hasattr(outcome.value, "__len__")
        if not has_length or len(outcome.value) != len(samples):
            found = shown(outcome.value)
            if has_length:
                found = f"{len(outcome.value)} entries"
            raise RewardError(
                "The reward function of the batch manager must return one score for each of the "
                f"{len(samples)} responses it was given, in their order, got {found}."
            )

        return [Outcome(value=value) for value in outcome.value]


@reward_managers.register("prime")
class PrimeRewardManager(RewardManager):
    """Run calls in parallel processes. A late one is killed, and the next sample gets a new one.

    Args:
        num_processes: number of parallel calls; None: one per core.
    """

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: RewardFunction | None = None,
        reward_fn_key: str = "data_source",
        *,
        num_processes: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key, **settings)
        function = self.compute_score
        if not isinstance(function, ProcessFunction):
            function = ProcessFunction(function)
        function = function.limited(self.timeout_s, num_processes or count_cores())
        self._caller = Caller(function, self.timeout_s)


@reward_managers.register("dapo")
class DAPORewardManager(RewardManager):
    """Subtract a penalty for overlong responses, eq. (13) of DAPO (Yu et al., arXiv:2503.14476).

    The field `acc` is the score before it, unless the reward returns a field of that name.

    A response of L tokens loses nothing up to `max_resp_len - len`, `penalty_factor` at
    `max_resp_len`, and a linear share in between: score + min((max_resp_len - len - L) / len *
    penalty_factor, 0).

    Args:
        max_resp_len: largest number of tokens of a response.
        overlong_buffer_cfg: `enable`, `len`, `penalty_factor` and `log` (whether the fields
            `overlong_reward` and `overlong` become metrics), as attributes or keys; None: no
            penalty.
    """

    ADDED_FIELDS = ("acc", "overlong_reward", "overlong")

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: RewardFunction | None = None,
        reward_fn_key: str = "data_source",
        max_resp_len: int | None = None,
        overlong_buffer_cfg: Any = None,
        **settings: Any,
    ) -> None:
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key, **settings)
        self.max_resp_len = max_resp_len
        self.buffer_len = 0
        if overlong_buffer_cfg is None or not _entry(overlong_buffer_cfg, "enable", False):
            return

        self.buffer_len = int(_entry(overlong_buffer_cfg, "len", 0))
        self.penalty_factor = float(_entry(overlong_buffer_cfg, "penalty_factor", 1.0))
        self.logs_penalty = bool(_entry(overlong_buffer_cfg, "log", False))
        if max_resp_len is None or not 0 < self.buffer_len <= max_resp_len:
            raise ConfigError(
                "overlong_buffer_cfg.len counts the last tokens of a response: at least 1, at most "
                f"max_resp_len={max_resp_len}, got {self.buffer_len}. A fifth is usual."
            )

    @phase(reads=READ)
    def score(self, samples: Sequence[Sample], data: DataProto) -> Scores:
        result = super().score(samples, data)
        for i, own in enumerate(result.scores):
            result.extra[i] = {"acc": own, **result.extra[i]}
        if not self.buffer_len:
            return result

        for i, sample in enumerate(samples):
            penalty = self.penalty(sample.last_token + 1)
            result.scores[i] += penalty
            if self.logs_penalty:
                fields = {"overlong_reward": penalty, "overlong": float(penalty < 0)}
                result.extra[i] = {**result.extra[i], **fields}
        return result

    def penalty(self, length: int) -> float:
        """Return the penalty of a response of `length` tokens, a number of at most 0."""
        assert self.max_resp_len is not None, "checked where the buffer is enabled"
        excess = length - (self.max_resp_len - self.buffer_len)
        return -max(excess, 0) / self.buffer_len * self.penalty_factor


def _entry(settings: Any, name: str, default: Any) -> Any:
    """Return an entry of a configuration section, or of a mapping that may lack keys."""
    if isinstance(settings, Mapping):
        return settings.get(name, default)
    return getattr(settings, name)
