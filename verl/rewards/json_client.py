"""Post JSON to a service and read a bounded answer within a bounded time.

Lost connections and the statuses 429, 500, 502, 503 and 504 are retried after growing waits, or
after the time that Retry-After states. At most `max_concurrent` requests are in flight, so a slow
service slows the run down and is not flooded.
"""

import contextlib
import json
import math
import os
import random
import re
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import urllib3

from verl.config.reward import RequestsConfig
from verl.utils.addresses import is_http
from verl.utils.deadline import call_ends, seconds_until
from verl.utils.errors import ConfigError, RewardError
from verl.utils.watched_http import Breakable, describe_failure, exchange_here, watched_pools

MAX_ANSWER_BYTES = 16 * 1024**2
_CHUNK_BYTES = 64 * 1024
_RETRIED = (429, 500, 502, 503, 504)
_LONGEST_BACKOFF_S = 60.0
_CONNECT_TIMEOUT_S = 10.0


def authorization(section: str, variable: str | None) -> dict[str, str]:
    """Return the header with the key of a service, or none.

    Args:
        section: of the configuration that names the variable as `api_key_env`, for errors.
        variable: of the environment, which holds the key; None for a service without one.

    Raises:
        ConfigError: the variable is not set, or a header cannot carry its value.
    """
    if variable is None:
        return {}
    if variable not in os.environ:
        raise ConfigError(
            f"{section}.api_key_env={variable}: no such environment variable. Export the key, or "
            "unset api_key_env for a service without one."
        )
    key = os.environ[variable].strip()  # a key that was read from a file ends with a line break
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(
            f"{section}.api_key_env={variable}: the key must be one line of ASCII characters, as "
            "the header of a request needs, but the variable holds others. Export the key again."
        )
    return {"Authorization": f"Bearer {key}"}


def chat_advice(section: str, url: str, variable: str | None) -> dict[int, str]:
    """Return the ways out, by status, where a server with OpenAI's API refuses a request.

    Args:
        section: of the configuration with the keys `url`, `model` and `api_key_env`.
        url: the address.
        variable: value of `api_key_env`.
    """
    if variable is None:
        key = f"Set {section}.api_key_env to the environment variable that holds the server's key"
    else:
        key = f"Correct the key in the environment variable {variable} ({section}.api_key_env)"

    base = url.rstrip("/").removesuffix("/chat/completions")
    if re.search(r"/v\d", base):
        place = f"Correct {section}.url or {section}.model, which the server does not have"
    else:
        place = f"Most servers have the API under /v1: set {section}.url={base}/v1"
    return {401: key, 403: key, 404: place, 405: place}


