"""A module `vllm` with the calls of its `AsyncLLM` that are used in process, over a `FakeServer`."""

import asyncio
import base64
import io
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.rollout.servers.fake import FakeServer
from verl.weight_sync.vllm_worker import END_WITH


class EngineDeadError(Exception):
    """Raised by calls on an engine whose core has ended."""


@dataclass
class AsyncEngineArgs:
    model: str
    dtype: str
    max_model_len: int
    tensor_parallel_size: int
    gpu_memory_utilization: float
    max_num_seqs: int
    max_num_batched_tokens: int
    enforce_eager: bool
    logprobs_mode: str
    worker_extension_cls: str
    enable_sleep_mode: bool
    disable_log_stats: bool
    enable_lora: bool = False
    max_lora_rank: int = 16
    swap_space: float = 4


@dataclass
class SamplingParams:
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: Any = None
    stop_token_ids: Any = None
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    logprobs: int | None = None
    detokenize: bool = True
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    output_kind: str = "cumulative"


@dataclass
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str = ""


class FakeAsyncLLM:
    """The calls of vLLM's `AsyncLLM`. `server` has the weights and the faults."""

    def __init__(self, engine_args: AsyncEngineArgs, server: FakeServer) -> None:
        self.args = engine_args
        self.server = server
        server.name = engine_args.model
        server.takes_adapters = engine_args.enable_lora
        self.model_config = SimpleNamespace(max_model_len=engine_args.max_model_len)
        self.slept: list[int] = []
        self.awake = {"weights", "kv_cache"}
        self.is_dead = False
        self.ends_with = None
        self._adapters: dict[int, str] = {}

    def get_tokenizer(self) -> Any:
        return self.server.tokenizer

    async def generate(self, prompt, sampling_params, request_id, *, lora_request=None):
        assert sampling_params.output_kind == "final only"
        assert self.awake == {"weights", "kv_cache"}, "a draw without weights or cache"
        body = {
            "token_ids": prompt["prompt_token_ids"],
            "sampling_params": vars(sampling_params)
            | {"stop_token_ids": self._stops(sampling_params)},
            "request_id": request_id,
        }
        if lora_request is not None:
            assert self._adapters[lora_request.lora_int_id] == lora_request.lora_name
            body["model"] = lora_request.lora_name
        if images := prompt.get("multi_modal_data", {}).get("image"):
            body["content_parts"] = [{"type": "image_url", "url": _url(each)} for each in images]
            body["return_token_ids"] = True
        answer = await self._ask("/inference/v1/generate", body)
        [choice] = answer["choices"]
        ranked = []
        for token, each in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True):
            top = each["top_logprobs"]
            at = {other["token_id"]: SimpleNamespace(logprob=other["logprob"]) for other in top}
            at[token] = SimpleNamespace(logprob=each["logprob"])
            ranked.append(at)
        drawn = SimpleNamespace(
            token_ids=choice["token_ids"], logprobs=ranked, finish_reason=choice["finish_reason"]
        )
        ids = answer.get("prompt_token_ids", prompt["prompt_token_ids"])
        yield SimpleNamespace(prompt_token_ids=ids, outputs=[drawn])

    async def abort(self, request_id, internal=False):
        await self._ask("/abort_requests", {"request_ids": list(request_id)})

    async def pause_generation(self, *, mode="abort", clear_cache=True):
        assert mode == "keep"
        assert not self.server.is_paused, "a pause takes time, and one that sleeps needs none"
        await self._ask("/pause", {})

    async def is_paused(self):
        return (await self._ask("/is_paused", {}))["is_paused"]

    async def resume_generation(self):
        await self._ask("/resume", {})

    async def reset_prefix_cache(self, reset_running_requests=False, reset_connector=False):
        return (await self._ask("/reset_prefix_cache", {}))["success"]

    async def reset_encoder_cache(self):
        await self._ask("/reset_encoder_cache", {})

    async def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        assert "weights" in self.awake, "weights come into memory that is not there"
        if method == END_WITH:
            self.ends_with = kwargs
            return [None]
        return (await self._ask("/collective_rpc", {"method": method, "kwargs": kwargs}))["results"]

    async def sleep(self, level=1, mode="abort"):
        assert self.args.enable_sleep_mode
        self.slept.append(level)
        self.awake = set()
        self.server.is_paused = True
        self.server.cached.clear()

    async def wake_up(self, tags=None):
        self.awake |= set(tags or ("weights", "kv_cache"))
        self.server.is_paused = "kv_cache" not in self.awake

    async def add_lora(self, lora_request):
        names = {"lora_name": lora_request.lora_name, "lora_path": lora_request.lora_path}
        await self._ask("/v1/load_lora_adapter", names)
        self._adapters[lora_request.lora_int_id] = lora_request.lora_name
        return True

    async def remove_lora(self, lora_id):
        await self._ask("/v1/unload_lora_adapter", {"lora_name": self._adapters.pop(lora_id)})
        return True

    def shutdown(self, timeout=None):
        self.server.end()

    async def _ask(self, path: str, body: dict[str, Any]) -> Any:
        """Answer as the server of the same faults, in a thread, as the engine core is a process."""
        if self.is_dead:
            raise EngineDeadError("EngineCore encountered an issue.")
        await asyncio.to_thread(self.server.wait_until_thawed, path)
        ended = threading.Event()
        status, answer = await asyncio.to_thread(self.server.answer, path, body, ended)
        await asyncio.to_thread(self.server.wait_until_thawed, path)
        if status != 200:
            raise ValueError(str(answer))
        return answer

    def _stops(self, sampling_params: SamplingParams) -> list[int]:
        return list(sampling_params.stop_token_ids or ())


def _url(image: Any) -> str:
    """Return an image as a `data:` URL, which the server of the same faults reads."""
    file = io.BytesIO()
    image.save(file, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def modules(make_server: Callable[[], FakeServer]) -> dict[str, ModuleType]:
    """Return modules for `sys.modules`. `vllm.engines` collects the engines that are made."""
    vllm = ModuleType("vllm")
    arguments = ModuleType("vllm.engine.arg_utils")
    engine = ModuleType("vllm.v1.engine.async_llm")
    sampling = ModuleType("vllm.sampling_params")
    lora = ModuleType("vllm.lora.request")
    engines: list[FakeAsyncLLM] = []

    class AsyncLLM(FakeAsyncLLM):
        @classmethod
        def from_engine_args(cls, engine_args: AsyncEngineArgs) -> "AsyncLLM":
            if engine_args.gpu_memory_utilization > 0.95:
                raise ValueError("Free memory on device is less than desired GPU memory.")
            engines.append(cls(engine_args, make_server()))
            return engines[-1]

    vars(vllm).update(__version__="0.32.0", engines=engines)
    vars(arguments).update(AsyncEngineArgs=AsyncEngineArgs)
    vars(engine).update(AsyncLLM=AsyncLLM)
    kinds = SimpleNamespace(FINAL_ONLY="final only")
    vars(sampling).update(SamplingParams=SamplingParams, RequestOutputKind=kinds)
    vars(lora).update(LoRARequest=LoRARequest)
    return {module.__name__: module for module in (vllm, arguments, engine, sampling, lora)}
