"""Reward managers: turn a batch of responses into a batch of scores."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from verl.protocol import DataProto
from verl.rewards.ahead import CallsAhead
from verl.rewards.calls import Caller
from verl.rewards.fields import collect_extra
from verl.rewards.outcome import Outcome, Outcomes, RewardFunction
from verl.rewards.registry import answer_extractors, reward_managers
from verl.rewards.results import check_outcome, ground_truth_of
from verl.rewards.rules import calls_at_once, default_compute_score, require_rules, scores_by_rule
from verl.rewards.sample import Sample, with_images
from verl.rewards.texts import on_one_line, traceback_below
from verl.utils.errors import ConfigError, RewardError, text_of
from verl.utils.logging import logger
from verl.utils.phases import phase

# Columns that the managers read; none is written.
READ = (
    "prompts responses attention_mask rm_scores data_source reward_model extra_info agent_info "
    "prepared_pictures"
)

OnError = Literal["stop", "zero", "drop", "retry"]


@dataclass(slots=True)
class Scores:
    """Scores of a batch, and the number of failures."""

    scores: list[float] = field(default_factory=list)
    extra: list[dict[str, Any]] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    num_errors: int = 0
    num_timeouts: int = 0
    num_retries: int = 0

    def metrics(self) -> dict[str, float]:
        metrics: dict[str, float] = {
            "reward/num_errors": self.num_errors,
            "reward/num_timeouts": self.num_timeouts,
        }
        if self.num_retries:
            metrics["reward/num_retries"] = self.num_retries
        return metrics


class RewardManager:
    """Base of the managers: read the batch, call the function, place the scores.

    A subclass changes one of these steps.

    Args:
        tokenizer: decodes prompts and responses.
        num_examine: number of samples of each data source that a call prints.
        compute_score: `f(data_source, solution_str, ground_truth, extra_info)`, plain or async,
            returning a finite number or a dict with "score"; None: the rule of the row's data
            source.
        reward_fn_key: the column with the data source.
        timeout_s: seconds that one call may take; None: no limit.
        on_error: policy for a sample if its call raises, is late, or returns no finite score.
            "stop" raises RewardError. "zero" scores it 0. "drop" scores it 0 and lists its row in
            "dropped", so that the trainer leaves it out. "retry" calls again up to `max_retries`
            times, and drops samples that still fail.
        images: whether `extra_info` gets the images of a row, see `reward_model.images`.

    A subclass that replaces one of the methods in `DECLARED` declares the columns that this method
    reads and writes (`verl.utils.phases.phase`). Without a declaration it is taken to change the
    batch, so that the reward overlaps with nothing.
    """

    ADDED_FIELDS: tuple[str, ...] = ()  # by `score`, to those that the function returns
    DECLARED = ("__call__", "read", "columns_of", "score", "call", "print_examples")

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: RewardFunction | None = None,
        reward_fn_key: str = "data_source",
        *,
        timeout_s: float | None = 60.0,
        on_error: OnError = "stop",
        max_retries: int = 2,
        images: bool = False,
    ) -> None:
        if on_error not in ("stop", "zero", "drop", "retry"):
            raise ConfigError(
                f"reward_model.on_error must be stop, zero, drop or retry, got {on_error!r}."
            )

        if timeout_s is not None and not timeout_s > 0:
            raise ConfigError(
                f"reward_model.timeout_s must be positive, or null for no limit, got {timeout_s}."
            )

        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score = compute_score or default_compute_score
        self.reward_fn_key = reward_fn_key
        self.timeout_s = math.inf if timeout_s is None else timeout_s
        self.on_error = on_error
        self.max_retries = max_retries if on_error == "retry" else 0
        self.images = images
        self.by_rule = scores_by_rule(self.compute_score)

        self._caller = Caller(self.compute_score, self.timeout_s)
        self._begun: CallsAhead | None = None

    @phase(reads=READ)
    def __call__(self, data: DataProto, return_dict: bool = False) -> Any:
        """Score every response.

        Returns:
            The (B, R) float32 scores, each on the last real token of its response. With
            `return_dict`, a dict: the scores ("reward_tensor"), further fields that the function
            returned ("reward_extra_info": name -> list of B), "metrics" (`reward/num_errors`,
            `reward/num_timeouts`) and "dropped" (row numbers). A batch with the column `rm_scores`
            is scored already: these scores are returned, with the fields that agent loops gave.

        Raises:
            RewardError: a response is empty, or a sample fails under "stop". The message has the
                text and traceback of the first failing row.
        """
        if "rm_scores" in data.batch.keys():
            reward_tensor = self._given_scores(data)
            result = Scores(extra=self._given_fields(data))
        else:
            samples = self.read(data)
            result = self.score(samples, data)
            scores = self._scores_of(result, len(samples))
            reward_tensor = torch.zeros(data.batch["responses"].shape, dtype=torch.float32)
            if samples:
                rows = [sample.row for sample in samples]
                columns = [sample.last_token for sample in samples]
                reward_tensor[rows, columns] = scores
            self.print_examples(samples, result.scores, data)

        if not return_dict:
            return reward_tensor
        return {
            "reward_tensor": reward_tensor,
            "reward_extra_info": collect_extra(result.extra),
            "metrics": result.metrics(),
            "dropped": result.dropped,
        }

    @phase(reads=READ)
    def read(self, data: DataProto) -> list[Sample]:
        """Decode the responses and collect the arguments of their calls."""
        lengths = self._response_mask(data).sum(-1).tolist()
        responses = data.batch["responses"].tolist()
        ids = [row[:length] for row, length in zip(responses, lengths)]
        if 0 in lengths:
            raise RewardError(
                f"The response of row {lengths.index(0)} has no token, so there is nothing to "
                "score."
            )

        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True) if ids else []
        samples: list[Sample] = []
        for row, columns in enumerate(self.columns_of(data)):
            sample = Sample(
                row=row,
                solution_str=texts[row],
                last_token=lengths[row] - 1,
                token_ids=ids[row],
                **columns,
            )
            samples.append(sample)
        return samples

    @phase(reads=READ)
    def columns_of(self, data: DataProto) -> list[dict[str, Any]]:
        """Return the arguments of the function for each row, except for the text."""
        columns = data.non_tensor_batch
        nothing = [None] * len(data)
        names = (
            self.reward_fn_key,
            "reward_model",
            "extra_info",
            "agent_info",
            "prepared_pictures",
        )
        rows = zip(*(columns.get(name, nothing) for name in names))

        found = []
        for source, truth, extra, agent, pictures in rows:
            if agent is not None:
                extra = {**(extra or {}), **agent}  # the turns, messages and rewards of an episode
            if self.images:
                extra = with_images(extra, pictures)
            found.append(
                {
                    "data_source": source,
                    "ground_truth": ground_truth_of(truth),
                    "extra_info": extra,
                }
            )
        return found

    @contextmanager
    def ahead(
        self, prompts: DataProto, samples_each: int, first_sample: int = 0
    ) -> Iterator[Callable[[tuple[int, list[int]]], None] | None]:
        """Start calls while responses are generated; yield a function that takes each response.

        It takes (number, token ids) of a finished response, from any thread and in any order.
        Numbers count from `first_sample`, with `samples_each` per prompt. The responses must belong
        to the next batch that this manager scores. Yields None if the reward function must be
        called in the caller's thread.
        """
        if self._caller.in_caller:
            yield None
            return
        self._begun = begun = CallsAhead(
            self._caller,
            self.tokenizer,
            self.columns_of(prompts),
            samples_each=samples_each,
            first_sample=first_sample,
            stop_at_failure=self.on_error == "stop",
        )
        try:
            yield begun.take
        finally:
            self._begun = None
            begun.calls.drop()

    @phase(reads=READ)
    def score(self, samples: Sequence[Sample], data: DataProto) -> Scores:
        """Call the function for every sample, and apply `on_error` to the failures."""
        if self.by_rule:
            # A data source without a rule is a mistake of the whole run, not of one sample.
            require_rules((sample.name, sample.data_source) for sample in samples)

        outcomes = list(self.call(samples, stop_at_failure=self.on_error == "stop"))
        result = Scores()
        for _ in range(self.max_retries):
            result.num_retries += self._call_again(samples, outcomes)

        first_failure = ""
        for sample, outcome in zip(samples, outcomes):
            # The sample was not called, because another row's failure stopped the batch.
            if outcome is None:
                continue

            score, extra, failure = check_outcome(outcome, self.timeout_s)
            if failure is not None:
                if self.on_error == "stop":
                    message = self._describe(sample, outcome, failure, data)
                    raise RewardError(message) from outcome.error
                if not first_failure:
                    source = sample.data_source
                    first_failure = f"{sample.name} (data_source {source!r}): {failure}"
                result.num_timeouts += outcome.timed_out
                result.num_errors += not outcome.timed_out
                if self.on_error in ("drop", "retry"):
                    result.dropped.append(sample.row)

            if self.by_rule and sample.data_source in answer_extractors:
                extract = answer_extractors.get(str(sample.data_source))
                extra = {"pred": extract(sample.solution_str), **extra}
            result.scores.append(score)
            result.extra.append(extra)

        if first_failure:
            self._warn(result, len(samples), first_failure)
        return result

    def _call_again(self, samples: Sequence[Sample], outcomes: Outcomes) -> int:
        """Repeat the failed calls, replace their outcomes, and return their number."""
        failed: list[int] = []
        for i, outcome in enumerate(outcomes):
            if outcome and check_outcome(outcome, self.timeout_s)[2]:
                failed.append(i)

        if failed:
            repeated = self.call([samples[i] for i in failed])
            for i, outcome in zip(failed, repeated):
                outcomes[i] = outcome
        return len(failed)

    def _warn(self, result: Scores, num_samples: int, first_failure: str) -> None:
        consequence = "they count as 0" if self.on_error == "zero" else "their rows are dropped"
        logger.warning(
            (
                "%d of %d rewards failed, %d of them late: %s (reward_model.on_error=%s). The "
                "first: %s"
            ),
            result.num_errors + result.num_timeouts,
            num_samples,
            result.num_timeouts,
            consequence,
            self.on_error,
            first_failure,
        )

    @phase()
    def call(
        self,
        samples: Sequence[Sample],
        *,
        stop_at_failure: bool = False,
        timeout_s: float | None = None,
    ) -> Sequence[Outcome | None]:
        """Return one outcome per sample; with `stop_at_failure`, None for samples after a failure.

        `timeout_s` is a shorter deadline for these calls.
        """
        begun = self._begun
        self._begun = None
        if begun is not None and (outcomes := begun.outcomes(samples)) is not None:
            return outcomes

        sources = {sample.data_source for sample in samples}
        return self._caller(
            [sample.arguments() for sample in samples],
            stop_at_failure=stop_at_failure,
            timeout_s=timeout_s,
            at_once=calls_at_once(self._caller.function, sources),
        )

    @phase(reads=READ)
    def print_examples(
        self, samples: Sequence[Sample], scores: Sequence[float], data: DataProto
    ) -> None:
        """Log the first `num_examine` samples of each data source."""
        printed: Counter[Any] = Counter()
        for sample, score in zip(samples, scores):
            if printed[sample.data_source] < self.num_examine:
                printed[sample.data_source] += 1
                logger.info(
                    "Example of %s\n[prompt] %s\n[response] %s\n[ground_truth] %s\n[score] %s",
                    on_one_line(sample.data_source),
                    on_one_line(self._prompt(data, sample.row)),
                    on_one_line(sample.solution_str),
                    on_one_line(sample.ground_truth),
                    score,
                )

    def _scores_of(self, result: Any, count: int) -> torch.Tensor:
        """Return the scores that `score` gave, of a subclass perhaps, as float32 of (count,)."""
        found = type(result).__name__
        if isinstance(result, Scores):
            found = f"{len(result.scores)} scores and {len(result.extra)} dicts"
            try:
                scores = torch.as_tensor(result.scores, dtype=torch.float32)
            except (TypeError, ValueError, RuntimeError, OverflowError) as error:
                found = f"scores that are no numbers ({error})"
            else:
                if scores.shape == (count,) and len(result.extra) == count:
                    return scores

        raise RewardError(
            f"{type(self).__name__}.score must return Scores with one number in `scores` and one "
            f"dict in `extra` for each of {count} responses, got {found}."
        )

    def _given_scores(self, data: DataProto) -> torch.Tensor:
        given = data.batch["rm_scores"]
        responses = data.batch["responses"]
        is_finite = torch.isfinite(given)
        if given.shape != responses.shape or not bool(is_finite.all()):
            raise RewardError(
                f"The column rm_scores must hold finite numbers of shape {tuple(responses.shape)}, "
                f"one for each response token. It has shape {tuple(given.shape)}, and "
                f"{int((~is_finite).sum())} are not finite."
            )
        return given

    def _given_fields(self, data: DataProto) -> list[dict[str, Any]]:
        """Return the `reward_extra_info` of each row's agent loop, as loops of verl 0.7 give it."""
        rows: list[dict[str, Any]] = []
        for info in data.non_tensor_batch.get("agent_info", ()):
            fields = (info or {}).get("reward_extra_info")
            rows.append(dict(fields) if isinstance(fields, Mapping) else {})
        return rows

    def _response_mask(self, data: DataProto) -> torch.Tensor:
        """Return the (B, R) mask of real tokens.

        It includes tool output, because the score is placed on the very last token.
        """
        return data.batch["attention_mask"][:, -data.batch["responses"].shape[1] :]

    def _prompt(self, data: DataProto, row: int) -> str:
        width = data.batch["prompts"].shape[1]
        real = data.batch["attention_mask"][row, :width].bool()
        return self.tokenizer.decode(
            data.batch["prompts"][row][real].tolist(), skip_special_tokens=True
        )

    def _describe(self, sample: Sample, outcome: Outcome, failure: str, data: DataProto) -> str:
        way_out = (
            "Fix the function, or set a policy for failing samples with "
            "reward_model.on_error=zero, drop or retry"
        )
        if outcome.timed_out:
            way_out += ", or set the time limit of a call with reward_model.timeout_s"

        return (
            f"The reward function failed on {sample.name} (data_source {sample.data_source!r}): "
            f"{failure}\n"
            f"  prompt ends:     {self._prompt(data, sample.row)[-200:]!r}\n"
            f"  response starts: {sample.solution_str[:200]!r}\n"
            f"  ground_truth:    {text_of(sample.ground_truth)[:200]!r}\n"
            f"{way_out}.{traceback_below(outcome.error)}"
        )


@reward_managers.register("naive")
class NaiveRewardManager(RewardManager):
    """One call per sample: in turn for a plain function, all at once for a coroutine function."""
