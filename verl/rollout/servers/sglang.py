"""SGLang's dialect: its native /generate and the routes for weights."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from verl.models.pictures import Pictures, ids_with_placeholders
from verl.rollout.servers.server import (
    LOAD_S,
    Draw,
    Drawn,
    Server,
    ServerFacts,
    WeightSource,
    data_url,
    flags_of,
)
from verl.utils.errors import RolloutError
from verl.weight_sync.sglang_loader import LOADER, packed_address

# A response that would fill the context ends this many tokens before it.
_UNUSED = 2


class SGLangServer(Server):
    """One `sglang.launch_server`. Its log-probs are over the whole vocabulary, before filters."""

    title = "SGLang"
    package = "sglang"
    oldest = "0.5"
    untested = "0.6"
    optional_flags: ClassVar[Mapping[str, str]] = {"--enable-deterministic-inference": "0.5.3"}
    oldest_with_pictures = "0.5.16"
    keeps_features = True
    needs_published_names = True
    engine_path = "/server_info"

    @classmethod
    def command(cls, python: str, model: str, port: int | str, **options: Any) -> list[str]:
        """Implement `Server.command`."""
        names = {
            "max_model_len": "context_length",
            "tensor_parallel_size": "tp_size",
            "gpu_memory_utilization": "mem_fraction_static",
            "max_num_seqs": "max_running_requests",
            "max_num_batched_tokens": "max_prefill_tokens",
            "enforce_eager": "disable_cuda_graph",
            "seed": "random_seed",
        }

        for name in ("logprobs_mode", "lora_rank"):
            options.pop(name, None)
        takes_memory = options.pop("takes_memory", False)
        if "max_model_len" in options:
            options["max_model_len"] += _UNUSED
        named: dict[str, Any] = {
            "custom_weight_loader": LOADER if takes_memory else None,
            # Without it, a seed in a request has no effect.
            "enable_deterministic_inference": options.get("seed") is None,
            # Its request of 34 tokens ends a server whose context is shorter.
            "skip_server_warmup": True,
        }
        named |= {names.get(name, name): value for name, value in options.items()}

        command = [python, "-m", "sglang.launch_server", "--model-path", model]
        return [*command, "--port", str(port), *flags_of(named)]

    @classmethod
    def environment(cls, lora_rank: int = 0) -> Mapping[str, str]:
        """Implement `Server.environment`."""
        return {
            # The unused places may lie beyond the model's own limit.
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
            # Otherwise it decodes a prompt with pictures, and its tokens may be others afterwards.
            "SGLANG_MM_AVOID_RETOKENIZE": "1",
            # No call drops the features that an old vision tower computed: keep none.
            "SGLANG_VLM_CACHE_SIZE_MB": "0",
        }

    def facts(self) -> ServerFacts:
        """Implement `Server.facts`."""
        status, server = self._info("server")
        with self.reading("/server_info", (status, server)):
            context = server.get("context_length")
            longest = context - _UNUSED if context else server.get("max_req_input_len")
            return ServerFacts(str(server["model_path"]), str(server["version"]), longest)

    def draw(self, draw: Draw) -> Drawn:
        """Implement `Server.draw`."""
        params = draw.params
        # With ignore_eos, SGLang ignores stop_token_ids, too; without it, it ends at the model's.
        ignores_stops = params.ignore_eos or not draw.stop_token_ids
        sampling: dict[str, Any] = {
            "max_new_tokens": draw.limit,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k if params.top_k > 0 else -1,
            "min_p": params.min_p,
            "stop_token_ids": list(draw.stop_token_ids),
            "ignore_eos": ignores_stops,
            "repetition_penalty": 1.0,
            "no_stop_trim": True,
            "skip_special_tokens": False,
        }
        if draw.seed is not None:
            sampling["sampling_seed"] = draw.seed >> 33  # a signed number of 32 bits
        if params.stop:
            sampling["stop"] = list(params.stop)

        answer = self._generate(draw.prompt_ids, sampling, draw.pictures, rid=draw.request_id)
        with self.reading("/generate", answer):
            meta = answer["meta_info"]
            # The pairs are the tokens that were drawn; output_ids may be trimmed.
            pairs = meta["output_token_logprobs"]
            drawn = Drawn(
                token_ids=[int(each[1]) for each in pairs],
                log_probs=[float(each[0]) for each in pairs],
                finish_reason=self.known_reason(meta["finish_reason"]["type"]),
                versions=_versions(meta),
            )
        return _cut(drawn, draw.stop_token_ids) if ignores_stops else drawn

    def top_two(self, prompt_ids: Sequence[int], temperature: float) -> tuple[float, float]:
        """Implement `Server.top_two`."""
        sampling = {"max_new_tokens": 1, "temperature": temperature, "top_p": 1.0}
        answer = self._generate(prompt_ids, sampling, top_logprobs_num=2)
        with self.reading("/generate", answer):
            likeliest = answer["meta_info"]["output_top_logprobs"][0]
            return float(likeliest[0][0]), float(likeliest[1][0])

    def _generate(
        self,
        prompt_ids: Sequence[int],
        sampling: dict[str, Any],
        pictures: Pictures = (),
        **more: Any,
    ) -> Any:
        """Draw after a prompt, with log-probs. The server prepares and places pictures itself."""
        ids = list(prompt_ids)
        if pictures:
            ids = ids_with_placeholders(prompt_ids, pictures)
            more["image_data"] = [data_url(picture) for picture in pictures]
        body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}
        status, answer = self.ask_to_draw("/generate", {**body, **more})
        if status != 200:
            raise self.refusal("/generate", status, answer)

        if pictures:
            with self.reading("/generate", answer):
                count = answer["meta_info"]["prompt_tokens"]
            if count != len(prompt_ids):
                raise self.other_prompt(prompt_ids, count)
        return answer

    def abort(self, request_ids: Sequence[str]) -> None:
        """Implement `Server.abort`."""
        for each in request_ids:
            self.call("/abort_request", {"rid": each})

    def load(self, source: WeightSource, version: str, *, is_idle: bool = False) -> str | None:
        """Implement `Server.load`. An idle server is paused, too."""
        # Other modes keep requests, and with any of them there SGLang refuses to flush.
        self.call("/pause_generation", {"mode": "abort"})
        with self.resumed():
            source.fill(self, version)
            self.require_flushed(self.flush())
        return self.weight_version()

    def resume(self) -> None:
        """Implement `Server.resume`."""
        self.call("/continue_generation")

    def read_folder(self, folder: Path, version: str) -> None:
        """Implement `Server.read_folder`."""
        self._update("/update_weights_from_disk", {"model_path": str(folder)}, version)

    def read_memory(self, address: str, key: bytes, version: str) -> None:
        """Implement `Server.read_memory`: by our loader within the server."""
        place = {"serialized_named_tensors": [packed_address(address, key)], "load_format": LOADER}
        self._update("/update_weights_from_tensor", place, version)

    def _update(self, path: str, weights: Mapping[str, Any], version: str) -> None:
        """Have the server take weights."""
        # A flush that is refused here ends the server; `load` flushes, and reads the answer.
        named = {**weights, "weight_version": version, "flush_cache": False}
        answer = self.call(path, named, timeout_s=LOAD_S)
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise RolloutError(
                f"{self.name} did not take the weights by {path}: {str(answer)[:400]}. "
                "Restart it, and check that it runs the model that is trained."
            )

    def flush(self) -> bool:
        """Implement `Server.flush`."""
        status, answer = self.ask("POST", "/flush_cache")
        if status not in (200, 400):
            raise self.refusal("/flush_cache", status, answer)
        return status == 200

    def weight_version(self) -> str | None:
        """Implement `Server.weight_version`."""
        status, model = self._info("model")
        if status != 200 or not isinstance(model, dict):
            raise self.unexpected("/model_info", model)
        version = model.get("weight_version")
        return None if version is None else str(version)

    def _info(self, kind: str) -> tuple[int, Any]:
        """Ask for facts of the server or its model. Releases before 0.5.6 begin the path by get."""
        status, answer = self.ask("GET", f"/{kind}_info")
        if status == 404:
            status, answer = self.ask("GET", f"/get_{kind}_info")
        return status, answer


def _cut(drawn: Drawn, stop_token_ids: Sequence[int]) -> Drawn:
    """End a response after its first stop token."""
    for number, token in enumerate(drawn.token_ids, 1):
        if token in stop_token_ids:
            return replace(
                drawn,
                token_ids=drawn.token_ids[:number],
                log_probs=drawn.log_probs[:number],
                finish_reason="stop",
            )
    return drawn


def _versions(meta: dict[str, Any]) -> frozenset[str]:
    """Return the versions of the weights that drew a response, one of them or several spans."""
    spans = meta.get("weight_versions")
    if spans:
        return frozenset(str(span["version"]) for span in spans)
    version = meta.get("weight_version")
    return frozenset() if version is None else frozenset([str(version)])
