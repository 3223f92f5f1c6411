"""The slow reference engine: transformers' own `generate`, drawing by our noise."""

import time
from collections.abc import Iterator, Sequence
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
from verl.rollout.base import rollout_engines
from verl.rollout.checks import response_limits
from verl.rollout.local import LocalEngine, not_finite
from verl.rollout.sampling import row_keys, sample, sample_keys
from verl.rollout.stopping import StopRule
from verl.rollout.types import Completion, Request, SamplingParams
from verl.utils.errors import ConfigError


@dataclass(frozen=True)
class _Row:
    sample_id: int
    prompt: tuple[int, ...]
    limit: int
    key: np.uint64


class HFEngine(LocalEngine):
    """A `RolloutEngine` without a cache of its own: left-padded batches of max_num_seqs samples,
    eager attention.

    Eager, because every family has it, soft caps and sinks included. Statistics: prefill_tokens
    (each sample's prompt counts), decode_steps, generated_tokens, generate_s, tokens_per_s.
    """

    def __init__(
        self, *, model: PreTrainedModel, tokenizer: Any, config: RolloutConfig, device: torch.device
    ) -> None:
        if config.deterministic:
            raise ConfigError(
                "actor_rollout_ref.rollout.deterministic=true needs the engine 'embedded'; 'hf' "
                "computes in padded batches, whose results depend on one another. Set "
                "actor_rollout_ref.rollout.name=embedded."
            )
        super().__init__(
            model=model, tokenizer=tokenizer, config=config, device=device, attention="eager"
        )
        # Whatever the model ships (top-p, repetition penalty ...) would be applied before our draw.
        self.twin.module.generation_config = GenerationConfig()

    def generate(
        self, requests: Sequence[Request], params: SamplingParams, *, seed: int, step: int
    ) -> Iterator[Completion]:
        """Sample every request; see `RolloutEngine.generate`. What is wrong with the call is raised
        at once."""
        rule = self._begin(requests, params)
        ids = [sample_id for request in requests for sample_id in request.sample_ids]
        keys = iter(sample_keys(seed, step, np.array(ids, np.int64)))
        rows = [
            _Row(sample_id, request.prompt_ids, limit, next(keys))
            for request in requests
            for sample_id, limit in zip(
                request.sample_ids, response_limits(request, params, self.max_model_len)
            )
        ]
        return self._run(rows, params, rule)

    def _run(
        self, rows: list[_Row], params: SamplingParams, rule: StopRule
    ) -> Iterator[Completion]:
        start = time.perf_counter()
        generated = steps = 0
        for chunk in self._chunks(rows):
            recorder = self._generate_chunk(chunk, params, rule)
            steps += len(recorder.token_ids)
            for completion in recorder.completions(chunk):
                generated += len(completion.token_ids)
                yield completion
        seconds = time.perf_counter() - start
        self._statistics = {
            "prefill_tokens": float(sum(len(row.prompt) for row in rows)),
            "decode_steps": float(steps),
            "generated_tokens": float(generated),
            "generate_s": seconds,
            "tokens_per_s": generated / seconds,
        }

    def _chunks(self, rows: list[_Row]) -> Iterator[list[_Row]]:
        """Up to max_num_seqs rows at a time. All of them go on until the last has ended: none may
        come to positions that the model does not have, or at which it computes all of them
        differently (dynamic rotary embeddings)."""
        chunk: list[_Row] = []
        for row in rows:
            together = [*chunk, row]
            longest = max(len(row.prompt) for row in together) + max(row.limit for row in together)
            if len(together) > self.config.max_num_seqs or longest > self.max_model_len:
                yield chunk
                together = [row]
            chunk = together
        if chunk:
            yield chunk

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
        with torch.inference_mode():
            generate: Any = self.twin.module.generate
            generate(
                input_ids=input_ids.to(self.device),
                attention_mask=mask.to(self.device),
                # Our recorder ends rows, so transformers needs no end-of-sequence id, only one to
                # fill up with.
                generation_config=GenerationConfig(
                    max_new_tokens=max(row.limit for row in rows), do_sample=False, pad_token_id=0
                ),
                logits_processor=LogitsProcessorList([_Draw(recorder)]),
                stopping_criteria=StoppingCriteriaList([_Ended(recorder)]),
            )
        return recorder


class _Recorder:
    """What the rows of one `generate` call of transformers have drawn, and where each of them
    ended."""

    def __init__(self, params: SamplingParams, rule: StopRule, rows: list[_Row]) -> None:
        self.params = params
        self.rule = rule
        self.keys = np.array([row.key for row in rows], np.uint64)
        self.limits = np.array([row.limit for row in rows])
        self.lengths = np.zeros(len(rows), np.int64)  # of the response once it has ended, else 0
        self.stopped = np.zeros(len(rows), np.bool_)
        self.token_ids: list[NDArray[np.int64]] = []
        self.log_probs: list[NDArray[np.float32]] = []

    def draw(self, logits: torch.Tensor) -> torch.Tensor:
        """(b, V) -> (b,) tokens, noted with their log-probs."""
        position = np.full(len(self.keys), len(self.token_ids), np.int64)
        keys = torch.from_numpy(row_keys(self.keys, position)).to(logits.device)
        tokens, log_probs = sample(logits, self.params, keys)
        self.token_ids.append(tokens.cpu().numpy())
        self.log_probs.append(log_probs.cpu().numpy())
        return tokens

    def ended(self) -> NDArray[np.bool_]:
        """(b,) bool: which rows have ended, the last tokens included."""
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

    def completions(self, rows: list[_Row]) -> Iterator[Completion]:
        token_ids = np.stack(self.token_ids, axis=1)
        log_probs = np.stack(self.log_probs, axis=1)
        for number, (row, length) in enumerate(zip(rows, self.lengths)):
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


@rollout_engines.register("hf")
def hf(
    *, model: PreTrainedModel, tokenizer: Any, config: RolloutConfig, device: torch.device
) -> HFEngine:
    """Factory of the registry."""
    return HFEngine(model=model, tokenizer=tokenizer, config=config, device=device)