class JsonClient:
    """Post JSON to one service, from any number of threads; those beyond `max_concurrent` wait.

    A request may take `requests.timeout_s` from its first byte to the last byte of its answer. The
    retries end at the deadline of the reward call that they are made for.

    Args:
        key: name of the configuration key that holds the address, for errors.
        advice: the way out for an answer with an error status, by status.
        wait_for_turn: called before each request of a post, also before a retry, as by a limit on
            requests in a second.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str,
        max_concurrent: int,
        requests: RequestsConfig,
        headers: Mapping[str, str] | None = None,
        advice: Mapping[int, str] | None = None,
        wait_for_turn: Callable[[], None] = lambda: None,
    ) -> None:
        if not is_http(url):
            raise ConfigError(f"{key} must be an address such as http://host:8080, got {url!r}.")

        self.url = url.rstrip("/")
        self.key = key
        self.requests = requests
        self._advice = advice or {}
        self._wait_for_turn = wait_for_turn
        self._http = watched_pools(
            maxsize=max_concurrent,
            block=True,  # a thread waits for a free connection
            timeout=urllib3.Timeout(
                connect=min(_CONNECT_TIMEOUT_S, requests.timeout_s), read=requests.timeout_s
            ),
            headers=dict(headers or {}),
        )

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the JSON object that the service answers.

        Raises:
            RewardError: no answer after all retries or within the deadline, an error status, an
                answer of more than MAX_ANSWER_BYTES, or an answer that is no JSON object.
        """
        address = f"{self.url + path} ({self.key})"
        try:
            with self._watched(self.requests.max_retries) as exchange:
                self._wait_for_turn()
                status, data = self._exchange(self.url + path, exchange, body)
        except (urllib3.exceptions.HTTPError, zlib.error) as error:
            raise RewardError(
                f"{address} gave no answer: {describe_failure(error)[:500]}"
            ) from error

        text = data.decode("utf-8", "replace")
        if status != 200:
            advice = f". {self._advice[status]}" if status in self._advice else ""
            raise RewardError(f"{address} answered {status}: {text[:300]!r}{advice}")
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise RewardError(f"{address} did not answer a JSON object: {text[:300]!r}")
        return value

    def check_reachable(self) -> None:
        """Raise ConfigError unless the service answers; any answer counts."""
        try:
            with self._watched(max_retries=0) as exchange:
                self._http.request(
                    "GET", self.url, retries=exchange.retries, preload_content=False, redirect=False
                ).close()
        except (urllib3.exceptions.HTTPError, RewardError) as error:
            raise ConfigError(
                f"{self.key}={self.url} cannot be reached: {describe_failure(error)}. Start the "
                "service, or correct the address."
            ) from error

    @contextlib.contextmanager
    def _watched(self, max_retries: int) -> Iterator["_Exchange"]:
        """Yield an exchange that watches the connections of this thread."""
        exchange = _Exchange(self.requests, max_retries, self._wait_for_turn)
        token = exchange_here.set(exchange)
        try:
            yield exchange
        finally:
            exchange.end_attempt()
            exchange_here.reset(token)

    def _exchange(
        self, url: str, exchange: "_Exchange", body: Mapping[str, Any]
    ) -> tuple[int, bytes]:
        retries = exchange.retries
        while True:
            answer = self._http.request(
                "POST",
                url,
                json=body,
                retries=retries,
                preload_content=False,
                pool_timeout=exchange.time_left(),
            )

            try:
                return answer.status, _read(answer, exchange)
            except urllib3.exceptions.HTTPError as error:
                retries = answer.retries or retries
                retries = retries.increment("POST", url, error=error)
                retries.sleep()
            finally:
                # After the last byte of an answer, its connection is back in the pool already.
                if not answer.closed:
                    answer.close()


class _Exchange:
    """A post with its retries, and the alarm that ends the current attempt."""

    def __init__(
        self, requests: RequestsConfig, max_retries: int, wait_for_turn: Callable[[], None]
    ) -> None:
        self.requests = requests
        self.wait_for_turn = wait_for_turn
        self.ends = call_ends.get()
        self.attempt_is_late = False
        self.last_fault = ""  # of an attempt that is retried
        self.retries = _retries(self, max_retries)
        self._alarm: threading.Timer | None = None

    def time_left(self) -> float | None:
        """Return the seconds until the reward call is late; None without a deadline."""
        return seconds_until(self.ends)

    def check_deadline(self) -> None:
        """Raise RewardError if the reward call is late."""
        if time.monotonic() >= self.ends:
            raise RewardError("the service did not answer before the deadline of the reward call")

    def begin_attempt(self, connection: Breakable) -> None:
        """Start the alarm of one attempt. It breaks the connection, which ends any wait on it."""
        self.end_attempt()
        self.check_deadline()
        self.attempt_is_late = False
        limit_s = min(self.requests.timeout_s, self.time_left() or math.inf)
        self._alarm = threading.Timer(
            min(limit_s, threading.TIMEOUT_MAX), self._break_off, (connection,)
        )
        self._alarm.daemon = True
        self._alarm.start()

    def check_connected(self) -> None:
        """Raise if the alarm came before there was a socket."""
        self.check_deadline()
        if self.attempt_is_late:
            raise urllib3.exceptions.ProtocolError("the connection took too long")

    def end_attempt(self) -> None:
        """Stop the alarm."""
        if self._alarm is not None:
            self._alarm.cancel()

    def _break_off(self, connection: Breakable) -> None:
        self.attempt_is_late = True
        connection.break_off()


