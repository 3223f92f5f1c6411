"""One inference server: the calls that every dialect has, and the HTTP below them."""

import base64
import json
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol
from urllib.parse import urlsplit

import urllib3

from verl.models.pictures import Picture, Pictures
from verl.rollout.servers.watch import ServerLostError, Watch
from verl.rollout.types import FINISH_REASONS, Completion, SamplingParams
from verl.utils.addresses import is_loopback
from verl.utils.errors import ConfigError, RolloutError
from verl.utils.watched_http import describe_failure, watched_pools

_CONNECT_S = 5.0
DRAW_S = 3600.0  # of a draw by a server that gives signs of life
QUICK_S = 20.0  # of questions about the server itself
LOAD_S = 1800.0  # of new weights
_SHOWN = 400  # characters of an answer in an error


class AdapterLostError(RolloutError):
    """A server does not have the adapter that a draw names, as after a restart."""


@dataclass(frozen=True)
class ServerFacts:
    """The model that a server has, as the server describes it."""

    model: str
    version: str
    max_model_len: int | None


@dataclass(frozen=True, kw_only=True)
class Draw:
    """One sample to draw."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    limit: int
    seed: int | None  # None: the server has noise of its own
    stop_token_ids: tuple[int, ...]  # all of them, the model's end of sequence included
    pictures: Pictures = ()  # of the prompt, in the order of their tokens


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """The tokens of one sample, and the versions of the weights that drew them, if known."""

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str  # see `Server.known_reason`
    versions: frozenset[str] = field(default=frozenset())

    def require_whole(self, limit: int) -> None:
        """Raise RolloutError where a limit of the server's own has ended the sample."""
        if self.finish_reason == "length" and len(self.token_ids) < limit:
            raise RolloutError(
                f"A server ended a response at {len(self.token_ids)} of {limit} tokens, for its "
                "length. Start it with a longer context."
            )

    def completion(self, sample_id: int) -> Completion:
        """Return the draw of a sample. Raises RolloutError for tokens without log-probs."""
        if len(self.token_ids) != len(self.log_probs):
            raise RolloutError(
                f"A server returned {len(self.token_ids)} tokens and {len(self.log_probs)} "
                f"log-probs for sample {sample_id}; one for each token is due."
            )
        return Completion(
            sample_id=sample_id,
            token_ids=self.token_ids,
            log_probs=self.log_probs,
            finish_reason=self.finish_reason,
        )


class WeightSource(Protocol):
    """Weights that servers can take, as often as needed until the next update."""

    @property
    def is_adapter(self) -> bool:
        """Return whether servers keep the weights that they started with.

        They draw by an adapter that has the name of the version.
        """
        ...

    def fill(self, server: "Server", version: str) -> None:
        """Have a server that is paused take the weights."""
        ...


