"""A rollout engine of servers: it sends requests, and keeps what a server may lose."""

import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from verl.config.rollout import RolloutConfig
from verl.models.vision import reads_pictures
from verl.rollout.base import Capabilities, EngineClass, rollout_engines
from verl.rollout.checks import refuse_running, response_limits
from verl.rollout.memory import EngineLoad, EngineMemory
from verl.rollout.sampling import sample_keys
from verl.rollout.servers.fleet import Fleet, Member, Placement
from verl.rollout.servers.health import (
    check_log_probs,
    check_pictures,
    check_server,
    check_service,
    check_settings,
)
from verl.rollout.servers.in_process import InProcessVLLM
from verl.rollout.servers.owned import OwnedServers
from verl.rollout.servers.probe import Probe
from verl.rollout.servers.server import Draw, Drawn, Server, ServerLostError
from verl.rollout.servers.sglang import SGLangServer
from verl.rollout.servers.sources import WeightSources, adapter_rank
from verl.rollout.servers.vllm import VLLMServer
from verl.rollout.twin import engine_dtype
from verl.rollout.types import Completion, Request, SamplingParams
from verl.utils.errors import RolloutError
from verl.utils.logging import logger
from verl.weight_sync.base import NamedTensors
from verl.weight_sync.fingerprint import Fingerprint

_WAIT_S = 0.002  # of a step without a completion: agents get their turn in between
_ABORT_S = 60.0
_ABORT_AGAIN_S = 1.0
_MOST_ATTEMPTS = 10
_NO_TOKENS = Drawn(token_ids=[], log_probs=[], finish_reason="abort")


@dataclass(eq=False)
class _Sample:
    """A sample on its way."""

    sample_id: int
    draw: Draw
    member: Member | None = None
    has_begun: bool = False  # a thread has taken it
    is_aborted: bool = False


