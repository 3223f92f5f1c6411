"""The contract of a rollout engine: its verbs, the facts that its class declares, the registry."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, Protocol

from transformers import PreTrainedConfig, PreTrainedModel

from verl.config.rollout import RolloutConfig
from verl.rollout.checks import (
    check_params,
    check_pictures,
    check_requests,
    longest_sequence,
    refuse_running,
)
from verl.rollout.memory import EngineLoad, EngineMemory, paged_memory
from verl.rollout.stopping import StopRule, end_of_sequence_ids
from verl.rollout.types import Completion, Request, Room, SamplingParams
from verl.utils.errors import ConfigError, RolloutError
from verl.utils.registry import Registry
from verl.weight_sync import WeightTaker

_SECTION = "actor_rollout_ref.rollout"


class RolloutEngine(WeightTaker, Protocol):
    """Turns requests into completions. Requests may come at any time.

    The engine owns its KV cache. Where its dtype and layout agree with the trainer's, its weights
    alias them; otherwise it owns copies at stable addresses. Between `sleep` and `wake` no page and
    no weight copy stays on the device, and `submit` raises EngineAsleepError. Completions come as
    they finish, each sample exactly once.
    """

    @property
    def has_work(self) -> bool:
        """Return whether some submitted sample has not been returned yet."""
        ...

    def reserve(self, room: Room) -> None:
        """Expect requests that come one by one, up to `room` together. Changes no token.

        Requests beyond it are served as well. Engines without tables of their own ignore it.
        """
        ...

    def submit(
        self, requests: Sequence[Request], params: SamplingParams, *, seed: int, step: int
    ) -> None:
        """Add requests to those that run.

        The noise of a sample depends on (seed, step, sample id, position) alone. If any request
        cannot be served, raises RolloutError and adds none of them.
        """
        ...

    def step(self) -> list[Completion]:
        """Work for a while. Return the samples that have ended, often none."""
        ...

    def abort(self, sample_ids: Iterable[int] | None = None) -> list[Completion]:
        """Abort some samples, or all of them.

        Returns each with the tokens drawn so far (maybe none), their log-probs, and the finish
        reason "abort". Ignores the ids of samples that are not running.
        """
        ...

    def sleep(self) -> None:
        """Give the device memory back for training."""
        ...

    def wake(self) -> None:
        """Make `submit` possible again."""
        ...

    def forget_prefixes(self) -> None:
        """Drop the cached keys of earlier prompts.

        A resumed run starts without them. It draws the same tokens as an uninterrupted run only if
        that run drops them, too.
        """
        ...

    def close(self) -> None:
        """End processes and threads that the engine has started; it is not used afterwards."""
        ...

    def statistics(self) -> dict[str, float]:
        """Return counters since the engine last began to work.

        Examples are prefill_tokens, decode_steps, preemptions and peak_pages.
        """
        ...


# ---------------------------------------------------------------- declared facts


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Features of an engine class that other rooms read before an engine exists.

    A registered factory without an attribute `capabilities` has these defaults.
    """

    deterministic: bool = False  # honors rollout.deterministic: bits do not depend on the batch
    tensor_parallel: bool = False  # ranks can share an engine, which takes them as `ranks`
    drafts: bool = False  # verifies drafted tokens (rollout.speculative)
    quantization: bool = False  # rounds its weights to eight bits (rollout.quantization)
    quantized_cache: bool = False  # keeps keys and values in eight bits (rollout.kv_cache_dtype)
    routed_experts: bool = False  # completions can name the experts that their tokens visited
    aliases_weights: bool = False  # on a CPU it can compute with the trainer's own tensors
    continues: bool = False  # goes on with samples that `abort` has ended (`Continuation`)
    adapters: bool = False  # draws by LoRA adapters on top of weights that stay
    in_process: bool = False  # a server that can also run within the run (rollout.in_process)
    # computes in servers: needs no module with weights here, and one rank feeds those of all
    external: bool = False


