"""The slow reference engine: transformers' own `generate`, drawing by our noise."""

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from verl.config.rollout import RolloutConfig
from verl.models.pictures import Pictures
from verl.models.vision import model_arguments, picture_features
from verl.rollout.base import Capabilities, rollout_engines
from verl.rollout.checks import refuse_running, response_limits
from verl.rollout.local import LocalEngine, not_finite
from verl.rollout.memory import EngineLoad, EngineMemory, padded_memory
from verl.rollout.sampling import row_keys, sample, sample_keys
from verl.rollout.stopping import StopRule
from verl.rollout.types import Completion, Request, SamplingParams
from verl.utils.errors import RolloutError


@dataclass(frozen=True)
class _Row:
    sample_id: int
    prompt: tuple[int, ...]
    limit: int
    key: np.uint64
    pictures: Pictures


@dataclass(eq=False)
class _Batch:
    """The rows of one `submit` that have not been generated yet."""

    rows: list[_Row]
    params: SamplingParams
    rule: StopRule


class HFEngine(LocalEngine):
    """A `RolloutEngine` without a cache of its own, over left-padded batches of max_num_seqs rows.

    Rows of a padded batch change each other's last bits, so it is not deterministic. It uses eager
    attention, because every family has it, soft caps and sinks included.

    Statistics: prefill_tokens (each sample's prompt counts), decode_steps, generated_tokens,
    generate_s, tokens_per_s.
    """

    capabilities = Capabilities(aliases_weights=True)

    @classmethod
    def plan(cls, config: RolloutConfig, load: EngineLoad) -> EngineMemory:
        """Implement `EngineClass.plan`."""
        return padded_memory(config, load)

    def __init__(
        self, *, model: PreTrainedModel, tokenizer: Any, config: RolloutConfig, device: torch.device
    ) -> None:
        super().__init__(
            model=model, tokenizer=tokenizer, config=config, device=device, attention="eager"
        )
        # Whatever the model ships (top-p, repetition penalty ...) would be applied before our draw.
        self.twin.module.generation_config = GenerationConfig()
        self._batches: deque[_Batch] = deque()
        self._counts: Counter[str] = Counter()
        self._started = 0.0

    @property
    def has_work(self) -> bool:
        """Implement `RolloutEngine.has_work`."""
        return bool(self._batches)

    def submit(
        self, requests: Sequence[Request], params: SamplingParams, *, seed: int, step: int
    ) -> None:
        """Add requests; see `RolloutEngine.submit`. Those of one call are padded together."""
        rule = self.check_call(requests, params)
        refuse_running(requests, {row.sample_id for batch in self._batches for row in batch.rows})
        rows = []
        for request in requests:
            _refuse_long_videos(request.pictures)
            keys = sample_keys(seed, step, np.array(request.sample_ids, np.int64))
            limits = response_limits(request, params, self.max_model_len)
            for sample_id, key, limit in zip(request.sample_ids, keys, limits):
                rows.append(_Row(sample_id, request.prompt_ids, limit, key, request.pictures))

        if not self.has_work:
            self._started = time.perf_counter()
            self._counts = Counter()
            self._note_statistics()
        if rows:
            self._counts["prefill_tokens"] += sum(len(row.prompt) for row in rows)
            self._batches.append(_Batch(rows, params, rule))

    def step(self) -> list[Completion]:
        """Generate the next rows to their ends; see `RolloutEngine.step`."""
        if not self.has_work:
            return []
        batch = self._batches[0]
        chunk = self._next_chunk(batch.rows)
        try:
            recorder = self._generate_chunk(chunk, batch.params, batch.rule)
            completions = list(recorder.completions())
        except BaseException:
            self._batches.clear()
            raise

        self._counts["decode_steps"] += len(recorder.token_ids)
        for each in completions:
            self._counts["generated_tokens"] += len(each.token_ids)
        del batch.rows[: len(chunk)]
        if not batch.rows:
            self._batches.popleft()
        self._note_statistics()
        return completions

    def abort(self, sample_ids: Iterable[int] | None = None) -> list[Completion]:
        """Give up samples, none of which has begun; see `RolloutEngine.abort`."""
        wanted = None if sample_ids is None else set(sample_ids)
        aborted = []
        for batch in self._batches:
            staying = []
            for row in batch.rows:
                if wanted is None or row.sample_id in wanted:
                    aborted.append(Completion.not_begun(row.sample_id))
                else:
                    staying.append(row)
            batch.rows = staying

        self._batches = deque(batch for batch in self._batches if batch.rows)
        return aborted

    def _note_statistics(self) -> None:
        seconds = time.perf_counter() - self._started
        self._statistics = {
            "prefill_tokens": float(self._counts["prefill_tokens"]),
            "decode_steps": float(self._counts["decode_steps"]),
            "generated_tokens": float(self._counts["generated_tokens"]),
            "generate_s": seconds,
            "tokens_per_s": self._counts["generated_tokens"] / seconds,
        }

    def _next_chunk(self, rows: list[_Row]) -> list[_Row]:
        """Take up to max_num_seqs rows from the front.

        All of them go on until the last has ended. None may come to positions that the model does
        not have, or at which it computes all rows differently (dynamic rotary embeddings).
        """
        chunk = rows[: self.config.max_num_seqs]
        longest = 0
        most = 0
        for count, row in enumerate(chunk):
            longest = max(longest, len(row.prompt))
            most = max(most, row.limit)
            if longest + most > self.max_model_len:
                return chunk[:count]
        return chunk

    def _generate_chunk(
        self, rows: list[_Row], params: SamplingParams, rule: StopRule
    ) -> "_Recorder":
        longest = max(len(row.prompt) for row in rows)
        input_ids = torch.zeros(len(rows), longest, dtype=torch.int64)
        mask = torch.zeros_like(input_ids)

        for number, row in enumerate(rows):
            input_ids[number, longest - len(row.prompt) :] = torch.tensor(row.prompt)
            mask[number, longest - len(row.prompt) :] = 1

        recorder = _Recorder(params, rule, rows)
        module = self.twin.module
        pictures = [picture for row in rows for picture in row.pictures]
        with torch.inference_mode():
            generate: Any = module.generate
            try:
                generate(
                    **model_arguments(module, input_ids, pictures),
                    attention_mask=mask.to(self.device),
                    # Our recorder ends rows, so transformers needs no end-of-sequence id, only one
                    # to fill up with.
                    generation_config=GenerationConfig(
                        max_new_tokens=max(row.limit for row in rows),
                        do_sample=False,
                        pad_token_id=0,
                    ),
                    logits_processor=LogitsProcessorList([_Draw(recorder)]),
                    stopping_criteria=StoppingCriteriaList([_Ended(recorder)]),
                )
            except ValueError:
                # transformers has compared the tokens of pictures with their features.
                if pictures:
                    picture_features(module, pictures)
                raise

        return recorder