class ServerEngine(EngineClass):
    """A `RolloutEngine` whose samples are drawn by servers, which have their own weights.

    A sample whose server ends is drawn again, with the same seed, by another server or by the same
    one after its restart. Before a generation every server must have the version of the weights
    that was pushed last; one that lost it (a restart) gets the weights again.

    Statistics: prefill_tokens, generated_tokens, generate_s, tokens_per_s, num_redrawn,
    update_weights_s, update_weights_gb_per_s, and map_cache_s for an engine that slept: the time to
    take memory for its cache again, which is not part of update_weights_s.
    """

    capabilities = Capabilities(external=True, tensor_parallel=True)
    server_class: ClassVar[type[Server]]

    @classmethod
    def check(cls, config: RolloutConfig) -> None:
        """Implement `EngineClass.check`."""
        super().check(config)
        check_settings(config)

    @classmethod
    def check_model(cls, config: RolloutConfig, model: PreTrainedConfig, *, on_cuda: bool) -> None:
        """Implement `EngineClass.check_model`."""
        check_pictures(cls.server_class, config, model)

    @classmethod
    def check_service(cls, config: RolloutConfig) -> None:
        """Raise RolloutError or ConfigError if no server can be used, or none be started."""
        check_service(cls.server_class, config)

    @classmethod
    def plan(cls, config: RolloutConfig, load: EngineLoad) -> EngineMemory:
        """Implement `EngineClass.plan`: servers have memory of their own, in process it is a share."""
        share = load.share if config.in_process else None
        return EngineMemory(page_tokens=0, pages_a_sample=1, pages=load.samples, working=share or 0)

    def __init__(
        self, *, model: PreTrainedModel, tokenizer: Any, config: RolloutConfig, device: torch.device
    ) -> None:
        self.keep_model(model, tokenizer, config)
        self.model = model
        self._dtype = engine_dtype(config.dtype, model, device)
        self.sources = WeightSources(config=config, model=model, device=device, dtype=self._dtype)
        self._lora_rank = adapter_rank(config, self.server_class, model)
        self.can_sleep = config.in_process and config.free_cache_engine and device.type == "cuda"
        self.draws_alone = False  # whether no other rank draws on the servers of this one
        self._device = device
        self._fleet: Fleet | None = None
        self._pushes = 0
        self._run_name = secrets.token_hex(4)
        self._probe = Probe(
            config=config,
            tokenizer=tokenizer,
            vocabulary=self.vocabulary,
            run_name=self._run_name,
        )

        self._started_here: OwnedServers | InProcessVLLM | None = None
        self._waiting: SimpleQueue[_Sample | None] = SimpleQueue()  # None ends a thread
        self._num_threads = 0
        self._samples: dict[int, _Sample] = {}
        self._ended: SimpleQueue[tuple[_Sample, Drawn | BaseException]] = SimpleQueue()
        self._calls = 0
        self._started = 0.0
        self._counts: Counter[str] = Counter()
        self._hand_over: dict[str, float] = {}

    # ---------------------------------------------------------------- servers

    def open(self) -> tuple[str, ...]:
        """Find or start the servers, on one rank. Return their addresses for `join`.

        In process, every rank starts an engine of its own, which has no address. Each must draw
        tokens of the configured model, with log-probs in our definition.
        """
        owned = None
        urls = tuple(self.config.server_urls)
        if self.config.in_process:
            self._use([self._start_in_process()])
        elif urls:
            self.join(urls)
        else:
            owned = self._started_here = OwnedServers(
                self.server_class, self.config, self.model, self._dtype, lora_rank=self._lora_rank
            )
            urls = owned.urls
            self.join(urls, owned)

        for member in self.fleet.members:
            check_server(
                member.server,
                self.model,
                self.tokenizer,
                self.max_model_len,
                allow_untested=self.config.allow_untested_servers,
            )
            if self.takes_adapters:
                member.server.check_adapters(self._lora_rank)
            check_log_probs(member.server, self.config, self._probe.prompt_ids)

        if self.config.seed_samples and self._device.type == "cuda":
            logger.info(
                "%s draws each sample by a seed of its own, so that the run repeats. It draws "
                "faster with actor_rollout_ref.rollout.seed_samples=False.",
                self.server_class.title,
            )
        return urls

    def join(self, urls: Sequence[str], owned: OwnedServers | None = None) -> None:
        """Use the servers at `urls`."""
        has_vision = reads_pictures(self.model.config)
        self._use([self.server_class(url, has_vision=has_vision) for url in urls], owned)

    def _use(self, servers: Sequence[Server], owned: OwnedServers | None = None) -> None:
        for server in servers:
            server.is_owned = owned is not None or self.config.in_process
        members = [Member(server) for server in servers]
        self._fleet = Fleet(members, self.config.server_timeout_s, owned, self._probe.draw)

    def _start_in_process(self) -> Server:
        if self.config.free_cache_engine and not self.can_sleep:
            logger.info("vLLM keeps its memory while training: it sleeps on CUDA alone.")
        parts = (self.config, self.model, self._dtype, self._device)
        server = self._started_here = InProcessVLLM(
            *parts, lora_rank=self._lora_rank, can_sleep=self.can_sleep
        )
        return server

    def close(self) -> None:
        """Implement `RolloutEngine.close`. Servers that the user has started go on."""
        while self._num_threads:
            self._num_threads -= 1
            self._waiting.put(None)
        if self._started_here is not None:
            self._started_here.close()

    @property
    def fleet(self) -> Fleet:
        """The servers."""
        if self._fleet is None:
            self.open()
        assert self._fleet is not None
        return self._fleet

    @property
    def has_work(self) -> bool:
        """Implement `RolloutEngine.has_work`."""
        return bool(self._samples)

    # ---------------------------------------------------------------- samples

    def submit(
        self, requests: Sequence[Request], params: SamplingParams, *, seed: int, step: int
    ) -> None:
        """Add requests; see `RolloutEngine.submit`."""
        rule = self.check_call(requests, params)
        refuse_running(requests, self._samples)
        stop_ids = tuple(rule.token_ids.tolist())

        if not self.has_work:
            self._begin()
        self._calls += 1

        for request in requests:
            ids = np.array(request.sample_ids, np.int64)
            keys = sample_keys(seed, step, ids).tolist()
            limits = response_limits(request, params, self.max_model_len)
            for sample_id, key, limit in zip(request.sample_ids, keys, limits):
                draw = Draw(
                    request_id=f"{self._run_name}-{self._calls}-{sample_id}",
                    prompt_ids=request.prompt_ids,
                    params=params,
                    limit=limit,
                    seed=key if self.config.seed_samples else None,
                    stop_token_ids=stop_ids,
                    pictures=request.pictures,
                )
                sample = _Sample(sample_id, draw)
                self._samples[sample_id] = sample
                self._counts["prefill_tokens"] += len(request.prompt_ids)
                self._waiting.put(sample)

        self._start_threads()

    def step(self) -> list[Completion]:
        """Wait a moment for completions; see `RolloutEngine.step`."""
        completions = []
        timeout = _WAIT_S
        while self._samples:
            try:
                sample, outcome = self._ended.get(timeout=timeout)
            except Empty:
                break

            timeout = 0.0
            if self._samples.get(sample.sample_id) is not sample:
                continue  # given up since
            del self._samples[sample.sample_id]
            if isinstance(outcome, BaseException):
                self.abort()
                raise outcome
            self._counts["generated_tokens"] += len(outcome.token_ids)
            completions.append(outcome.completion(sample.sample_id))

        if completions and not self._samples:
            self.fleet.check_unnamed()
        return completions

    def abort(self, sample_ids: Iterable[int] | None = None) -> list[Completion]:
        """Abort samples; see `RolloutEngine.abort`. The servers return their tokens so far."""
        wanted = set(self._samples)
        if sample_ids is not None:
            wanted &= set(sample_ids)
        stopping = [self._samples[sample_id] for sample_id in sorted(wanted)]
        for sample in stopping:
            sample.is_aborted = True

        # The thread that takes one of the others later finds it aborted, and draws nothing.
        outcomes = self._await([sample for sample in stopping if sample.has_begun])
        completions = []
        for sample in stopping:
            drawn = outcomes.get(sample.sample_id, _NO_TOKENS)
            if isinstance(drawn, BaseException):
                drawn = _NO_TOKENS
            completion = drawn.completion(sample.sample_id)
            completions.append(replace(completion, finish_reason="abort"))
            self._samples.pop(sample.sample_id, None)
        return completions

    def _await(self, stopping: Sequence[_Sample]) -> dict[int, Drawn | BaseException]:
        """Abort samples, and collect their outcomes. Those of others go back to the queue."""
        outcomes: dict[int, Drawn | BaseException] = {}
        others = []
        missing = {sample.sample_id: sample for sample in stopping}
        deadline = time.monotonic() + _ABORT_S
        next_abort = time.monotonic()
        while missing and time.monotonic() < deadline:
            # More than once: a server forgets an abort that comes before its request.
            if time.monotonic() >= next_abort:
                self._abort_on_servers(missing.values())
                next_abort = time.monotonic() + _ABORT_AGAIN_S

            try:
                sample, outcome = self._ended.get(timeout=0.1)
            except Empty:
                continue
            if self._samples.get(sample.sample_id) is not sample:
                continue
            if missing.pop(sample.sample_id, None) is not None:
                outcomes[sample.sample_id] = outcome
            else:
                others.append((sample, outcome))

        for each in others:
            self._ended.put(each)
        return outcomes

    def _abort_on_servers(self, samples: Iterable[_Sample]) -> None:
        running: dict[Member, list[str]] = {}
        for sample in samples:
            member = sample.member
            if member is not None:
                running.setdefault(member, []).append(sample.draw.request_id)
        for member, request_ids in running.items():
            try:
                member.server.abort(request_ids)
            except ServerLostError as error:
                logger.warning("%s", error)

    def _start_threads(self) -> None:
        """Have a thread for each sample at work, up to max_num_seqs; others wait for one."""
        wanted = min(len(self._samples), self.config.max_num_seqs)
        while self._num_threads < wanted:
            self._num_threads += 1
            # A daemon: a draw without an answer must not keep a failed run from ending.
            threading.Thread(target=self._work, name="verl-server", daemon=True).start()

    def _work(self) -> None:
        while (sample := self._waiting.get()) is not None:
            outcome: Drawn | BaseException
            try:
                outcome = self._draw(sample)
            except BaseException as error:  # noqa: BLE001 - `step` raises it in its own thread
                outcome = error
            self._ended.put((sample, outcome))

    def _draw(self, sample: _Sample) -> Drawn:
        sample.has_begun = True  # before it reads `is_aborted`, which `abort` writes first
        first = sample.draw
        for attempt in range(_MOST_ATTEMPTS):
            if sample.is_aborted:
                return _NO_TOKENS
            # A server that was lost may still be at work on the attempt before, under its name.
            sample.draw = replace(first, request_id=f"{first.request_id}-{attempt}")
            placement = Placement(sample.draw.prompt_ids, sample.draw.limit)
            with self.fleet.chosen(placement) as member:
                sample.member = member
                try:
                    drawn = self._draw_on(member, sample.draw)
                finally:
                    sample.member = None

            # Another's push may abort it, too.
            if drawn is not None and (drawn.finish_reason != "abort" or sample.is_aborted):
                drawn.require_whole(sample.draw.limit)
                return drawn
            self._counts["num_redrawn"] += 1
        raise RolloutError(
            f"Sample {sample.sample_id} was drawn {_MOST_ATTEMPTS} times, and its server ended, "
            "aborted it or changed its weights every time. Look into the server's log."
        )

    def _draw_on(self, member: Member, draw: Draw) -> Drawn | None:
        """Draw a sample; None: the server ended, or drew it by other weights."""
        try:
            return self.fleet.draw_current(member, lambda server: server.draw(draw))
        except ServerLostError as error:
            self.fleet.note_lost(member, error)
            return None

    def _begin(self) -> None:
        """Begin a generation: every server that answers has the weights of the last push."""
        self.fleet.check_versions()
        self._started = time.perf_counter()
        self._counts = Counter()

    # ---------------------------------------------------------------- weights

    @property
    def weight_dtype(self) -> torch.dtype:
        """Implement `WeightTaker.weight_dtype`."""
        return self._dtype

    def weight_place(self, name: str) -> None:
        """Implement `WeightTaker.weight_place`: no tensor of a server can be written into."""

    def weight_fingerprints(self) -> Mapping[str, Fingerprint]:
        """Refuse: servers do not show their tensors; `probe` is the proof."""
        raise NotImplementedError

    @property
    def takes_adapters(self) -> bool:
        """Return whether servers take LoRA adapters alone, by `update_adapters`."""
        return self._lora_rank > 0

    def update_weights(self, named_tensors: NamedTensors) -> None:
        """Push weights to all servers; see `RolloutEngine.update_weights`."""
        num_bytes = self.model.num_parameters() * self._dtype.itemsize
        with self._pushing(num_bytes) as version:
            source = self.sources.of_tensors(named_tensors, version)
            self.fleet.push(source, version, is_idle=self._is_idle)

    def update_adapters(self, state: dict[str, torch.Tensor]) -> None:
        """Push LoRA adapters (`adapter_state`) to all servers. All else stays as they loaded it."""
        num_bytes = sum(tensor.nbytes for tensor in state.values())
        with self._pushing(num_bytes) as version:
            source = self.sources.of_adapters(state, version)
            self.fleet.push(source, version, is_idle=self._is_idle)

    @property
    def _is_idle(self) -> bool:
        """Return whether no request is on the servers: the run started them, and has no sample."""
        is_own = self.draws_alone and not self.config.server_urls
        return is_own and not self.has_work and self.fleet.is_idle

    @contextmanager
    def _pushing(self, num_bytes: int) -> Iterator[str]:
        """Give the version of a push, and measure the push."""
        started = time.perf_counter()
        self._pushes += 1
        yield f"verl-{self._run_name}-{self._pushes}"
        mapping = sum(member.server.map_cache_s for member in self.fleet.members)
        seconds = time.perf_counter() - started - mapping
        per_s = num_bytes / seconds / 1e9
        self._hand_over = {"update_weights_s": seconds, "update_weights_gb_per_s": per_s}
        if self.can_sleep:
            self._hand_over["map_cache_s"] = mapping

    def probe(self) -> dict[str, Completion]:
        """Draw the same few tokens on every server that can, with the settings of training.

        Returns the draws by server's name.
        """
        completions = {}
        for number, (name, drawn) in enumerate(self.fleet.probe_each().items()):
            completions[name] = drawn.completion(number)
        return completions

    def probe_prompt(self) -> tuple[int, ...]:
        """Return the prompt of `probe`."""
        return self._probe.prompt_ids

    # ---------------------------------------------------------------- the rest

    def sleep(self) -> None:
        """Implement `RolloutEngine.sleep`. Engines in process alone give memory back."""
        if self.can_sleep:
            for member in self.fleet.members:
                member.server.sleep()

    def wake(self) -> None:
        """Implement `RolloutEngine.wake`. Weights must come before anything is drawn."""
        if self.can_sleep:
            for member in self.fleet.members:
                member.server.wake()

    def forget_prefixes(self) -> None:
        """Implement `RolloutEngine.forget_prefixes`. Servers at work for other ranks keep them."""
        self.fleet.flush()

    def statistics(self) -> dict[str, float]:
        """Return the counters of this generation, which the class lists."""
        seconds = max(time.perf_counter() - self._started, 1e-9)
        return {
            "prefill_tokens": float(self._counts["prefill_tokens"]),
            "generated_tokens": float(self._counts["generated_tokens"]),
            "num_redrawn": float(self._counts["num_redrawn"]),
            "generate_s": seconds,
            "tokens_per_s": self._counts["generated_tokens"] / seconds,
            **self._hand_over,
        }


@rollout_engines.register("vllm")
class VLLMEngine(ServerEngine):
    """Servers of vLLM, or vLLM in process."""

    capabilities = replace(ServerEngine.capabilities, adapters=True, in_process=True)
    server_class = VLLMServer


@rollout_engines.register("sglang")
class SGLangEngine(ServerEngine):
    """Servers of SGLang."""

    server_class = SGLangServer