class EngineClass:
    """Base of engine classes: the facts that a class declares about its engines, with defaults."""

    capabilities: ClassVar[Capabilities] = Capabilities()

    def keep_model(self, model: PreTrainedModel, tokenizer: Any, config: RolloutConfig) -> None:
        """Keep what every engine reads of its model and settings."""
        self.config = config
        self.tokenizer = tokenizer
        self.eos_ids = end_of_sequence_ids(model, tokenizer)
        self.max_model_len = longest_sequence(config, model)
        embeddings: Any = model.get_input_embeddings()
        self.vocabulary: int = embeddings.num_embeddings
        self._model_config = model.config

    def check_call(self, requests: Sequence[Request], params: SamplingParams) -> StopRule:
        """Check requests. Return the rule that ends their responses."""
        check_params(params)
        check_pictures(requests, self._model_config)
        check_requests(requests, max_model_len=self.max_model_len, vocabulary=self.vocabulary)
        if not self.capabilities.continues:
            for request in requests:
                if request.continuations is not None:
                    raise RolloutError(
                        f"The engine '{self.config.name}' cannot continue samples by the same "
                        f"noise. Set {_SECTION}.name=embedded."
                    )
        return StopRule(params, self.eos_ids, self.tokenizer)

    def reserve(self, room: Room) -> None:
        """Implement `RolloutEngine.reserve`. Without tables of a fixed size this does nothing."""

    def close(self) -> None:
        """Implement `RolloutEngine.close`. An engine within this process has started nothing."""

    @property
    def is_ready(self) -> bool:
        """Return whether `step` would not wait for a device; agents go on until then."""
        return True

    @classmethod
    def check(cls, config: RolloutConfig) -> None:
        """Raise ConfigError for a setting that the engine does not support."""
        check_capabilities(config, cls.capabilities)

    @classmethod
    def check_model(cls, config: RolloutConfig, model: PreTrainedConfig, *, on_cuda: bool) -> None:
        """Raise ConfigError for a model that the engine does not support. Reads no weights."""

    @classmethod
    def check_service(cls, config: RolloutConfig) -> None:
        """Raise an error if a service that the engine needs does not answer."""

    @classmethod
    def plan(cls, config: RolloutConfig, load: EngineLoad) -> EngineMemory:
        """Return the memory terms of the engine; by default those of a paged cache."""
        return paged_memory(config, load)


# name -> engine class or factory, called with model, tokenizer, config (the rollout's) and device,
# and with `ranks` where several share the engine
rollout_engines: Registry[Callable[..., RolloutEngine]] = Registry(
    "rollout engine (actor_rollout_ref.rollout.name)"
)


def capabilities_of(name: str) -> Capabilities:
    """Return the capabilities that the engine registered under `name` declares."""
    return _declared(name, "capabilities")


def check_engine(config: RolloutConfig) -> None:
    """Raise ConfigError for an unknown engine, or a setting that the engine does not support."""
    own_check = getattr(rollout_engines.get(config.name), "check", None)
    if own_check is not None:
        own_check(config)
    else:
        check_capabilities(config, capabilities_of(config.name))


def check_engine_model(config: RolloutConfig, model: PreTrainedConfig, *, on_cuda: bool) -> None:
    """Raise ConfigError for a model that the engine does not support. Reads no weights."""
    _declared(config.name, "check_model")(config, model, on_cuda=on_cuda)


def check_engine_service(config: RolloutConfig) -> None:
    """Raise an error if a service that the engine needs does not answer. Waits for the network."""
    _declared(config.name, "check_service")(config)


def plan_engine(config: RolloutConfig, load: EngineLoad) -> EngineMemory:
    """Return the memory terms of the engine that `config` names."""
    return _declared(config.name, "plan")(config, load)


class _Need(NamedTuple):
    """A setting that only engines with a capability take."""

    key: str  # within the section
    free: tuple[Any, ...]  # values that every engine takes; the first is the way out
    capability: str
    needs: str  # such an engine
    note: str = ""  # a further way out


