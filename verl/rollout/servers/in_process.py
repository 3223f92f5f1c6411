"""vLLM within the run: its front in this process, next to the engine core that it starts itself.

The versions of vLLM, torch and transformers must agree with those of the run. Nothing listens at a
port; all exchanges of `VLLMServer` are calls of vLLM's `AsyncLLM` here.
"""

import asyncio
import atexit
import base64
import importlib
import inspect
import io
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
import torch.distributed as dist
from packaging.version import InvalidVersion, Version

from verl.config.rollout import RolloutConfig
from verl.models.vision import reads_pictures
from verl.rollout.servers.owned import engine_options, engine_variables
from verl.rollout.servers.server import LOAD_S, QUICK_S, WeightSource
from verl.rollout.servers.vllm import VLLMServer, allowed_rank
from verl.rollout.servers.watch import ServerLostError
from verl.utils.devices import ALLOCATOR_SETTINGS, leave_free
from verl.utils.errors import ConfigError, RolloutError, describe_error
from verl.utils.signatures import keywords_of
from verl.utils.watched_http import exchange_here
from verl.weight_sync.vllm_worker import END_WITH, EXTENSION

_SECTION = "actor_rollout_ref.rollout"
# Versions of vLLM whose calls were tested: from the first one up to before the second one.
_TESTED = ("0.24", VLLMServer.untested)
_CLOSE_S = 60.0
_AS_SERVER = (
    f"Or leave out {_SECTION}.in_process: vLLM then runs as a server, and {_SECTION}.server_python "
    "names the interpreter of its own environment."
)
_LESS_MEMORY = (
    f"Next to a trainer, lower {_SECTION}.gpu_memory_utilization, a share of the whole GPU."
)


def check_in_process(config: RolloutConfig) -> None:
    """Raise ConfigError for a setting of servers next to `rollout.in_process`."""
    for name in ("server_urls", "server_python", "server_weights_dir"):
        if getattr(config, name):
            raise ConfigError(
                f"{_SECTION}.in_process=true makes vLLM in the run's own process, and {name}="
                f"{getattr(config, name)} is for servers. Set one of them."
            )
    for name in ("num_servers", "tensor_model_parallel_size"):
        if getattr(config, name) > 1:
            raise ConfigError(
                f"{_SECTION}.in_process=true makes one engine on the device of each rank, got "
                f"{name}={getattr(config, name)}. Set it to 1. {_AS_SERVER}"
            )


def import_vllm() -> Any:
    """Import vLLM. Raises ConfigError if it is missing, does not load, or was not tested."""
    fix = f"pip install 'vllm>={_TESTED[0]},<{_TESTED[1]}', next to the torch that it asks for"
    try:
        vllm = importlib.import_module("vllm")
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"{_SECTION}.in_process=true needs vLLM in the run's own environment, and it cannot be "
            f"imported next to torch {torch.__version__}: {error}. Install it: {fix}. {_AS_SERVER}"
        ) from error

    try:
        release = Version(vllm.__version__).release
    except InvalidVersion:
        return vllm  # a build from source
    first, end = _TESTED
    if not Version(first).release <= release < Version(end).release:
        raise ConfigError(
            f"{_SECTION}.in_process=true was tested with vLLM {first} to before {end}, got "
            f"{vllm.__version__}. Install another one: {fix}. {_AS_SERVER}"
        )
    return vllm


