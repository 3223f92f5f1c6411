"""A small server with the documented exchanges of vLLM and SGLang, over a real tiny model.

Its faults are those of real servers: a push that is confirmed and dropped, half of it, a head or
cached keys that stay old, a restart with the first weights, an end in the middle of a draw.
"""

import base64
import json
import pickle
import socket
import threading
import time
from collections import Counter
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import torch
from safetensors.torch import load_file

from tests.tiny_models import tiny_tokenizer
from verl.models.load import load_causal_lm
from verl.models.lora import merged_weight, read_adapters
from verl.weight_sync.sglang_loader import LOADER, take_weights
from verl.weight_sync.vllm_worker import METHOD, VERSION, TakesWeights


def toy_model():
    """Load the packaged toy, as a server does."""
    model = load_causal_lm("toy", dtype=torch.float32)
    model.set_attn_implementation("eager")
    return model


class Worker(TakesWeights):
    """A worker of vLLM with our extension."""

    device = torch.device("cpu")

    def __init__(self):
        self.model_runner = self
        self.weights = {}

    def reload_weights(self, weights_iterator):
        self.weights = dict(weights_iterator)


class LoadedModel:
    """A model of SGLang, as its custom loader gets it."""

    def __init__(self, model):
        self.parameters = model.parameters
        self.weights = {}

    def load_weights(self, weights):
        self.weights = dict(weights)


# Answered by the process that listens, also where its engine hangs.
ANSWERED_IN_FRONT = ("/v1/models", "/version", "/model_info", "/tokenize")


