"""The HTTP server, on aiohttp, within an event loop that runs already."""

import asyncio
import errno
import json
import secrets
import socket
import traceback
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from verl.agents.gateway.backend import Backend, Listen
from verl.agents.gateway.errors import ApiError, unknown_model
from verl.agents.gateway.requests import ChatRequest, CompletionRequest
from verl.agents.gateway.responses import ChatFormat, CompletionFormat
from verl.agents.gateway.wording import Reply, TextStream
from verl.utils.errors import ConfigError
from verl.utils.logging import logger

_MIB = 2**20
_STOP_GRACE_S = 2.0
_CLIENT_LEFT = 499  # nginx' status for a client that closed its connection

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Ask = Callable[[Listen | None], Awaitable[list[Reply]]]  # the listener hears tokens as they come


class GatewayServer:
    """Serves a backend under OpenAI's addresses.

    Requests go to `/v1/...`, or to `/sessions/NAME/v1/...` for those of a session. Bound to this
    machine alone unless `host` says otherwise. Web pages cannot use it: a request with the header
    Origin of another site is refused, and no answer allows one.

    Args:
        backend: answers the requests.
        host: address to bind.
        port: 0 takes a free one.
        max_request_mib: largest body of a request.
        timeout_s: longest time for an answer.
        read_timeout_s: longest time for a client to send its request.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        max_request_mib: float = 16.0,
        timeout_s: float = 600.0,
        read_timeout_s: float = 30.0,
    ) -> None:
        self.backend = backend
        self.host = host
        self.port = port
        self.timeout_s = timeout_s
        self.read_timeout_s = read_timeout_s

        self._max_bytes = int(max_request_mib * _MIB)
        self._runner: web.AppRunner | None = None
        self._working: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Address of the server, without a path."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def session_url(self, session: str) -> str:
        """Return the base URL of a session, as clients take it."""
        return f"{self.url}/sessions/{session}/v1"

    async def start(self) -> None:
        """Listen. Sets `port` where a free one was asked for."""
        app = web.Application(middlewares=[self._answer_errors], client_max_size=self._max_bytes)
        app.router.add_get("/health", self._health)
        for prefix in ("", "/sessions/{session}"):
            app.router.add_get(f"{prefix}/v1/models", self._models)
            app.router.add_get(f"{prefix}/v1/models/{{model:.+}}", self._model)
            app.router.add_post(f"{prefix}/v1/chat/completions", self._chat)
            app.router.add_post(f"{prefix}/v1/completions", self._complete)
            app.router.add_route("*", f"{prefix}/v1/responses{{rest:.*}}", self._refuse_responses)

        # A client that hangs up cancels its request.
        runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=_STOP_GRACE_S
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, self.host, self.port).start()
        except OSError as error:
            await runner.cleanup()
            raise _not_free(self.host, self.port, error) from error
        self._runner = runner
        self.port = runner.addresses[0][1]
        self._working = asyncio.ensure_future(self.backend.run())

    async def stop(self) -> None:
        """Refuse new requests, give running ones a moment, and abort the rest."""
        runner = self._runner
        working = self._working
        self._runner = None
        self._working = None
        if runner is not None:
            await runner.cleanup()
        if working is not None:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    async def run_until(self, stopped: asyncio.Event) -> None:
        """Serve until the event is set. Raises an error that ends the backend's own work."""
        assert self._working is not None, "start comes first"
        waiting = asyncio.ensure_future(stopped.wait())
        try:
            await asyncio.wait({waiting, self._working}, return_when=asyncio.FIRST_COMPLETED)
            if self._working.done():
                self._working.result()
        finally:
            waiting.cancel()

    async def __aenter__(self) -> "GatewayServer":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    # ---------------------------------------------------------------- routes

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _models(self, request: web.Request) -> web.Response:
        self._admit(request)
        return web.json_response({"object": "list", "data": [self._description()]})

    async def _model(self, request: web.Request) -> web.Response:
        self._admit(request)
        name = request.match_info["model"]
        if name != self.backend.model:
            raise unknown_model(name, self.backend.model)
        return web.json_response(self._description())

    async def _refuse_responses(self, request: web.Request) -> web.Response:
        """Say how a client comes to the API that is served; the newest ones start with another."""
        raise ApiError(
            "The Responses API is not served; chat/completions is. Tell the client to use it: "
            "client.chat.completions.create of openai, set_default_openai_api('chat_completions') "
            "of the Agents SDK, use_responses_api=False of LangChain.",
            status=404,
            code="unsupported_api",
        )

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._respond(request, ChatRequest, ChatFormat, self.backend.chat)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        complete = self.backend.complete
        return await self._respond(request, CompletionRequest, CompletionFormat, complete)

    # ---------------------------------------------------------------- inner parts

    def _description(self) -> dict[str, Any]:
        return {"id": self.backend.model, "object": "model", "created": 0, "owned_by": "verl"}

    async def _respond(
        self,
        request: web.Request,
        kind: type[ChatRequest | CompletionRequest],
        format_class: type[ChatFormat],
        answer: Callable[..., Awaitable[list[Reply]]],
    ) -> web.StreamResponse:
        """Answer with all replies of the backend, as a stream or as a whole.

        Args:
            kind: reads the request.
            format_class: writes the replies.
            answer: the backend's method for such requests.
        """
        session = self._admit(request)
        backend = self.backend
        asked = kind.read(await self._body(request), lenient=backend.is_lenient)
        form = format_class(secrets.token_hex(12), backend.model, asked.output, backend.wording)
        ask = partial(answer, session, asked)
        if not asked.output.stream:
            replies = await self.within_time(ask())
            return web.json_response(form.whole(replies))

        # A reply with tools is read as a whole: its text may turn out to be a call.
        stops = backend.stops(asked.draw)
        return await _Exchange(self, request, form, stops, by_piece=not asked.tools).run(ask)

    async def within_time(self, answer: Awaitable[list[Reply]]) -> list[Reply]:
        """Await an answer. Raises ApiError when it takes too long."""
        try:
            return await asyncio.wait_for(answer, self.timeout_s)
        except asyncio.TimeoutError as error:
            raise ApiError(
                f"The answer took longer than {self.timeout_s:g} s. Ask for fewer tokens.",
                status=504,
            ) from error

    def _admit(self, request: web.Request) -> str | None:
        kind, _, key = request.headers.get("Authorization", "").partition(" ")
        if kind.lower() != "bearer":
            key = ""
        return self.backend.admit(key.strip(), request.match_info.get("session"))

    async def _body(self, request: web.Request) -> bytes:
        try:
            return await asyncio.wait_for(request.read(), self.read_timeout_s)
        except asyncio.TimeoutError as error:
            raise ApiError(
                f"The request did not arrive within {self.read_timeout_s:g} s.", status=408
            ) from error

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer every error in the shape of the API."""
        try:
            _refuse_other_sites(request)
            return await handler(request)
        except ApiError as error:
            return error_response(error)
        except web.HTTPRequestEntityTooLarge:
            limit = self._max_bytes / _MIB
            message = f"The request has more than {limit:g} MiB. Send a shorter conversation."
            return error_response(ApiError(message, status=413))
        except web.HTTPNotFound:
            message = (
                f"{request.method} {request.path} is no address of this server. POST "
                "/v1/chat/completions is one: the base URL of a client ends with /v1."
            )
            return error_response(ApiError(message, status=404))
        except web.HTTPException as error:
            message = f"{request.method} {request.path}: {error.reason}."
            return error_response(ApiError(message, status=error.status))
        except Exception as error:  # noqa: BLE001 - one request must not end the server
            if _has_left(request, error):
                return web.Response(status=_CLIENT_LEFT)  # which is not sent
            return error_response(unexpected(error))


class _Exchange:
    """A streamed answer: server-sent events, one for each piece of text."""

    def __init__(
        self,
        server: GatewayServer,
        request: web.Request,
        form: ChatFormat,
        stops: tuple[str, ...],
        *,
        by_piece: bool,
    ) -> None:
        self._server = server
        self._request = request
        self._form = form
        self._stops = stops
        self._by_piece = by_piece

        self._news: asyncio.Queue[Any] = asyncio.Queue()
        self._texts: dict[int, TextStream] = {}
        self._heard: dict[int, int] = {}  # tokens of each choice that were sent
        self._response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )

    async def run(self, ask: Ask) -> web.StreamResponse:
        """Send pieces while they come, then the ends of all choices.

        An error before the first piece is a plain error response.
        """
        hear = self._hear if self._by_piece else None
        answer = asyncio.ensure_future(self._server.within_time(ask(hear)))
        answer.add_done_callback(lambda _: self._news.put_nowait(None))

        try:
            while True:
                news = await self._news.get()
                if news is None:
                    break
                await self._send_piece(*news)
            await self._send_ends(await answer)
        except Exception as error:
            if not self._response.prepared or _has_left(self._request, error):
                raise
            known = error if isinstance(error, ApiError) else unexpected(error)
            await self._send(known.body())
        finally:
            answer.cancel()

        await self._response.write_eof()
        return self._response

    def _hear(self, number: int, token_ids: Any, log_probs: Any) -> None:
        self._news.put_nowait((number, token_ids, log_probs))

    async def _send_piece(self, number: int, token_ids: Any, log_probs: Any) -> None:
        await self._begin(number)
        self._heard[number] += len(token_ids)
        text = self._texts[number].push(token_ids)
        if text or self._form.output.log_probs or self._form.output.token_ids:
            await self._send(self._form.piece(number, text, token_ids, log_probs))

    async def _send_ends(self, replies: list[Reply]) -> None:
        for number, reply in enumerate(replies):
            await self._begin(number)
            known = self._heard[number]
            token_ids = list(reply.token_ids[known:])
            rest = self._texts[number].finish(reply.content)
            if rest or token_ids:
                log_probs = list(reply.log_probs[known:])
                await self._send(self._form.piece(number, rest, token_ids, log_probs))
            for chunk in self._form.last(number, reply):
                await self._send(chunk)

        if self._form.output.include_usage:
            await self._send(self._form.usage(replies))
        await self._response.write(b"data: [DONE]\n\n")

    async def _begin(self, number: int) -> None:
        if number in self._texts:
            return
        self._texts[number] = TextStream(self._server.backend.wording, self._stops)
        self._heard[number] = 0
        await self._send(self._form.first(number))

    async def _send(self, chunk: dict[str, Any]) -> None:
        if not self._response.prepared:
            await self._response.prepare(self._request)
        await self._response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")


def check_address(host: str, port: int) -> None:
    """Raise ConfigError if a server cannot listen at this address now. Port 0: any free port."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:  # the name is unknown
        raise _not_free(host, port, error) from error

    failures: list[OSError] = []
    for family, _, _, _, address in addresses:
        try:
            socket.create_server(address[:2], family=family).close()
            return
        except OSError as error:
            failures.append(error)
    raise _not_free(host, port, failures[-1]) from failures[-1]