class InProcessVLLM(VLLMServer):
    """A `VLLMServer` without a server: its exchanges are calls on an engine of this process.

    Args:
        config: the settings of the engine; `engine_kwargs.vllm` adds arguments of vLLM's
            `AsyncEngineArgs`.
        model: its folder is loaded.
        dtype: of the weights.
        device: of this rank.
        lora_rank: of the adapters that it draws by; 0: it takes whole weights.
        can_sleep: whether `sleep` gives the memory of the device back.
    """

    way_out = _AS_SERVER

    def __init__(
        self,
        config: RolloutConfig,
        model: Any,
        dtype: torch.dtype,
        device: torch.device,
        *,
        lora_rank: int = 0,
        can_sleep: bool = False,
    ) -> None:
        super().__init__("in-process:vllm", has_vision=reads_pictures(model.config))
        self._vllm = import_vllm()
        self._model = str(model.name_or_path)
        self._can_sleep = can_sleep
        self._is_asleep = False
        self._version = "default"
        self._adapters_by_name: dict[str, Any] = {}
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="verl-vllm", daemon=True).start()
        arguments = self._arguments(config, dtype, lora_rank)
        self._device = device
        self._memory_share: float = arguments["gpu_memory_utilization"]
        self._free_memory()
        with _start_environment(self._model, device):
            try:
                self._engine = self._run(self._start(arguments), config.server_timeout_s)
            except TimeoutError as error:
                raise RolloutError(
                    f"vLLM was not ready in this process within {config.server_timeout_s:.0f} s. "
                    f"{_SECTION}.server_timeout_s sets how long to wait."
                ) from error
        self._calls = self._calls_of_engine(self._engine)
        if lora_rank:
            self._calls["/v1/load_lora_adapter"] = self._load_adapter
            self._calls["/v1/unload_lora_adapter"] = self._unload_adapter
        atexit.register(self.close)
        self.call("/collective_rpc", {"method": END_WITH, "kwargs": {"process": os.getpid()}})

    # ---------------------------------------------------------------- life

    def _arguments(
        self, config: RolloutConfig, dtype: torch.dtype, lora_rank: int
    ) -> dict[str, Any]:
        arguments = {
            "model": self._model,
            **engine_options(config, dtype, dist.get_rank() if dist.is_initialized() else 0),
            "logprobs_mode": "processed_logprobs",
            "worker_extension_cls": EXTENSION,
            "enable_sleep_mode": self._can_sleep,
            "disable_log_stats": True,
        }
        if lora_rank:
            arguments |= {"enable_lora": True, "max_lora_rank": allowed_rank(lora_rank)}
        return arguments | config.engine_kwargs.vllm

    async def _start(self, arguments: Mapping[str, Any]) -> Any:
        """Make the engine, within the loop that it will answer in."""
        engine_args = importlib.import_module("vllm.engine.arg_utils").AsyncEngineArgs
        engine_class = importlib.import_module("vllm.v1.engine.async_llm").AsyncLLM
        unknown = set(arguments) - set(keywords_of(engine_args))
        if unknown:
            raise ConfigError(
                f"vLLM {self._vllm.__version__} has no argument {', '.join(sorted(unknown))}. "
                f"{_SECTION}.engine_kwargs.vllm takes those of its AsyncEngineArgs."
            )

        try:
            return engine_class.from_engine_args(engine_args(**arguments))
        except (RuntimeError, ValueError) as error:
            raise RolloutError(
                f"vLLM did not start in this process: {error} Its log is part of this run's output "
                f"above. {_LESS_MEMORY} {_AS_SERVER}"
            ) from error

    def close(self) -> None:
        """End the engine core."""
        if not self._loop.is_running():
            return

        async def shut_down() -> None:
            self._engine.shutdown()

        atexit.unregister(self.close)
        self._run(shut_down(), _CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)

    def sleep(self) -> None:
        """Give the memory of the device back. Weights are dropped, unless adapters need them."""
        if self._can_sleep and not self._is_asleep:
            level = 1 if self.adapter is not None else 2
            self.call("/sleep", {"level": level}, timeout_s=LOAD_S)
            self._is_asleep = True

    def wake(self) -> None:
        """Take memory for the weights again. `load` fills it, and takes memory for the cache."""
        if self._is_asleep:
            self._take_memory("weights")

    def load(self, source: WeightSource, version: str, *, is_idle: bool = False) -> str | None:
        """Implement `Server.load`."""
        self.map_cache_s = 0.0
        recorded = super().load(source, version, is_idle=is_idle)
        if self._is_asleep:
            started = time.perf_counter()
            self._take_memory("kv_cache")
            self.map_cache_s = time.perf_counter() - started
            self._is_asleep = False
        return recorded

    def _take_memory(self, tag: str) -> None:
        self._free_memory()
        self.call("/wake_up", {"tags": [tag]}, timeout_s=LOAD_S)

    def _free_memory(self) -> None:
        # The engine core, a process of its own, fails where the device has too little for it.
        leave_free(self._memory_share, self._device)

    def refusal(self, path: str, status: int, answer: Any) -> RolloutError:
        """Implement `Server.refusal`."""
        error = super().refusal(path, status, answer)
        if path != "/wake_up":
            return error
        return RolloutError(f"{error} {_LESS_MEMORY}")

    def flush(self, running: bool = False) -> bool:
        """Implement `Server.flush`. vLLM drops all cached prefixes when it falls asleep."""
        return True if self._is_asleep else super().flush(running)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep requests waiting. An engine that sleeps has none, and a pause takes 30 ms."""
        if self._is_asleep:
            yield
            return
        with super().paused():
            yield

    @property
    def can_draw(self) -> bool:
        """Return whether weights and cache are there."""
        return not self._is_asleep

    @property
    def name(self) -> str:
        """Name of the engine in messages."""
        return "vLLM in this process"

    # ---------------------------------------------------------------- exchanges

    def ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float = QUICK_S,
    ) -> tuple[int, Any]:
        """Implement `Server.ask` by a call on the engine."""
        parts = urlsplit(path)
        answer = self._calls.get(parts.path)
        if answer is None:
            return 404, "no such call"

        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        try:
            return 200, self._run(_awaited(answer, {**query, **(body or {})}), timeout_s)
        except TimeoutError as error:
            raise ServerLostError(f"{self.name} gave no answer to {parts.path}: {error}") from error
        except Exception as error:  # vLLM's errors have no common class
            if type(error).__name__ == "EngineDeadError":
                raise RolloutError(
                    f"vLLM's engine core has ended ({error}). Its log is part of this run's output "
                    f"above. Lower {_SECTION}.gpu_memory_utilization or max_num_seqs if memory was "
                    "missing, and start again from the last checkpoint."
                ) from error
            return 500, describe_error(error)

    def _run(self, coroutine: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
        """Wait for a coroutine. Raises TimeoutError if it is late, or the wait is broken off."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        exchange = exchange_here.get()
        if exchange is not None:
            exchange.begin_attempt(_Call(future))
        try:
            return future.result(timeout_s)
        except (futures.TimeoutError, futures.CancelledError) as error:
            future.cancel()
            raise TimeoutError(f"not done within {timeout_s:g} s") from error

    def _calls_of_engine(self, engine: Any) -> dict[str, Callable[[dict[str, Any]], Any]]:
        """Return the function of the request's body that answers each path, awaited or at once."""
        return {
            "/version": lambda _: {"version": self._vllm.__version__},
            "/v1/models": self._models,
            "/tokenize": self._tokens,
            "/inference/v1/generate": self._draw,
            "/abort_requests": lambda body: engine.abort(body["request_ids"]),
            "/pause": lambda body: engine.pause_generation(mode=body["mode"]),
            "/is_paused": self._is_paused_now,
            "/resume": lambda _: engine.resume_generation(),
            "/collective_rpc": self._call_workers,
            "/reset_prefix_cache": self._reset_cache,
            "/reset_encoder_cache": lambda _: engine.reset_encoder_cache(),
            "/sleep": lambda body: engine.sleep(body["level"]),
            "/wake_up": lambda body: engine.wake_up(body["tags"]),
            "/weight_info": lambda _: {"weight_version": self._version},
            "/update_weight_version": self._take_version,
        }

    def _models(self, body: dict[str, Any]) -> Any:
        longest = self._engine.model_config.max_model_len
        own = {"id": self._model, "root": self._model, "max_model_len": longest}
        return {"data": [own, *({"id": name} for name in self._adapters_by_name)]}

    async def _tokens(self, body: dict[str, Any]) -> Any:
        tokenizer = self._engine.get_tokenizer()
        if inspect.isawaitable(tokenizer):
            tokenizer = await tokenizer
        return {"tokens": tokenizer.encode(body["prompt"], add_special_tokens=False)}

    async def _draw(self, body: dict[str, Any]) -> Any:
        kinds = importlib.import_module("vllm.sampling_params")
        params = kinds.SamplingParams(
            **body["sampling_params"], output_kind=kinds.RequestOutputKind.FINAL_ONLY
        )
        request_id = body.get("request_id") or f"verl-{id(params)}"
        named = {}
        if body.get("model") is not None:
            named["lora_request"] = self._adapters_by_name[body["model"]]

        before = self._version
        prompt = {"prompt_token_ids": body["token_ids"]}
        if parts := body.get("content_parts"):
            prompt["multi_modal_data"] = {"image": [_image_of(part) for part in parts]}
        outputs = self._engine.generate(prompt, params, request_id, **named)
        [output] = [each async for each in outputs]
        drawn = output.outputs[0]
        ranked = drawn.logprobs or []  # token -> log-prob, for each place
        places = zip(drawn.token_ids, ranked, strict=False)
        first = ranked[0] if ranked else {}
        choice = {
            "token_ids": list(drawn.token_ids),
            "logprobs": {
                "token_logprobs": [at[token].logprob for token, at in places],
                "top_logprobs": [{token: each.logprob for token, each in first.items()}],
            },
            "finish_reason": drawn.finish_reason,
            "weight_versions": [{"version": before}, {"version": self._version}],
        }
        return {"choices": [choice], "prompt_token_ids": output.prompt_token_ids}

    async def _is_paused_now(self, body: dict[str, Any]) -> Any:
        return {"is_paused": await self._engine.is_paused()}

    async def _call_workers(self, body: dict[str, Any]) -> Any:
        results = await self._engine.collective_rpc(body["method"], kwargs=body["kwargs"])
        return {"results": results}

    async def _reset_cache(self, body: dict[str, Any]) -> Any:
        running = "reset_running_requests" in body
        done = await self._engine.reset_prefix_cache(reset_running_requests=running)
        return {"success": done}

    def _take_version(self, body: dict[str, Any]) -> None:
        self._version = body["new_version"]

    async def _load_adapter(self, body: dict[str, Any]) -> None:
        lora = importlib.import_module("vllm.lora.request")
        number = 1 + max((each.lora_int_id for each in self._adapters_by_name.values()), default=0)
        request = lora.LoRARequest(body["lora_name"], number, body["lora_path"])
        await self._engine.add_lora(request)
        self._adapters_by_name[body["lora_name"]] = request

    async def _unload_adapter(self, body: dict[str, Any]) -> None:
        request = self._adapters_by_name.pop(body["lora_name"])
        await self._engine.remove_lora(request.lora_int_id)


