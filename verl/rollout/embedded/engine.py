"""The embedded engine: continuous batching over a paged cache, with the Hugging Face module."""

import importlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from verl.config.rollout import RolloutConfig
from verl.distributed.collectives import ALONE, Axis
from verl.rollout.base import Capabilities, refuse_while_busy, rollout_engines
from verl.rollout.checks import refuse_running
from verl.rollout.eight_bits import DTYPES
from verl.rollout.embedded.attention import IMPLEMENTATION
from verl.rollout.embedded.cache_room import CacheRoom
from verl.rollout.embedded.drafts import NgramDrafts
from verl.rollout.embedded.families import check_attention
from verl.rollout.embedded.host_runner import HostRunner
from verl.rollout.embedded.pages import PageAllocator
from verl.rollout.embedded.quantization import (
    check_cache_device,
    check_cache_settings,
    check_family,
    check_settings,
)
from verl.rollout.embedded.run import Progress, Run
from verl.rollout.embedded.runner import ModelRunner
from verl.rollout.embedded.samples import Sample, samples_of
from verl.rollout.embedded.scheduler import Scheduler
from verl.rollout.embedded.steps import Steps
from verl.rollout.embedded.tensor_parallel import TensorParallel, check_tensor_parallel
from verl.rollout.local import LocalEngine
from verl.rollout.memory import spare_rows
from verl.rollout.stopping import StopRule
from verl.rollout.types import Completion, Request, Room, SamplingParams
from verl.utils.errors import RolloutError
from verl.utils.imports import require
from verl.utils.logging import logger
from verl.utils.units import GIB
from verl.weight_sync.base import NamedTensors

_COUNTS = ("prefill_tokens", "cached_tokens", "decode_steps", "generated_tokens", "copied_pages")
_DRAFT_COUNTS = ("drafted_tokens", "accepted_tokens")