def _not_free(host: str, port: int, error: OSError) -> ConfigError:
    """Return the error of an address at which a server cannot listen."""
    way_out = "Choose another port, or 0 for a free one."
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        way_out = (
            "The host must be a name or an address of this machine, such as 127.0.0.1, or 0.0.0.0 "
            "for all of its addresses."
        )
    return ConfigError(f"Cannot listen on {host}:{port}: {error.strerror or error}. {way_out}")


def error_response(error: ApiError) -> web.Response:
    """Return an error in the shape of the API."""
    return web.json_response(error.body(), status=error.status)


def _has_left(request: web.Request, error: Exception) -> bool:
    """Return whether an error shows that the client has hung up, which is no failure of ours."""
    is_closed = request.transport is None or request.transport.is_closing()
    return is_closed and isinstance(error, ConnectionError)


def unexpected(error: Exception) -> ApiError:
    """Log an error that no request should cause. Return the error for the client."""
    trace = "".join(traceback.format_exception(error))
    logger.error("The gateway failed on a request:\n%s", trace)
    return ApiError("The server failed on this request; its log has the error.", status=500)


def _refuse_other_sites(request: web.Request) -> None:
    """Raise ApiError for a request that the page of another site makes in a browser."""
    origin = request.headers.get("Origin")
    if origin is not None and urlsplit(origin).netloc != request.host:
        raise ApiError(
            "Requests of web pages are refused. Send the request from a program.", status=403
        )