class _Call:
    """A call on the engine, as a wait that the watch over it can break off."""

    def __init__(self, future: futures.Future[Any]) -> None:
        self._future = future

    def break_off(self) -> None:
        """Implement `Breakable.break_off`."""
        self._future.cancel()


def _image_of(part: Mapping[str, str]) -> Any:
    """Return the image that a `data_url` holds."""
    from PIL import Image  # a run without pictures does without it

    _, _, encoded = part["url"].partition(",")
    return Image.open(io.BytesIO(base64.b64decode(encoded)))


async def _awaited(answer: Callable[[dict[str, Any]], Any], body: dict[str, Any]) -> Any:
    found = answer(body)
    return await found if inspect.isawaitable(found) else found


@contextmanager
def _start_environment(model: str, device: torch.device) -> Iterator[None]:
    """Set the variables that processes of vLLM inherit, for as long as it starts them."""
    variables = {
        **engine_variables(model),
        **os.environ,
        # A fork would inherit the trainer's threads and CUDA context.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        visible = variables.get("CUDA_VISIBLE_DEVICES")
        variables["CUDA_VISIBLE_DEVICES"] = visible.split(",")[index] if visible else str(index)
        # Memory that sleeps has a pool of its own, which cannot have segments that grow.
        for name in ("PYTORCH_ALLOC_CONF", ALLOCATOR_SETTINGS):
            if "expandable_segments" in variables.get(name, ""):
                del variables[name]

    before = dict(os.environ)
    main = sys.modules["__main__"]
    _make_environment(variables)
    # The processes would otherwise run the user's script once more, to know its classes.
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        _make_environment(before)


def _make_environment(variables: Mapping[str, str]) -> None:
    """Give this process exactly these variables."""
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)
