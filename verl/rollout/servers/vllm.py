"""vLLM's dialect: the token-in, token-out route and the routes of its development mode."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

from verl.models.pictures import Pictures, ids_with_placeholders
from verl.rollout.servers.server import (
    LOAD_S,
    AdapterLostError,
    Draw,
    Drawn,
    Server,
    ServerFacts,
    WeightSource,
    data_url,
    flags_of,
)
from verl.utils.errors import ConfigError, RolloutError
from verl.weight_sync.vllm_worker import EXTENSION, METHOD, VERSION

_GENERATE = "/inference/v1/generate"
_COMPLETIONS = "/v1/completions"
_LOAD_ADAPTER = "/v1/load_lora_adapter"
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that --max-lora-rank may be


class VLLMServer(Server):
    """One `vllm.entrypoints.openai.api_server` in development mode."""

    title = "vLLM"
    package = "vllm"
    oldest = "0.20"
    untested = "0.33"
    filters_log_probs = True
    optional_flags: ClassVar[Mapping[str, str]] = {"--enable-scale-out": "0.30"}
    oldest_with_pictures = "0.32"
    largest_lora_rank = _LORA_RANKS[-1]
    engine_path = "/is_paused"

    def __init__(self, url: str, *, has_vision: bool = False) -> None:
        super().__init__(url, has_vision=has_vision)
        self._route = _GENERATE
        self._taken: str | None = None  # version of the weights that our extension took last
        # Whether the version is asked of the extension: the server itself records none.
        self._asks_worker = False

    @classmethod
    def command(cls, python: str, model: str, port: int | str, **options: Any) -> list[str]:
        """Implement `Server.command`."""
        command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
        command += ["--port", str(port), "--enable-scale-out"]
        command += ["--logprobs-mode", options.pop("logprobs_mode", "processed_logprobs")]
        if options.pop("takes_memory", False):
            command += ["--worker-extension-cls", EXTENSION]
        if lora_rank := options.pop("lora_rank", 0):
            command += ["--enable-lora", "--max-lora-rank", str(allowed_rank(lora_rank))]
        return command + flags_of(options)

    @classmethod
    def environment(cls, lora_rank: int = 0) -> Mapping[str, str]:
        """Implement `Server.environment`."""
        variables = {"VLLM_SERVER_DEV_MODE": "1"}
        if lora_rank:
            variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        return variables

    def facts(self) -> ServerFacts:
        """Implement `Server.facts`."""
        status, models = self.ask("GET", "/v1/models")
        _, version = self.ask("GET", "/version")
        with self.reading("/v1/models and /version", (status, models, version)):
            first = models["data"][0]
            model = str(first.get("root") or first["id"])
            longest = first.get("max_model_len")
            return ServerFacts(model, str(version["version"]), longest)

    @property
    def is_paused(self) -> bool:
        """Implement `Server.is_paused`."""
        status, answer = self.ask("GET", self.engine_path)
        return status == 200 and isinstance(answer, dict) and answer.get("is_paused") is True

    def draw(self, draw: Draw) -> Drawn:
        """Implement `Server.draw`."""
        params = draw.params
        sampling: dict[str, Any] = {
            "max_tokens": draw.limit,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": max(params.top_k, 0),
            "min_p": params.min_p,
            "stop_token_ids": list(draw.stop_token_ids),
            "ignore_eos": True,  # the ids above are all that end a response
            "repetition_penalty": 1.0,  # the model's folder may ask for another one
            "logprobs": 0,
            "detokenize": bool(params.stop),
        }
        if draw.seed is not None:
            sampling["seed"] = draw.seed >> 1  # a signed number of 64 bits
        if params.stop:
            sampling |= {"stop": list(params.stop), "include_stop_str_in_output": True}
            sampling["skip_special_tokens"] = False

        answer = self._generate(draw.prompt_ids, sampling, draw.request_id, draw.pictures)
        with self.reading(self._route, answer):
            choice = answer["choices"][0]
            return Drawn(
                token_ids=list(choice["token_ids"] or []),
                log_probs=_log_probs(choice["logprobs"]),
                finish_reason=self.known_reason(choice["finish_reason"]),
                versions=self._versions(choice),
            )

    def top_two(self, prompt_ids: Sequence[int], temperature: float) -> tuple[float, float]:
        """Implement `Server.top_two`."""
        sampling = {"max_tokens": 1, "temperature": temperature, "logprobs": 2, "top_p": 1.0}
        answer = self._generate(prompt_ids, sampling)
        with self.reading(self._route, answer):
            found = answer["choices"][0]["logprobs"]
            if "content" in found:
                likeliest = [each["logprob"] for each in found["content"][0]["top_logprobs"]]
            else:
                likeliest = list(found["top_logprobs"][0].values())
            first, second = sorted(likeliest, reverse=True)[:2]
            return first, second

    def abort(self, request_ids: Sequence[str]) -> None:
        """Implement `Server.abort`."""
        names = [*request_ids]
        for each in request_ids:
            # The engine's own names of the requests of both routes.
            names += [f"generate-tokens-{each}", f"cmpl-{each}", f"cmpl-{each}-0"]
        self.call("/abort_requests", {"request_ids": names})

    def load(self, source: WeightSource, version: str, *, is_idle: bool = False) -> str | None:
        """Implement `Server.load`."""
        # A pause takes 25 ms, also of a server without requests.
        with nullcontext() if is_idle else self.paused():
            source.fill(self, version)
            # Requests that wait meanwhile are computed again: no key of the old weights stays.
            self.require_flushed(self.flush(running=True))
            if self.has_vision:
                self.call("/reset_encoder_cache")  # features by the old vision tower
            # The version of an adapter is its name.
            if not source.is_adapter and not self._asks_worker:
                self._record(version)
        return self._taken if self._asks_worker else self.weight_version()

    def _record(self, version: str) -> None:
        """Have the server record a version, which its draws then name."""
        status, answer = self.ask("POST", "/update_weight_version", {"new_version": version})
        if status == 404:  # before 0.29
            self._asks_worker = self.is_owned and self._taken is not None
        elif status != 200:
            raise self.refusal("/update_weight_version", status, answer)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep requests waiting."""
        self.call("/pause?mode=keep")
        with self.resumed():
            yield

    def resume(self) -> None:
        """Implement `Server.resume`."""
        self.call("/resume")

    def read_folder(self, folder: Path, version: str) -> None:
        """Implement `Server.read_folder`."""
        self._taken = None
        self._asks_worker = False
        self._ask_workers("reload_weights", weights_path=str(folder))

    def read_memory(self, address: str, key: bytes, version: str) -> None:
        """Implement `Server.read_memory`: by our extension of vLLM's worker."""
        self._taken = None
        answer = self._ask_workers(METHOD, address=address, key=key.hex(), version=version)
        self._taken = self._version_of_worker(answer)

    def _ask_workers(self, method: str, **words: str) -> Any:
        """Call a method of the workers."""
        return self.call("/collective_rpc", {"method": method, "kwargs": words}, timeout_s=LOAD_S)

    def _version_of_worker(self, answer: Any) -> str:
        """Read the version that our extension has returned; "": it has none, as after a restart."""
        with self.reading("/collective_rpc", answer):
            [version] = answer["results"]
            return version or ""

    def check_adapters(self, lora_rank: int) -> None:
        """Implement `Server.check_adapters`."""
        status, _ = self.ask("POST", _LOAD_ADAPTER, {})
        if status == 404:  # others say that the names are missing
            raise ConfigError(f"{self.name} has no route for adapters.{_adapter_fix(lora_rank)}")

    def read_adapter(self, folder: Path, version: str) -> None:
        """Implement `Server.read_adapter`.

        Each push has a name of its own. An adapter that is loaded under its old name, which vLLM
        can do, would be read again from its file in every step, and would find the keys of the
        old one in the prefix cache if its folder is the same.
        """
        names = {"lora_name": version, "lora_path": str(folder)}
        self.call(_LOAD_ADAPTER, names, timeout_s=LOAD_S)
        run = version.rpartition("-")[0]
        for name in self._adapters():
            if name != version and name.rpartition("-")[0] == run:
                self.call("/v1/unload_lora_adapter", {"lora_name": name})

    def flush(self, running: bool = False) -> bool:
        """Implement `Server.flush`. With `running`, running requests are computed again."""
        path = "/reset_prefix_cache"
        answer = self.call(f"{path}?reset_running_requests=true" if running else path)
        # Older versions answer an empty body.
        return answer["success"] is True if isinstance(answer, dict) else True

    def weight_version(self) -> str | None:
        """Implement `Server.weight_version`."""
        if self.adapter is not None:
            return self.adapter if self.adapter in self._adapters() else ""
        if self._asks_worker:
            return self._version_of_worker(self._ask_workers(VERSION))

        status, answer = self.ask("GET", "/weight_info")
        if status == 404:
            return None
        if status != 200 or not isinstance(answer, dict) or "weight_version" not in answer:
            raise self.unexpected("/weight_info", answer)
        return str(answer["weight_version"])

    def refusal(self, path: str, status: int, answer: Any) -> RolloutError:
        """Name the variable that the server was started without."""
        fix = ""
        if path == _LOAD_ADAPTER:
            fix = _adapter_fix()
        elif status == 404 and path != _COMPLETIONS:
            fix = " Start it with VLLM_SERVER_DEV_MODE=1, which opens the routes for weights."
        return RolloutError(f"{super().refusal(path, status, answer)}{fix}")

    def _generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Mapping[str, Any],
        request_id: str | None = None,
        pictures: Pictures = (),
    ) -> dict[str, Any]:
        """Ask the route of tokens, or the one of completions where the former is closed."""
        named = {} if request_id is None else {"request_id": request_id}
        if self.adapter is not None:
            named["model"] = self.adapter
        if pictures:
            return self._generate_from_pictures(prompt_ids, sampling, pictures, named)
        if self._route == _GENERATE:
            body = {"token_ids": list(prompt_ids), "sampling_params": dict(sampling), **named}
            answer = self._ask_to_draw(_GENERATE, body, absent=(403, 404))
            if answer is not None:
                return answer
            self._route = _COMPLETIONS  # a server without --enable-scale-out

        flat = {**sampling, "prompt": list(prompt_ids), "return_token_ids": True, **named}
        flat.pop("detokenize", None)
        return self._ask_to_draw(_COMPLETIONS, flat)

    def _generate_from_pictures(
        self,
        prompt_ids: Sequence[int],
        sampling: Mapping[str, Any],
        pictures: Pictures,
        named: Mapping[str, str],
    ) -> dict[str, Any]:
        """Send pictures, which the server prepares and places itself, and compare the tokens."""
        body = {
            "token_ids": ids_with_placeholders(prompt_ids, pictures),
            "content_parts": [{"type": "image_url", "url": data_url(each)} for each in pictures],
            "return_token_ids": True,
            "sampling_params": dict(sampling),
            **named,
        }
        answer = self._ask_to_draw(_GENERATE, body)
        read = answer.get("prompt_token_ids")
        if read != list(prompt_ids):
            raise self.other_prompt(prompt_ids, None if read is None else len(read))
        return answer

    def _ask_to_draw(self, path: str, body: Mapping[str, Any], absent: Sequence[int] = ()) -> Any:
        """Return the JSON object of a draw; None for a status in `absent`: there is no such route.

        Raises AdapterLostError if the draw was refused because its adapter is not loaded.
        """
        status, answer = self.ask_to_draw(path, body)
        if status == 200 and isinstance(answer, dict):
            return answer
        if status == 404 and self.adapter is not None and not self.weight_version():
            raise AdapterLostError(f"{self.name} does not have the adapter {self.adapter}.")
        if status in absent:
            return None
        raise self.refusal(path, status, answer)

    def _versions(self, choice: Mapping[str, Any]) -> frozenset[str]:
        """Return the versions of the weights that drew a response."""
        if self.adapter is not None:
            return frozenset([self.adapter])  # the draw named it
        spans = choice.get("weight_versions") or []
        return frozenset(str(span["version"]) for span in spans)

    def _adapters(self) -> list[str]:
        """Return the names of the models that draw, those of adapters among them."""
        status, models = self.ask("GET", "/v1/models")
        with self.reading("/v1/models", (status, models)):
            return [str(each["id"]) for each in models["data"]]


def allowed_rank(lora_rank: int) -> int:
    """Return the smallest value of --max-lora-rank for adapters of this rank."""
    return min(rank for rank in _LORA_RANKS if rank >= lora_rank)


def _adapter_fix(lora_rank: int | None = None) -> str:
    """Say how to start a server that takes adapters."""
    rank = "RANK" if lora_rank is None else allowed_rank(lora_rank)
    return (
        f" Start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, --enable-lora and --max-lora-rank "
        f"{rank}, or push whole weights: actor_rollout_ref.rollout.lora_weights=merged."
    )


def _log_probs(found: Mapping[str, Any] | None) -> list[float]:
    """Return the log-probs of the drawn tokens, in the form of either route."""
    if not found:
        return []
    if "content" in found:
        return [each["logprob"] for each in found["content"]]
    return list(found["token_logprobs"])
