"""The embedded engine: continuous batching over a paged cache, through the Hugging Face module itself."""

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from verl.config.rollout import RolloutConfig
from verl.rollout.base import rollout_engines
from verl.rollout.checks import response_limit
from verl.rollout.embedded.attention import IMPLEMENTATION
from verl.rollout.embedded.pages import PageAllocator
from verl.rollout.embedded.runner import ModelRunner
from verl.rollout.embedded.scheduler import Admission, Group, Sample, Scheduler
from verl.rollout.local import LocalEngine, not_finite
from verl.rollout.sampling import sample_keys
from verl.rollout.stopping import StopRule
from verl.rollout.types import Completion, Request, SamplingParams
from verl.utils.devices import GIB
from verl.utils.errors import EngineAsleepError, RolloutError
from verl.utils.logging import logger

# Share of a CPU machine's memory that the cache may take when num_pages is not given.
CPU_MEMORY_SHARE = 0.25
PROGRESS_EVERY_S = 10.0


class EmbeddedEngine(LocalEngine):
    """A `RolloutEngine` inside the trainer's process. One `generate` at a time.

    Statistics: prefill_tokens, decode_steps, generated_tokens, preemptions, copied_pages, peak_pages, num_pages,
    generate_s, tokens_per_s.
    """

    def __init__(self, *, model: PreTrainedModel, tokenizer: Any, config: RolloutConfig, device: torch.device) -> None:
        super().__init__(model=model, tokenizer=tokenizer, config=config, device=device, attention=IMPLEMENTATION)
        self.runner = ModelRunner(self.twin.module, page_size=config.page_size, device=device, dtype=self.twin.dtype)
        self._scheduler: Scheduler | None = None

    def generate(
        self, requests: Sequence[Request], params: SamplingParams, *, seed: int, step: int
    ) -> Iterator[Completion]:
        """Sample every request; see `RolloutEngine.generate`. What is wrong with the call is raised at once.

        Closing the iterator early gives all pages back.
        """
        self._refuse_while_busy()
        rule = self._begin(requests, params)
        samples = self._samples(requests, params, seed, step)
        self._provide_pages(requests, samples)
        scheduler = Scheduler(
            samples,
            PageAllocator(self.runner.num_pages),
            page_size=self.config.page_size,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
        )
        return self._run(scheduler, params, rule)

    def sleep(self) -> None:
        """Drop the key-value cache and, on CUDA, the weights. The cache comes back with the next `generate` after
        `wake`, which knows how much it needs."""
        self._refuse_while_busy()
        self.runner.release()
        super().sleep()

    def check_integrity(self) -> None:
        """Assert that the pages' books are right, during a `generate`; outside of one no page is in use."""
        if self._scheduler is not None:
            self._scheduler.check_integrity()

    def _refuse_while_busy(self) -> None:
        if self._scheduler is not None:
            raise RolloutError("A generate() of this engine is not finished; exhaust or close its iterator first.")

    def _samples(self, requests: Sequence[Request], params: SamplingParams, seed: int, step: int) -> list[Sample]:
        ids = [sample_id for request in requests for sample_id in request.sample_ids]
        keys = iter(sample_keys(seed, step, np.array(ids, np.int64)))
        samples = []
        for request in requests:
            group = Group(prompt=tuple(request.prompt_ids), unstarted=len(request.sample_ids))
            limit = response_limit(request, params, self.max_model_len)
            samples += [
                Sample(sample_id=sample_id, group=group, limit=limit, key=next(keys))
                for sample_id in request.sample_ids
            ]
        return samples

    def _provide_pages(self, requests: Sequence[Request], samples: Sequence[Sample]) -> None:
        """Allocate the cache, or a larger one where this call can use it."""
        size = self.config.page_size
        # The last token drawn is never fed back, so its key is never kept.
        most = [-(-(len(sample.group.prompt) + sample.limit - 1) // size) for sample in samples]
        useful = sum(sorted(most, reverse=True)[: self.config.max_num_seqs]) + len(requests)
        if self.config.num_pages is not None:
            wanted = self.config.num_pages
        elif self.device.type == "cuda":
            wanted = self.runner.num_pages or self._cuda_pages()
        else:
            memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            wanted = min(useful, int(CPU_MEMORY_SHARE * memory) // self.runner.page_bytes)
        if wanted < max(most, default=0):
            raise RolloutError(
                f"One sample alone may need {max(most)} pages of {size} tokens, the cache has room for {wanted} "
                f"({wanted * self.runner.page_bytes / GIB:.2f} GiB). Raise actor_rollout_ref.rollout.num_pages or "
                "gpu_memory_utilization, or lower data.max_response_length."
            )
        if wanted > self.runner.num_pages:
            self.runner.allocate(wanted)

    def _cuda_pages(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.device)
        unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        share = self.config.gpu_memory_utilization * (free + unused)
        longest = -(-self.max_model_len // self.config.page_size)
        # One page more a sequence, for prompts whose samples have not all started.
        return min(int(share // self.runner.page_bytes), self.config.max_num_seqs * (longest + 1))

    def _run(self, scheduler: Scheduler, params: SamplingParams, rule: StopRule) -> Iterator[Completion]:
        # Asked again: the iterator may be started long after it was made.
        self._refuse_while_busy()
        if self.runner.num_pages < scheduler.pages.num_pages:
            raise EngineAsleepError("The engine slept after this generate() was called; call generate() again.")
        self._scheduler = scheduler
        total = len(scheduler.waiting)
        progress = _Progress(total)
        counts = dict.fromkeys(("prefill_tokens", "decode_steps", "generated_tokens", "copied_pages"), 0)
        try:
            while scheduler.has_work:
                admission = scheduler.admit()
                if admission is not None:
                    slots = np.array(admission.slots, np.int64)
                    hidden = self._prefill(scheduler, admission)
                    counts["prefill_tokens"] += sum(len(prefill.token_ids) for prefill in admission.prefills)
                else:
                    copies = scheduler.prepare_decode()
                    slots = scheduler.running
                    hidden = self._decode(scheduler, copies)
                    counts["decode_steps"] += 1
                    counts["copied_pages"] += len(copies)
                counts["generated_tokens"] += len(slots)
                completions = self._advance(scheduler, slots, hidden, params, rule)
                scheduler.release_started_prompts()
                progress.note(scheduler, len(completions), counts["generated_tokens"])
                yield from completions
        finally:
            scheduler.abandon()
            self._scheduler = None
            seconds = progress.seconds
            self._statistics = {
                **{name: float(count) for name, count in counts.items()},
                "preemptions": float(scheduler.preemptions),
                "peak_pages": float(scheduler.pages.peak),
                "num_pages": float(scheduler.pages.num_pages),
                "generate_s": seconds,
                "tokens_per_s": counts["generated_tokens"] / seconds,
            }

    def _prefill(self, scheduler: Scheduler, admission: Admission) -> torch.Tensor:
        """Compute what the admission needs; gives the hidden state (b, H) each admitted slot draws from."""
        prefills = admission.prefills
        if prefills:
            states = self.runner.prefill(
                [prefill.token_ids for prefill in prefills], [prefill.pages for prefill in prefills]
            )
            for prefill, state in zip(prefills, states):
                if prefill.group is not None:
                    prefill.group.hidden = state
        rows = []
        for slot in admission.slots:
            if slot in admission.resumed:
                rows.append(states[admission.resumed[slot]])
            else:
                rows.append(scheduler.group_of(slot).hidden)
        return torch.stack(rows)

    def _decode(self, scheduler: Scheduler, copies: list[tuple[int, int]]) -> torch.Tensor:
        if copies:
            self.runner.copy_pages(copies)
        slots = scheduler.running
        positions = scheduler.cached[slots]
        last = scheduler.token_ids[slots, scheduler.drawn[slots] - 1]
        width = int(positions.max()) // self.config.page_size + 1
        hidden = self.runner.decode(last, positions, scheduler.table[slots, :width])
        scheduler.cached[slots] = positions + 1
        return hidden

    def _advance(
        self,
        scheduler: Scheduler,
        slots: NDArray[np.int64],
        hidden: torch.Tensor,
        params: SamplingParams,
        rule: StopRule,
    ) -> list[Completion]:
        """Draw one token for each of `slots` and end those that are done."""
        tokens, log_probs = self.runner.draw(hidden, params, scheduler.keys[slots], scheduler.drawn[slots])
        if not np.isfinite(log_probs).all():
            raise not_finite(scheduler.sample_id_of(int(slots[np.flatnonzero(~np.isfinite(log_probs))[0]])))
        counts = scheduler.record(slots, tokens, log_probs)
        stopped = rule.ends(tokens)
        if rule.strings:
            for row in np.flatnonzero(~stopped).tolist():
                stopped[row] = rule.completes_string(scheduler.token_ids[slots[row], : counts[row]])
        done = stopped | (counts >= scheduler.limits[slots])
        if not done.any():
            return []
        return scheduler.finish(slots[done].tolist(), set(slots[stopped].tolist()))


class _Progress:
    """One log line every PROGRESS_EVERY_S seconds of a long generation."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.finished = 0
        self.start = time.perf_counter()
        self.last_line = self.start

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.start

    def note(self, scheduler: Scheduler, finished: int, tokens: int) -> None:
        self.finished += finished
        now = time.perf_counter()
        if now - self.last_line < PROGRESS_EVERY_S:
            return
        self.last_line = now
        logger.info(
            f"rollout: {self.finished}/{self.total} samples done, {tokens} tokens at {tokens / self.seconds:.0f}/s, "
            f"{scheduler.running.size} running, {len(scheduler.waiting)} waiting, {scheduler.pages.num_free} of "
            f"{scheduler.pages.num_pages} pages free"
        )


@rollout_engines.register("embedded")
def embedded(*, model: PreTrainedModel, tokenizer: Any, config: RolloutConfig, device: torch.device) -> EmbeddedEngine:
    """Factory of the registry."""
    return EmbeddedEngine(model=model, tokenizer=tokenizer, config=config, device=device)