def _retries(exchange: _Exchange, max_retries: int) -> urllib3.Retry:
    requests = exchange.requests

    class Retry(urllib3.Retry):
        """Retries that end with the reward call.

        Retry-After is obeyed up to the time-out of a request. A value that is neither a number of
        seconds nor a date is ignored.
        """

        def increment(self, *args: Any, **options: Any) -> urllib3.Retry:
            exchange.end_attempt()
            more = super().increment(*args, **options)
            response = options.get("response")
            if response is None:
                lost = options.get("error")
                exchange.last_fault = f"did not answer ({type(lost).__name__}: {lost})"
            else:
                exchange.last_fault = f"answered {response.status}"
                response.close()  # urllib3 would read all of it, at any length
            exchange.check_deadline()
            return more

        def get_retry_after(self, response: Any) -> float | None:
            try:
                seconds = super().get_retry_after(response)
            except urllib3.exceptions.InvalidHeader:
                return None
            if seconds is None:
                return None
            return self._in_time(min(seconds, requests.timeout_s))

        def get_backoff_time(self) -> float:
            seconds = super().get_backoff_time()
            if seconds == 0 and self.history and self.history[-1].status is not None:
                # urllib3 repeats once without a wait. That helps after a lost connection, but a
                # service that answered is busy.
                seconds = requests.backoff_s * (1 + random.random())
            return self._in_time(seconds)

        def sleep(self, response: Any = None) -> None:
            super().sleep(response)
            exchange.wait_for_turn()

        def _in_time(self, seconds: float) -> float:
            left = exchange.time_left()
            if left is not None and seconds >= left and exchange.last_fault:
                raise RewardError(
                    f"the service {exchange.last_fault}, and the next attempt, in "
                    f"{seconds:.1f} s, would come after the deadline of the call. Look at the "
                    "service's log, or raise reward_model.timeout_s"
                )
            return seconds if left is None else min(seconds, left)

    return Retry(
        total=max_retries,
        status_forcelist=_RETRIED,
        backoff_factor=requests.backoff_s,
        backoff_max=_LONGEST_BACKOFF_S,
        # Many threads wait for the same service; they must not all retry at once.
        backoff_jitter=requests.backoff_s,
        allowed_methods=None,
        raise_on_status=False,
    )


def _read(answer: urllib3.BaseHTTPResponse, exchange: _Exchange) -> bytes:
    """Read the body and decompress it, each up to MAX_ANSWER_BYTES."""
    body = bytearray()
    while chunk := answer.read(_CHUNK_BYTES, decode_content=False):
        body += chunk
        if len(body) > MAX_ANSWER_BYTES:
            raise _too_long()

    exchange.end_attempt()
    if exchange.attempt_is_late:  # a body without a length looks complete when it is broken off
        exchange.check_deadline()
        raise urllib3.exceptions.ProtocolError(
            f"the answer was not complete after {exchange.requests.timeout_s:g} s"
        )
    return _expanded(bytes(body), answer.headers.get("Content-Encoding", "identity"))


def _expanded(body: bytes, encoding: str) -> bytes:
    if encoding == "identity":
        return body
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise RewardError(
            f"the service answered in the encoding {encoding[:40]!r}, which was not requested; "
            "gzip, deflate or none can be read"
        )
    expander = zlib.decompressobj(zlib.MAX_WBITS | 32)  # detects the gzip and zlib headers
    data = expander.decompress(body, MAX_ANSWER_BYTES)
    if expander.unconsumed_tail:
        raise _too_long()
    return data


def _too_long() -> RewardError:
    return RewardError(
        f"the service answered more than {MAX_ANSWER_BYTES // 1024**2} MiB, the most that is read"
    )