class FakeServer:
    """One server at a port of this machine.

    Args:
        model: the weights that it starts with; a copy of its own.
        dialect: "vllm" or "sglang".
        version: of the program. vLLM before 0.29 records no version of the weights.
        port: 0: a free one.
    """

    def __init__(self, make_model, dialect="vllm", version=None, port=0, name="tiny"):
        self.make_model = make_model
        self.dialect = dialect
        self.version = version or {"vllm": "0.32.0", "sglang": "0.5.23"}[dialect]
        self.name = name
        self.log_probs_mode = "processed"
        self.faults = set()
        self.delay_s = 0.0
        self.thawed = threading.Event()  # cleared: it takes calls and does not answer
        self.thawed.set()
        self.engine_thawed = threading.Event()  # cleared: its engine alone does not
        self.engine_thawed.set()
        self.admits = threading.Event()  # cleared: requests of draws are on their way
        self.admits.set()
        self.asked = Counter()  # calls by path
        self.draws = 0
        self.takes_adapters = False
        self.max_lora_rank = 8
        self.max_model_len = 64
        self.never_drawn = []
        self.tokenizer = tiny_tokenizer()
        self.aborted = set()
        self.pauses = 0  # each ended the draws of before
        self._port = port
        self._of_thread = threading.local()
        self.start()

    def start(self):
        """Start, or start again with the first weights."""
        self.model = self.make_model().eval()
        self.weight_version = "default"
        self.worker = Worker()
        self.running = 0  # draws
        self.at_work = set()  # their requests
        self.cached = {}  # prompt -> weights that computed its keys
        self.is_paused = False
        self.adapters = {}  # name -> the model with that adapter in it
        self._ended = ended = threading.Event()
        self._connections = connections = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            has_answered = False

            def do_GET(self):
                self._answer(None)

            def handle_one_request(self):
                # As a server whose limit for idle connections has passed: the call is read, and
                # the connection ends without an answer.
                if "closes after an answer" in fake.faults and self.has_answered:
                    self.rfile.read(1)
                    self.close_connection = True
                    return
                super().handle_one_request()

            def do_POST(self):
                length = int(self.headers.get("Content-Length") or 0)
                self._answer(json.loads(self.rfile.read(length) or b"{}"))

            def setup(self):
                super().setup()
                connections.append(self.connection)

            def _answer(self, body):
                path = urlsplit(self.path).path
                fake.asked[path] += 1
                fake.wait_until_thawed(path)
                answer = fake.answer(path, body, ended)
                fake.wait_until_thawed(path)
                if ended.is_set():
                    self.close_connection = True
                    return
                status, value = answer
                data = value.encode() if isinstance(value, str) else json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
                self.has_answered = True

            def log_message(self, *args):
                pass

        class Listener(ThreadingHTTPServer):
            daemon_threads = True
            allow_reuse_address = True
            request_queue_size = 128

            def handle_error(self, request, client_address):
                pass  # a client or this server has closed the connection

        self._listener = Listener(("127.0.0.1", self._port), Handler)
        self._port = self._listener.server_address[1]
        self.url = f"http://127.0.0.1:{self._port}"
        threading.Thread(target=self._listener.serve_forever, args=(0.01,), daemon=True).start()

    def end(self):
        """End as after kill -9: running draws get no answer."""
        self._ended.set()
        self.thawed.set()
        self.engine_thawed.set()
        self.admits.set()
        self._listener.shutdown()
        self._listener.server_close()
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def wait_until_thawed(self, path):
        """Wait until the parts that answer a path do not hang."""
        self.thawed.wait()
        if path not in ANSWERED_IN_FRONT:
            self.engine_thawed.wait()

    # ---------------------------------------------------------------- routes

    def answer(self, path, body, ended):
        self._of_thread.ended = ended
        routes = getattr(self, f"_{self.dialect}_routes")()
        route = routes.get(path)
        return (404, {"detail": "Not Found"}) if route is None else route(body)

    def _vllm_routes(self):
        routes = {
            "/version": lambda body: (200, {"version": self.version}),
            "/v1/models": lambda body: (
                200,
                {
                    "data": [
                        {"id": self.name, "root": self.name, "max_model_len": self.max_model_len},
                        *({"id": name, "root": name} for name in self.adapters),
                    ]
                },
            ),
            "/tokenize": self._tokenize,
            "/inference/v1/generate": self._vllm_generate,
            "/v1/completions": self._vllm_complete,
            "/pause": lambda body: self._pause(True, {"status": "paused"}),
            "/resume": lambda body: self._pause(False, {"status": "resumed"}),
            "/is_paused": lambda body: (200, {"is_paused": self.is_paused}),
            "/abort_requests": self._vllm_abort,
            "/reset_prefix_cache": lambda body: (200, {"success": self._flush()}),
            "/collective_rpc": self._rpc,
        }
        if self.takes_adapters:
            routes["/v1/load_lora_adapter"] = self._load_adapter
            routes["/v1/unload_lora_adapter"] = self._unload_adapter
        if tuple(map(int, self.version.split(".")[:2])) >= (0, 29):
            routes["/weight_info"] = lambda body: (200, {"weight_version": self.weight_version})
            routes["/update_weight_version"] = lambda body: self._record(body["new_version"])
        return routes

    def _sglang_routes(self):
        return {
            "/server_info": lambda body: (
                200,
                {
                    "model_path": self.name,
                    "version": self.version,
                    "context_length": self.max_model_len,
                },
            ),
            "/model_info": lambda body: (
                200,
                {"model_path": self.name, "weight_version": self.weight_version},
            ),
            "/generate": self._sglang_generate,
            "/pause_generation": self._sglang_pause,
            "/continue_generation": lambda body: self._pause(False, {"status": "ok"}),
            "/abort_request": lambda body: self._abort([body["rid"]], {}),
            "/flush_cache": lambda body: (200, "Cache flushed.") if self._flush() else (400, "no"),
            "/update_weights_from_disk": self._sglang_load,
            "/update_weights_from_tensor": self._sglang_take,
        }

    # ---------------------------------------------------------------- draws

    def _vllm_generate(self, body):
        if "no scale out" in self.faults:
            return 403, {"error": "scale-out APIs are disabled"}
        asked = body["sampling_params"]
        if "empty" in self.faults:
            return 200, {"choices": []}
        if body.get("model", self.name) not in (self.name, *self.adapters):
            return 404, {"error": {"message": "The model does not exist.", "code": 404}}
        stops = set(asked.get("stop_token_ids", ()))
        ids, rows, reason = self._draw(
            body["token_ids"],
            asked["max_tokens"],
            asked,
            stops,
            body.get("request_id"),
            body.get("model"),
        )
        content = []
        for token, row in zip(ids, rows):
            best = row.topk(max(asked["logprobs"], 1))
            top = [
                {"token_id": int(i), "logprob": float(v)} for v, i in zip(best.values, best.indices)
            ]
            content.append({"token_id": token, "logprob": float(row[token]), "top_logprobs": top})
        choice = {
            "index": 0,
            "token_ids": ids,
            "logprobs": {"content": content},
            "finish_reason": reason,
        }
        if "/weight_info" in self._vllm_routes():
            span = {"version": self.weight_version, "start": 0, "end": len(ids)}
            choice["weight_versions"] = [span]
        return 200, {"request_id": "generate-tokens-x", "choices": [choice]}

    def _vllm_complete(self, body):
        """Answer as the route of completions does, which names no versions."""
        asked = {**body, "max_tokens": body["max_tokens"]}
        if body.get("model", self.name) not in (self.name, *self.adapters):
            return 404, {"error": {"message": "The model does not exist.", "code": 404}}
        stops = set(asked.get("stop_token_ids", ()))
        ids, rows, reason = self._draw(
            body["prompt"],
            asked["max_tokens"],
            asked,
            stops,
            body.get("request_id"),
            body.get("model"),
        )
        top = []
        for row in rows:
            best = row.topk(2)
            top.append({str(int(i)): float(v) for v, i in zip(best.values, best.indices)})
        log_probs = [float(row[token]) for row, token in zip(rows, ids)]
        found = {"token_logprobs": log_probs, "top_logprobs": top}
        choice = {"token_ids": ids, "logprobs": found, "finish_reason": reason}
        return 200, {"id": "cmpl-x", "choices": [choice]}

    def _sglang_generate(self, body):
        asked = body["sampling_params"]
        stops = set() if asked.get("ignore_eos") else set(asked.get("stop_token_ids", ()))
        seeded = {**asked, "seed": asked.get("sampling_seed", 0)}
        ids, rows, reason = self._draw(
            body["input_ids"], asked["max_new_tokens"], seeded, stops, body.get("rid")
        )
        top = []
        for row in rows:
            best = row.topk(2)
            top.append([[float(v), int(i), None] for v, i in zip(best.values, best.indices)])
        meta = {
            "finish_reason": {"type": reason},
            "prompt_tokens": len(body["input_ids"]),
            "output_token_logprobs": [[float(r[i]), i, None] for i, r in zip(ids, rows)],
            "output_top_logprobs": top,
            "weight_version": self.weight_version,
        }
        return 200, {"text": "", "output_ids": ids, "meta_info": meta}

    def _draw(self, prompt, limit, asked, stops, request_id, adapter=None):
        self.admits.wait()
        self.draws += 1
        self.running += 1
        self.at_work.add(str(request_id))
        try:
            return self._draw_all(prompt, limit, asked, stops, request_id, adapter)
        finally:
            self.running -= 1
            self.at_work.discard(str(request_id))

    def _draw_all(self, prompt, limit, asked, stops, request_id, adapter):
        """Draw with a generator of the seed; a cached prompt keeps the weights of its keys."""
        limit -= 2 * ("short context" in self.faults)
        own = self.adapters.get(adapter, self.model)
        model = self.cached.setdefault((adapter, tuple(prompt)), own)
        noise = torch.Generator().manual_seed(asked.get("seed") or 0)
        ids, rows = [], []
        pauses = self.pauses
        with torch.no_grad():
            while len(ids) < limit:
                if self.delay_s:
                    time.sleep(self.delay_s)
                is_aborted = str(request_id) in self.aborted or self.pauses != pauses
                if self._of_thread.ended.is_set() or is_aborted:
                    return ids, rows, "abort"
                logits = self._logits(model, [*prompt, *ids])
                temperature = asked["temperature"] or 1.0
                row = (logits / temperature).log_softmax(-1)
                weights = row.exp()
                weights[self.never_drawn] = 0
                token = int(torch.multinomial(weights, 1, generator=noise))
                ids.append(token)
                rows.append(row if self.log_probs_mode == "processed" else logits.log_softmax(-1))
                if "failing draws" in self.faults:
                    return ids, rows, "error"
                if token in stops:
                    return ids, rows, "stop"
        return ids, rows, "length"

    def _logits(self, model, ids):
        return model(torch.tensor([ids])).logits[0, -1]

    def _vllm_abort(self, body):
        return self._abort(body["request_ids"], {"status": "aborted"})

    def _abort(self, names, answer):
        known = {name.removeprefix("generate-tokens-") for name in names}
        self.aborted |= known & self.at_work  # a server does not remember others
        return 200, answer

    # ---------------------------------------------------------------- weights

    def _tokenize(self, body):
        return 200, {"tokens": self.tokenizer.encode(body["prompt"], add_special_tokens=False)}

    def _pause(self, is_paused, answer):
        self.is_paused = is_paused
        return 200, answer

    def _sglang_pause(self, body):
        assert body["mode"] == "abort", "with requests there, the flush is refused"
        self.pauses += 1
        return self._pause(True, {"status": "ok"})

    def _flush(self):
        if "flush refused" in self.faults:
            return False
        if "stale cache" not in self.faults:
            self.cached.clear()
        return True

    def _load_adapter(self, body):
        if not body:
            return 400, {"error": "lora_name and lora_path are missing"}
        config, factors = read_adapters(Path(body["lora_path"]))
        if config["r"] > self.max_lora_rank:
            return 500, {"error": f"LoRA rank {config['r']} is greater than max_lora_rank"}
        model = self.make_model().eval()
        model.load_state_dict(self.model.state_dict())
        layers = list(factors) if "dropped" not in self.faults else []
        if "half" in self.faults:
            layers = layers[: len(layers) // 2]
        for name in layers:
            layer = model.get_submodule(name)
            scaling = config["lora_alpha"] / config["r"]
            merged = merged_weight(layer, layer.weight, *factors[name], scaling)
            layer.weight.data.copy_(merged)
        self.adapters[body["lora_name"]] = model
        return 200, "Success: LoRA adapter added successfully."

    def _unload_adapter(self, body):
        del self.adapters[body["lora_name"]]
        return 200, "Success: LoRA adapter removed successfully."

    def _record(self, version):
        self.weight_version = version
        return 200, {"success": True}

    def _sglang_load(self, body):
        assert not body["flush_cache"], "refused here, the flush ends the server"
        status, answer = self._load(body["model_path"], {"success": True, "message": "ok"})
        self._record(body["weight_version"])
        return status, answer

    def _sglang_take(self, body):
        assert not body["flush_cache"], "refused here, the flush ends the server"
        assert body["load_format"] == LOADER
        [packed] = body["serialized_named_tensors"]
        loaded = LoadedModel(self.model)
        take_weights(loaded, pickle.loads(base64.b64decode(packed)))
        status, answer = self._take(loaded.weights, {"success": True, "message": "ok"})
        self._record(body["weight_version"])
        return status, answer

    def _rpc(self, body):
        kwargs = body["kwargs"]
        if body["method"] == METHOD:
            recorded = self.worker.verl_take_weights(**kwargs)
            return self._take(self.worker.weights, {"results": [recorded]})
        if body["method"] == VERSION:
            return 200, {"results": [self.worker.verl_weight_version()]}
        return self._load(kwargs["weights_path"], {"results": [None]})

    def _load(self, folder, answer):
        weights = {}
        for file in sorted(Path(folder).glob("*.safetensors")):
            weights |= load_file(file)
        return self._take(weights, answer)

    def _take(self, weights, answer):
        assert self.is_paused or not self.running, "requests go on by other weights"
        if "dropped" in self.faults:
            weights = {}
        if "half" in self.faults:
            weights = dict(list(weights.items())[: len(weights) // 2])
        if "stale head" in self.faults:
            weights.pop("lm_head.weight", None)
        model = self.make_model().eval()
        model.load_state_dict({**self.model.state_dict(), **weights}, strict=False)
        self.model = model
        return 200, answer