class EmbeddedEngine(LocalEngine):
    """A `RolloutEngine` inside the trainer's process.

    Several `ranks` can share one engine (`TensorParallel`). Each of them makes every call with the
    same arguments and gets all completions.

    Statistics: prefill_tokens, cached_tokens (of prompts, found in the cache), decode_steps,
    generated_tokens, preemptions, copied_pages, peak_pages, num_pages, memory_gib (weights that are
    not the trainer's, pages, and on CPU everything else that is kept between steps), capture_s (all
    graphs since the engine was made), generate_s, tokens_per_s. With drafts also drafted_tokens,
    and accepted_tokens, which were right.
    """

    capabilities = Capabilities(
        deterministic=True,
        tensor_parallel=True,
        drafts=True,
        quantization=True,
        quantized_cache=True,
        routed_experts=True,
        aliases_weights=True,
        continues=True,
    )

    @classmethod
    def check(cls, config: RolloutConfig) -> None:
        """Implement `EngineClass.check`."""
        super().check(config)
        check_settings(config)
        check_cache_settings(config)

    @classmethod
    def check_model(cls, config: RolloutConfig, model: PreTrainedConfig, *, on_cuda: bool) -> None:
        """Implement `EngineClass.check_model`."""
        check_attention(config, model, on_cuda=on_cuda)
        check_family(config, model, on_cuda=on_cuda)
        check_cache_device(config, on_cuda=on_cuda)
        if config.tensor_model_parallel_size > 1:
            check_tensor_parallel(model, config.tensor_model_parallel_size)

    def __init__(
        self,
        *,
        model: PreTrainedModel,
        tokenizer: Any,
        config: RolloutConfig,
        device: torch.device,
        ranks: Axis = ALONE,
    ) -> None:
        self.parallel: TensorParallel | None = None
        if ranks.size > 1:
            self.parallel = TensorParallel(model, ranks, in_order=config.deterministic)
        super().__init__(
            model=model,
            tokenizer=tokenizer,
            config=config,
            device=device,
            attention=IMPLEMENTATION,
            cuts=self.parallel.cuts if self.parallel else None,
        )

        self.runner = self._make_runner()
        self._steps = Steps(self.runner)
        self._run: Run | None = None
        self._room = CacheRoom(self.runner, config, ranks)
        self._has_slept = False
        self._pages = PageAllocator(0, config.page_size)
        self._kept: dict[int, list[int]] = {}  # pages of frozen samples, see `Scheduler`
        # version of the weights that computed the keys in the pages
        self._pages_version: object = None

    @property
    def has_work(self) -> bool:
        """Implement `RolloutEngine.has_work`."""
        return self._run is not None

    @property
    def is_ready(self) -> bool:
        """Return whether `step` would not wait for the device."""
        run = self._run
        if run is None or not run.flight or len(run.flight) < self.runner.lag:
            return True
        return run.flight[0].is_there()

    def reserve(self, room: Room) -> None:
        """Size the tables of later runs for `room`; see `RolloutEngine.reserve`."""
        self._room.reserved = room

    def submit(
        self, requests: Sequence[Request], params: SamplingParams, *, seed: int, step: int
    ) -> None:
        """Add requests, also while others run; see `RolloutEngine.submit`.

        Where requests do not fit the tables of the running ones, all of them wait for larger
        tables, which costs a prefill each.
        """
        rule = self.check_call(requests, params)
        samples = samples_of(requests, params, seed, step, self.max_model_len)
        run = self._run
        if run is None:
            if samples:
                self._run = self._begin_run(samples, params, rule)
            else:
                self._statistics = dict.fromkeys(_COUNTS, 0.0)
            return

        if params != run.params:
            raise RolloutError(
                f"Requests with other sampling parameters are running: {run.params}, got {params}. "
                "Submit these when the engine has no work, or give samples limits of their own."
            )
        refuse_running(requests, run.scheduler.sample_ids())
        run.progress.total += len(samples)
        if run.scheduler.has_room_for(samples):
            run.scheduler.add(samples)
        else:
            self._begin_again(run, samples)

    def step(self) -> list[Completion]:
        """Take one step of the device; see `RolloutEngine.step`."""
        run = self._run
        if run is None:
            return []
        try:
            completions = run.finished
            run.finished = []
            # After `abort` there may be nothing left but samples that ended meanwhile.
            launched = self._steps.launch(run) if run.scheduler.has_work else []
            run.flight.extend(launched)
            # The host reads tokens while the device computes the next step.
            while run.flight and (not launched or len(run.flight) > self.runner.lag):
                completions += self._steps.collect(run)
        except BaseException as error:
            self._abandon(error)
            raise

        if not run.scheduler.has_work:
            self._end_run()
        return completions

    def abort(self, sample_ids: Iterable[int] | None = None) -> list[Completion]:
        """Abort samples; see `RolloutEngine.abort`. Waits for tokens still on the device."""
        return self._abort(sample_ids, keep=False)

    def _abort(self, sample_ids: Iterable[int] | None, *, keep: bool) -> list[Completion]:
        run = self._run
        if run is None:
            return []
        try:
            self._drain(run)
            scheduler = run.scheduler
            ids = scheduler.sample_ids() if sample_ids is None else set(sample_ids)
            aborted = scheduler.abort(ids, keep=keep)
        except BaseException as error:
            self._abandon(error)
            raise
        if not scheduler.has_work and not run.finished:
            self._end_run()
        return aborted

    def freeze(self) -> list[Completion]:
        """Abort all samples, and hold their keys and values until they go on.

        A later `update_weights` leaves them as they are: keys of older weights. `forget_kept` and
        `sleep` drop them, and so does an engine that needs their memory.
        """
        return self._abort(None, keep=True)

    def forget_kept(self) -> None:
        """Drop the keys and values of frozen samples, which compute them again."""
        refuse_while_busy(self)
        self._begin_books()

    def progress(self, known: Mapping[int, int]) -> dict[int, tuple[list[int], list[float]]]:
        """Return the tokens and log-probs that running samples drew since a caller last looked.

        `known` has, by sample id, the number of tokens that the caller has already.
        """
        if self._run is None:
            return {}
        return self._run.scheduler.drawn_since(known)

    def update_weights(self, named_tensors: NamedTensors) -> None:
        """Take new weights; see `RolloutEngine.update_weights`.

        Raises RolloutError during a `generate`, because its keys are those of the old weights.
        """
        refuse_while_busy(self)
        super().update_weights(named_tensors)

    def sleep(self) -> None:
        """Drop the key-value cache and, on CUDA, the weights.

        The next `generate` after `wake` allocates the cache, because it knows the size.
        """
        refuse_while_busy(self)
        self.runner.release()
        self._begin_books()
        super().sleep()
        if not self._has_slept:
            self._has_slept = True
            self._log_bytes_kept()

    def kept_asleep(self) -> dict[str, int]:
        """Return the engine's bytes that stay on a CUDA device during `sleep`, by purpose.

        Graphs stay valid, for example. The sizes are the same awake and asleep.
        """
        return self.runner.kept_asleep()

    def forget_prefixes(self) -> None:
        """Implement `RolloutEngine.forget_prefixes`."""
        refuse_while_busy(self)
        self._forget()

    def check_integrity(self) -> None:
        """Assert that page counts are right. Outside of a `generate` no page is in use."""
        if self._run is not None:
            self._run.scheduler.check_integrity()
        else:
            self._pages.check_integrity(self._kept.values())

    def _log_bytes_kept(self) -> None:
        kept = self.kept_asleep()
        if kept:
            whole = torch.cuda.get_device_properties(self.device).total_memory
            parts = ", ".join(f"{name} {size / GIB:.3f} GiB" for name, size in kept.items())
            logger.info(
                f"rollout: asleep, of the device {sum(kept.values()) / whole:.2%} stay in use: "
                f"{parts}"
            )

    def _make_runner(self) -> ModelRunner:
        settings: dict[str, Any] = {
            "page_size": self.config.page_size,
            "max_model_len": self.max_model_len,
            "deterministic": self.config.deterministic,
            "device": self.device,
            "dtype": self.twin.dtype,
            "cache_dtype": DTYPES.get(self.config.kv_cache_dtype),
            "parallel": self.parallel,
            "records_routes": self.config.enable_rollout_routing_replay,
        }
        if self.device.type == "cpu":
            verifies_drafts = self.config.speculative.method is not None
            return HostRunner(self.twin, **settings, verifies_drafts=verifies_drafts)

        require("triton", "Generation on a GPU", "pip install triton")
        # triton is installed with CUDA only
        cuda = importlib.import_module("verl.rollout.embedded.cuda_runner")
        return cuda.CudaRunner(
            self.twin,
            **settings,
            max_num_seqs=self.config.max_num_seqs,
            spare_rows=spare_rows(self.config),
            # Agents use the host while the device computes, and may take longer than a step.
            lag=2 if self.config.uses_agents else 1,
            enforce_eager=self.config.enforce_eager,
        )

    def _fresh_pages(self) -> PageAllocator:
        """Return the page allocator, without keys that older weights computed."""
        if self._pages_version != self.twin.version:
            self._forget()
            self._pages_version = self.twin.version
        self._pages.grow(self.runner.num_pages)
        self._pages.reset_peak()
        return self._pages

    def _begin_books(self) -> None:
        """Start with an empty allocator: no page is in use, and none is registered."""
        self._pages = PageAllocator(self.runner.num_pages, self.config.page_size)
        self._kept.clear()

    def _forget(self) -> None:
        """Forget the tokens of all pages. Only frozen samples still have theirs."""
        if self._kept:
            self._pages.forget()
        else:
            self._begin_books()

    def _begin_run(self, samples: Sequence[Sample], params: SamplingParams, rule: StopRule) -> Run:
        """Return a run of the first samples."""
        scheduler = self._make_scheduler(samples, params)
        speculative = self.config.speculative
        drafts = None if speculative.method is None else NgramDrafts(speculative)
        return Run(params, rule, scheduler, Progress(len(samples)), drafts)

    def _make_scheduler(
        self, samples: Sequence[Sample], params: SamplingParams, slots: int = 0
    ) -> Scheduler:
        """Make pages and tables for `samples`, for at least `slots` samples at once."""
        self._room.provide_pages(samples)
        reserved = self._room.reserved
        scheduler = Scheduler(
            samples,
            self._fresh_pages(),
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            refill=max(1, int(self.runner.refill_share * self.config.max_num_seqs)),
            # Keys have other bits when they are computed in another batch, or after the prompt.
            prefix_caching=self.config.enable_prefix_caching and not self.config.deterministic,
            redraw=self.config.deterministic,
            least_slots=max(slots, reserved.sequences),
            least_tokens=reserved.tokens,
            kept=self._kept,
        )
        if self.runner.num_routes:
            ids = torch.empty(0, dtype=self.runner.route_dtype).numpy()
            scheduler.keep_routes(self.runner.num_routes, ids.dtype)

        most_tokens = sum(sample.limit for sample in samples)
        self.runner.begin(params, max(most_tokens, reserved.sequences * reserved.tokens))
        return scheduler

    def _begin_again(self, run: Run, samples: Sequence[Sample]) -> None:
        """Return all samples to the queue, and continue with tables that `samples` fit in, too."""
        try:
            self._drain(run)
            old = run.scheduler
            everyone = [*old.withdraw(), *samples]
            self._begin_books()
            new = self._make_scheduler(everyone, run.params, slots=2 * old.num_slots)
            new.preemptions = old.preemptions
            new.discarded = old.discarded
            new.pages.peak = old.pages.peak
            run.scheduler = new
        except BaseException as error:
            self._abandon(error)
            raise

    def _drain(self, run: Run) -> None:
        """Wait for launched tokens. The next step returns the samples that they finish."""
        while run.flight:
            run.finished += self._steps.collect(run)

    def _abandon(self, error: BaseException) -> None:
        """Drop all requests and give their pages back."""
        if isinstance(error, RolloutError):
            # Keys may be NaN. For the next sample in the page a masked key has weight 0, and 0
            # times NaN is NaN.
            self.runner.release()
        # Not freed one by one: pages are registered before their keys are computed, and an
        # interrupt may have come between the allocation of a page and its record.
        self._begin_books()
        self._end_run()

    def _end_run(self) -> None:
        run = self._run
        assert run is not None
        self._run = None
        scheduler = run.scheduler
        counts = run.counts
        counts["generated_tokens"] -= scheduler.discarded
        seconds = run.progress.seconds
        names = _COUNTS if run.drafts is None else (*_COUNTS, *_DRAFT_COUNTS)

        self._statistics = {
            **{name: float(counts[name]) for name in names},
            "preemptions": float(scheduler.preemptions),
            "peak_pages": float(scheduler.pages.peak),
            "num_pages": float(scheduler.pages.num_pages),
            "generate_s": seconds,
            "memory_gib": (self.twin.copied_bytes + self.runner.kept_bytes) / GIB,
            "capture_s": self.runner.capture_s,
            "tokens_per_s": counts["generated_tokens"] / seconds,
        }


rollout_engines.register("embedded")(EmbeddedEngine)