_NEEDS = (
    _Need("in_process", (False,), "in_process", "is for engines that are otherwise servers"),
    _Need(
        "deterministic",
        (False,),
        "deterministic",
        "needs an engine that computes each sample independently of its batch",
    ),
    _Need(
        "enable_rollout_routing_replay",
        (False,),
        "routed_experts",
        "needs an engine that records the experts of its tokens",
    ),
    _Need("lora_weights", (None, "merged"), "adapters", "needs an engine that draws by adapters"),
    _Need("speculative.method", (None,), "drafts", "needs an engine that verifies drafted tokens"),
    _Need(
        "quantization",
        (None,),
        "quantization",
        "needs an engine that rounds its weights at each hand-over",
        f"; vLLM servers take a flag of their own in {_SECTION}.engine_kwargs.vllm",
    ),
    _Need(
        "kv_cache_dtype",
        ("auto",),
        "quantized_cache",
        "needs an engine that rounds keys and values when it stores them",
        f"; servers take a flag of their own in {_SECTION}.engine_kwargs",
    ),
    _Need(
        "tensor_model_parallel_size",
        (1,),
        "tensor_parallel",
        "needs an engine that ranks can share",
    ),
)


def check_capabilities(config: RolloutConfig, capabilities: Capabilities) -> None:
    """Raise ConfigError for a setting that needs a capability which is missing."""
    if (config.server_urls or config.server_python is not None) and not capabilities.external:
        raise ConfigError(
            f"{_SECTION}.server_urls={config.server_urls} and server_python="
            f"{config.server_python} are for engines that are servers, got {_SECTION}.name="
            f"{config.name}. Set {_names_with('external')}leave them out."
        )
    drafts = config.speculative
    if drafts.prompt_lookup_min > drafts.prompt_lookup_max:
        raise ConfigError(
            f"{_SECTION}.speculative.prompt_lookup_min must be at most prompt_lookup_max, got "
            f"{drafts.prompt_lookup_min} and {drafts.prompt_lookup_max}. Lower the first."
        )

    for key, free, capability, needs, note in _NEEDS:
        value = attrgetter(key)(config)
        if value in free or getattr(capabilities, capability):
            continue
        raise ConfigError(
            f"{_SECTION}.{key}={_as_written(value)} {needs}, got {_SECTION}.name={config.name}. "
            f"Set {_names_with(capability)}{key}={_as_written(free[0])}{note}."
        )


def _as_written(value: Any) -> str:
    """Return a value as a configuration has it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _declared(name: str, fact: str) -> Any:
    """Return an attribute of the registered class or factory, or the default of `EngineClass`."""
    return getattr(rollout_engines.get(name), fact, getattr(EngineClass, fact))


def _names_with(capability: str) -> str:
    """Return the engines with a capability as the beginning of a way out: "name=embedded, or "."""
    names = []
    for name in sorted(rollout_engines):
        if getattr(capabilities_of(name), capability):
            names.append(f"name={name}, or ")
    return "".join(names)


# ---------------------------------------------------------------- the loop


class Completions(Iterator[Completion]):
    """Steps an engine until it has no work. Closing it early aborts the unfinished samples."""

    def __init__(self, engine: RolloutEngine, sample_ids: Iterable[int]) -> None:
        self._engine = engine
        self._unfinished = set(sample_ids)
        self._finished: deque[Completion] = deque()

    def __next__(self) -> Completion:
        try:
            while not self._finished:
                if not self._engine.has_work:
                    self._unfinished.clear()
                    raise StopIteration
                completions = self._engine.step()
                self._finished.extend(completions)
                self._unfinished.difference_update(each.sample_id for each in completions)
        except BaseException:
            # Here and not at its deletion, which may come while the engine runs other samples.
            self.close()
            raise
        return self._finished.popleft()

    def close(self) -> None:
        """Abort the unfinished samples alone; the engine may run others by now."""
        if self._unfinished:
            self._engine.abort(self._unfinished)
            self._unfinished = set()
        self._finished.clear()

    __del__ = close


def generate(
    engine: RolloutEngine,
    requests: Sequence[Request],
    params: SamplingParams,
    *,
    seed: int,
    step: int,
) -> Completions:
    """Sample every request with an idle engine. Return completions as they finish.

    Raises RolloutError at once for a request that cannot be served.
    """
    refuse_while_busy(engine)
    engine.submit(requests, params, seed=seed, step=step)
    sample_ids: list[int] = []
    for request in requests:
        sample_ids += request.sample_ids
    return Completions(engine, sample_ids)


def refuse_while_busy(engine: RolloutEngine) -> None:
    """Raise RolloutError if an engine has work."""
    if engine.has_work:
        raise RolloutError(
            "A generate() of this engine is not finished; exhaust or close its iterator first."
        )


class OptionalVerbs:
    """Adds the verbs of a `RolloutEngine` that change no token, where an engine leaves them out."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def reserve(self, room: Room) -> None:
        """Implement `RolloutEngine.reserve`, which only an engine with tables needs."""
        reserve = getattr(self._engine, "reserve", None)
        if reserve is not None:
            reserve(room)

    def forget_prefixes(self) -> None:
        """Implement `RolloutEngine.forget_prefixes`, which only a cache of prefixes needs."""
        forget = getattr(self._engine, "forget_prefixes", None)
        if forget is not None:
            forget()