def _refuse_long_videos(pictures: Pictures) -> None:
    """Raise RolloutError for a video behind which transformers gives text other positions."""
    for picture in pictures:
        longest = max(times[-1] + 1 for times in picture.times)
        if picture.grid is not None and longest > max(picture.grid):
            raise RolloutError(
                f"A video has positions up to {longest} in time, but a frame of {picture.grid[0]} "
                f"x {picture.grid[1]} tokens, and transformers' own generate gives the text behind "
                "it other positions than the trainer. Set actor_rollout_ref.rollout.name=embedded."
            )


class _Recorder:
    """The draws of one `generate` call of transformers, and the end of each row."""

    def __init__(self, params: SamplingParams, rule: StopRule, rows: list[_Row]) -> None:
        self.params = params
        self.rule = rule
        self.rows = rows
        self.keys = np.array([row.key for row in rows], np.uint64)
        self.limits = np.array([row.limit for row in rows])
        self.lengths = np.zeros(len(rows), np.int64)  # of the response once it has ended, else 0
        self.stopped = np.zeros(len(rows), np.bool_)
        self.token_ids: list[NDArray[np.int64]] = []
        self.log_probs: list[NDArray[np.float32]] = []

    def draw(self, logits: torch.Tensor) -> torch.Tensor:
        """Draw tokens (b,) from logits (b, V), and note them with their log-probs."""
        position = np.full(len(self.keys), len(self.token_ids), np.int64)
        keys = torch.from_numpy(row_keys(self.keys, position)).to(logits.device)
        tokens, log_probs = sample(logits, self.params, keys)
        self.token_ids.append(tokens.cpu().numpy())
        self.log_probs.append(log_probs.cpu().numpy())
        return tokens

    def ended(self) -> NDArray[np.bool_]:
        """Return which rows have ended, (b,) bool, the last tokens included."""
        count = len(self.token_ids)
        stops = self.rule.ends(self.token_ids[-1])
        if self.rule.strings:
            so_far = np.stack(self.token_ids, axis=1)
            for row in np.flatnonzero(~stops & (self.lengths == 0)).tolist():
                stops[row] = self.rule.completes_string(so_far[row])

        ends_now = (self.lengths == 0) & (stops | (count >= self.limits))
        self.stopped |= ends_now & stops
        self.lengths[ends_now] = count
        return self.lengths > 0

    def completions(self) -> Iterator[Completion]:
        """Yield the finished samples."""
        token_ids = np.stack(self.token_ids, axis=1)
        log_probs = np.stack(self.log_probs, axis=1)
        for number, (row, length) in enumerate(zip(self.rows, self.lengths)):
            if not np.isfinite(log_probs[number, :length]).all():
                raise not_finite(row.sample_id)
            yield Completion(
                sample_id=row.sample_id,
                token_ids=token_ids[number, :length].tolist(),
                log_probs=log_probs[number, :length].tolist(),
                finish_reason="stop" if self.stopped[number] else "length",
            )


class _Draw(LogitsProcessor):
    """Leaves transformers nothing to choose but the token we have drawn."""

    def __init__(self, recorder: _Recorder) -> None:
        self.recorder = recorder

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> Any:
        tokens = self.recorder.draw(scores)
        return torch.full_like(scores, float("-inf")).scatter_(1, tokens[:, None], 0.0)


class _Ended(StoppingCriteria):
    def __init__(self, recorder: _Recorder) -> None:
        self.recorder = recorder

    def __call__(
        self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any
    ) -> Any:
        return torch.from_numpy(self.recorder.ended()).to(input_ids.device)


rollout_engines.register("hf")(HFEngine)