class Server(ABC):
    """One server. Its methods may be called from any number of threads.

    Args:
        url: its address.
        has_vision: whether its model reads pictures.

    Raises ServerLostError where no answer comes, and RolloutError with the server's own words for
    an answer that is an error or has another form than documented.
    """

    title: ClassVar[str]
    package: ClassVar[str]  # that must be importable where the run starts servers
    oldest: ClassVar[str]  # version that has the calls used here
    untested: ClassVar[str]  # first version after those that were tested
    # Whether log-probs after the temperature are normalized over the tokens that top-k, top-p and
    # min-p keep, which is not our definition.
    filters_log_probs: ClassVar[bool] = False
    # Flags of `command` that it can do without, and the first version that has each.
    optional_flags: ClassVar[Mapping[str, str]] = {}
    oldest_with_pictures: ClassVar[str]  # version that draws with pictures were tested with
    # Whether a server that was started without `environment` draws by features of pictures that
    # its old weights computed.
    keeps_features: ClassVar[bool] = False
    # Whether weights from memory must have the names of published files, not those of modules.
    needs_published_names: ClassVar[bool] = False
    largest_lora_rank: ClassVar[int] = 0  # of an adapter that it draws by; 0: it takes none
    # Path of a question that the engine answers, not the process that listens.
    engine_path: ClassVar[str]
    way_out: ClassVar[str] = ""  # of an error at the start; "": start another server

    def __init__(self, url: str, *, has_vision: bool = False) -> None:
        self.url = url.rstrip("/")
        self.has_vision = has_vision
        self.is_owned = False  # whether the run started it, so that no one else uses it
        self.adapter: str | None = None  # that draws name; None: the model alone draws
        self.map_cache_s = 0.0  # of the last `load`, to take memory for its cache after a sleep
        self.watch = Watch(self.name, self._ask_for_sign, self._ask_engine)

    # ---------------------------------------------------------------- a dialect defines

    @classmethod
    @abstractmethod
    def command(cls, python: str, model: str, port: int | str, **options: Any) -> list[str]:
        """Return the command that starts a server."""

    @classmethod
    def environment(cls, lora_rank: int = 0) -> Mapping[str, str]:
        """Return variables that `command` needs."""
        return {}

    @abstractmethod
    def facts(self) -> ServerFacts:
        """Ask for the model."""

    @abstractmethod
    def draw(self, draw: Draw) -> Drawn:
        """Draw a sample to its end."""

    @abstractmethod
    def top_two(self, prompt_ids: Sequence[int], temperature: float) -> tuple[float, float]:
        """Return the log-probs of the two likeliest next tokens."""

    @abstractmethod
    def abort(self, request_ids: Sequence[str]) -> None:
        """End running draws, which then return their tokens so far."""

    @abstractmethod
    def load(self, source: "WeightSource", version: str, *, is_idle: bool = False) -> str | None:
        """Take weights, forget all cached keys, and record the version.

        Returns `weight_version` when the server has confirmed each of these.

        Args:
            is_idle: no request is on the server, so that none has to wait meanwhile.
        """

    @abstractmethod
    def read_folder(self, folder: Path, version: str) -> None:
        """Read weights from a folder. Called by a `WeightSource`."""

    @abstractmethod
    def read_memory(self, address: str, key: bytes, version: str) -> None:
        """Read weights from the memory of the process that listens at `address`."""

    def check_adapters(self, lora_rank: int) -> None:
        """Raise ConfigError if the server cannot take adapters of this rank while it runs."""
        raise ConfigError(
            f"{self.title} servers take whole weights here, got adapters of rank {lora_rank}. Set "
            "actor_rollout_ref.rollout.lora_weights=merged."
        )

    def read_adapter(self, folder: Path, version: str) -> None:
        """Read an adapter from a folder, under the name `version`, and forget those before it."""
        raise NotImplementedError

    @abstractmethod
    def flush(self) -> bool:
        """Drop cached prefixes. Returns False where the server refuses because it is at work."""

    def sleep(self) -> None:
        """Give the memory of the device back until `wake`."""
        raise NotImplementedError

    def wake(self) -> None:
        """Prepare for the `load` that comes after `sleep`."""
        raise NotImplementedError

    @property
    def can_draw(self) -> bool:
        """Return whether it can draw before the next `load`."""
        return True

    @abstractmethod
    def weight_version(self) -> str | None:
        """Return the version of the weights; None: this server records none.

        With adapters it is the adapter's name, or "" where the server does not have that adapter.
        """

    def tokenize(self, text: str) -> list[int] | None:
        """Return the server's own tokens of a text; None if it has no tokenizer."""
        body = {"prompt": text, "add_special_tokens": False}
        status, answer = self.ask("POST", "/tokenize", body)
        if status != 200 or not isinstance(answer, dict) or "tokens" not in answer:
            return None
        return list(answer["tokens"])

    @property
    def is_paused(self) -> bool:
        """Return whether it keeps requests waiting, as far as it says so."""
        return False

    @abstractmethod
    def resume(self) -> None:
        """Go on after a pause. Nothing changes for a server that runs."""

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Let the server go on after a pause, also where new weights did not arrive."""
        try:
            yield
        except BaseException:  # memory of the trainer's GPU may be full, or a user interrupts
            with suppress(RolloutError):
                self.resume()
            raise
        self.resume()

    def require_flushed(self, done: bool) -> None:
        """Raise RolloutError if cached keys of the old weights are still there."""
        if not done:
            raise RolloutError(
                f"{self.name} did not drop its prefix cache after new weights, so its next tokens "
                "would rest on keys of the old ones. Start it without a prefix cache "
                "(vLLM: --no-enable-prefix-caching, SGLang: --disable-radix-cache), or restart it."
            )

    # ---------------------------------------------------------------- HTTP

    def ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float = QUICK_S,
    ) -> tuple[int, Any]:
        """Return the status and the JSON value of an answer, or its text if it is none."""
        timeout = urllib3.Timeout(connect=_CONNECT_S, read=timeout_s)
        try:
            # A connection for each call: servers close idle ones, some just as the next call comes.
            with watched_pools(retries=False) as http:
                answer = http.request(method, self.url + path, json=body, timeout=timeout)
        except urllib3.exceptions.HTTPError as error:
            reason = describe_failure(error)
            raise ServerLostError(
                f"{self.name} does not answer{self._where()}: {reason}"
            ) from error

        text = answer.data.decode("utf-8", "replace")
        try:
            return answer.status, json.loads(text)
        except ValueError:
            return answer.status, text

    def ask_to_draw(self, path: str, body: Mapping[str, Any]) -> tuple[int, Any]:
        """Return what `ask` returns, for a call that takes long. It ends when the server hangs."""
        with self.watch.over_draw():
            return self.ask("POST", path, body, timeout_s=DRAW_S)

    def _ask_for_sign(self, timeout_s: float) -> None:
        """Ask for a sign of life. An answer of any status is one.

        Both dialects answer the path at once, whereas `/health` of SGLang draws a token first, and
        waits 20 s for it.
        """
        self.ask("GET", "/v1/models", timeout_s=timeout_s)

    def _ask_engine(self, timeout_s: float) -> None:
        """Ask the engine for a sign of life. A server without this route has a sign of its own."""
        self.ask("GET", self.engine_path, timeout_s=timeout_s)

    def call(
        self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float = QUICK_S
    ) -> Any:
        """Return the JSON value that a POST answers. Raises RolloutError for another status."""
        content = {} if body is None else body
        status, answer = self.ask("POST", path, content, timeout_s=timeout_s)
        if status != 200:
            raise self.refusal(path, status, answer)
        return answer

    def refusal(self, path: str, status: int, answer: Any) -> RolloutError:
        """Return the error for an error status."""
        return RolloutError(f"{self.name} answered {status} to {path}: {str(answer)[:_SHOWN]}")

    @contextmanager
    def reading(self, path: str, answer: Any) -> Iterator[None]:
        """Raise RolloutError where the block finds an answer in another form than it reads."""
        try:
            yield
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise self.unexpected(path, answer) from error

    def known_reason(self, reason: Any) -> str:
        """Return the finish reason of a draw. Raises RolloutError for one that has no meaning here.

        A trainer would learn from the tokens of such a draw as if it had ended by itself.
        """
        if reason not in FINISH_REASONS:
            raise RolloutError(
                f"{self.name} ended a response with the finish reason {reason!r}; expected one of "
                f"{', '.join(FINISH_REASONS)}. Look into the server's log, and start it without "
                "options that end responses early."
            )
        return reason

    def other_prompt(self, prompt_ids: Sequence[int], count: int | None) -> RolloutError:
        """Return the error for a prompt with pictures that the server reads otherwise.

        Args:
            prompt_ids: the trainer's tokens.
            count: number of the server's; None: it returned none.
        """
        return RolloutError(
            f"{self.name} reads a prompt with pictures as other tokens than the trainer: expected "
            f"{len(prompt_ids)}, got {'none' if count is None else count}. Serve the model with "
            "its own processor files and without a flag that changes them (vLLM: "
            "--mm-processor-kwargs, SGLang: --mm-process-config), by "
            f"{self.title} {self.oldest_with_pictures} or later; or set "
            "actor_rollout_ref.rollout.name=embedded."
        )

    def unexpected(self, path: str, answer: Any) -> RolloutError:
        """Return the error for an answer of another form."""
        return RolloutError(
            f"{self.name} answered {path} in a form that is not {self.title}'s: "
            f"{str(answer)[:_SHOWN]!r}. Check that rollout.name fits the server at this address."
        )

    @property
    def name(self) -> str:
        """Name of the server in messages."""
        return f"{self.title} at {self.url}"

    def _where(self) -> str:
        """Say which machine a loopback address means."""
        host = urlsplit(self.url).hostname or ""
        if is_loopback(host):
            return f" (this loopback address means {socket.gethostname()}, where this worker runs)"
        return ""


def data_url(picture: Picture) -> str:
    """Return a picture as a `data:` URL, which both dialects take."""
    assert picture.png is not None, "the reader keeps images for engines of servers"
    encoded = base64.b64encode(picture.png).decode()
    return f"data:image/png;base64,{encoded}"


def flags_of(options: Mapping[str, Any]) -> list[str]:
    """Return command-line flags: {"max_model_len": 8, "enforce_eager": True} for example.

    A list becomes a word for each item, and a mapping becomes JSON.
    """
    flags = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        flags.append("--" + name.replace("_", "-"))
        if isinstance(value, Mapping):
            flags.append(json.dumps(dict(value)))
        elif isinstance(value, Sequence) and not isinstance(value, str):
            flags += [str(item) for item in value]
        elif value is not True:
            flags.append(str(value))
    return flags