class GenerateOnly(OptionalVerbs):
    """The verbs of a `RolloutEngine` on top of an engine that has `generate` alone.

    Requests of one `submit` are one call of `generate`, begun when the calls before it have ended.
    The tokens drawn so far of an aborted sample are not known, so it comes back empty.
    """

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        # with the ids of their samples
        self._calls: deque[tuple[Iterator[Completion], set[int]]] = deque()
        self._unfinished: set[int] = set()
        self._aborted: set[int] = set()  # of the calls that run

    @property
    def has_work(self) -> bool:
        return bool(self._calls)

    def submit(
        self, requests: Sequence[Request], params: SamplingParams, *, seed: int, step: int
    ) -> None:
        """Implement `RolloutEngine.submit`."""
        refuse_running(requests, self._unfinished)
        if not self._calls:
            self._aborted.clear()
        call = self._engine.generate(requests, params, seed=seed, step=step)
        if not isinstance(call, Iterable):
            raise RolloutError(
                "An engine's generate must return an iterable of verl.rollout.Completion objects, "
                f"got {type(call).__name__}. Yield one for each sample id of the requests."
            )

        sample_ids: set[int] = set()
        for request in requests:
            sample_ids.update(request.sample_ids)
        self._calls.append((iter(call), sample_ids))
        self._unfinished |= sample_ids

    def step(self) -> list[Completion]:
        """Implement `RolloutEngine.step`."""
        while self._calls:
            call, sample_ids = self._calls[0]
            try:
                completion = next(call)
            except StopIteration:
                self._calls.popleft()
                self._require_all(sample_ids)
                continue
            if not isinstance(completion, Completion):
                raise RolloutError(
                    "An engine's generate must give verl.rollout.Completion objects, got "
                    f"{type(completion).__name__}."
                )

            sample_id = completion.sample_id
            if sample_id in self._unfinished:
                self._unfinished.discard(sample_id)
                return [completion]
            if sample_id not in self._aborted:
                raise RolloutError(
                    f"The engine returned sample {sample_id}, which was not asked for, or a second "
                    "time; each is due exactly once."
                )
        return []

    def _require_all(self, sample_ids: set[int]) -> None:
        """Raise RolloutError if a call that has ended left some of its samples out."""
        missing = sample_ids & self._unfinished
        if missing:
            self._unfinished -= missing
            shown = ", ".join(map(str, sorted(missing)[:5]))
            raise RolloutError(
                f"The engine's generate ended without {len(missing)} of {len(sample_ids)} samples: "
                f"{shown}. It must give a Completion for each sample id of its requests."
            )

    def abort(self, sample_ids: Iterable[int] | None = None) -> list[Completion]:
        """Implement `RolloutEngine.abort`."""
        wanted = set(self._unfinished)
        if sample_ids is not None:
            wanted &= set(sample_ids)

        self._unfinished -= wanted
        self._aborted |= wanted
        if not self._unfinished:
            self._calls.clear()
        return [Completion.not_begun(sample_id) for sample_id in sorted(wanted)]
