"""Connections to MCP servers, of the JSON file that a tool configuration names.

All connections live in an event loop of their own, whatever loop uses them.
"""

import asyncio
import concurrent.futures
import contextlib
import importlib.metadata
import logging
import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from verl.agents.tools.base import ToolArgumentError, ToolTimeoutError
from verl.agents.tools.mcp_servers import read_servers, transport_of
from verl.agents.tools.rate_limit import RateLimit
from verl.utils.deadline import time_left
from verl.utils.errors import ConfigError, DataError, MissingDependencyError, describe_error
from verl.utils.imports import require
from verl.utils.logging import say_once
from verl.utils.registry import nearest_names
from verl.utils.threads import LoopThread

START_TIMEOUT_S = 60.0
# A call stops waiting for a server so long before its own deadline, to say why it failed.
_TO_ANSWER_S = 0.5
INSTALL = "pip install 'verl[mcp]'"
_Schemas = dict[str, dict[str, Any]]  # by tool


class McpToolError(RuntimeError):
    """A server answered that a call failed."""


class MCPClientManager:
    """Connections to servers, opened when they are first used and again after they were lost."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: LoopThread | None = None
        self._servers: dict[tuple[str, str], _Server] = {}  # by file and name
        self._homes: dict[str, _Server] = {}  # by tool
        self._rates: dict[str, RateLimit] = {}  # by tool

    async def initialize(self, config_path: str | Path, rate_limit: float = 10.0) -> None:
        """Connect to the servers of a file.

        Args:
            rate_limit: calls that begin in a second, at most.

        Raises:
            ConfigError: the file is wrong, or a server cannot be reached.
        """
        await asyncio.wrap_future(self._connect(config_path, rate_limit))

    async def fetch_tool_schemas(
        self, tool_selected_list: Sequence[str] | None = None
    ) -> list[dict[str, Any]]:
        """Return the schemas of all tools, or of those that are named, as plain values.

        Raises:
            ConfigError: no server has one of the names.
        """
        return self._schemas(tool_selected_list)

    async def call_tool(
        self, tool_name: str, parameters: dict[str, Any], timeout: float | None = None
    ) -> Any:
        """Make a call and return the server's result, with `content` and `is_error`.

        A lost server is started again. The start goes on when this call ends, for later calls.

        Args:
            timeout: seconds, for a start of the server and for its answer each.

        Raises:
            ToolTimeoutError: no answer in time, or a lost server is not ready in time.
            ToolArgumentError: the server says that the arguments are invalid.
            McpToolError: another error of the server, or no connection.
            DataError: no server has the tool.
        """
        server = self._homes.get(tool_name)
        if server is None:
            raise DataError(
                f"No MCP server has the tool '{tool_name}'. Nearest known: "
                f"{nearest_names(tool_name, list(self._homes))}."
            )
        await asyncio.sleep(self._rates[tool_name].reserve())
        call = server.call(tool_name, parameters, timeout)
        return await asyncio.wrap_future(self._running().submit(call))

    def fits(self, tool_name: str, parameters: dict[str, Any]) -> bool:
        """Return whether arguments fit the schema that the server gave for a tool."""
        jsonschema = _library("jsonschema")
        schema = self._homes[tool_name].schemas[tool_name]["function"]["parameters"]
        try:
            return jsonschema.Draft202012Validator(schema).is_valid(parameters)
        except Exception:  # noqa: BLE001  (the server's schema is no schema: nothing can be said)
            return True

    def connect(
        self, config_path: str | Path, rate_limit: float, selected: Sequence[str] | None
    ) -> list[dict[str, Any]]:
        """Connect to the servers of a file and return the schemas of their tools. Waits.

        Raises:
            ConfigError: as `initialize` and `fetch_tool_schemas`; or two servers have one tool.
        """
        self._connect(config_path, rate_limit).result()
        return self._schemas(selected)

    def close(self) -> None:
        """End all connections, and the servers that were started. The next use opens them again."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is None:
            return
        for server in self._servers.values():
            with contextlib.suppress(concurrent.futures.TimeoutError):  # it is ended all the same
                loop.submit(server.disconnect()).result(timeout=10)
        loop.close()

    def _running(self) -> LoopThread:
        with self._lock:
            if self._loop is None:
                self._loop = LoopThread("verl-mcp")
            return self._loop

    def _schemas(self, selected: Sequence[str] | None) -> list[dict[str, Any]]:
        names = list(self._homes) if selected is None else selected
        for name in names:
            if name not in self._homes:
                raise ConfigError(
                    f"mcp.tool_selected_list names '{name}', which no server of the file has. "
                    f"Nearest known: {nearest_names(name, list(self._homes))}."
                )
        return [self._homes[name].schemas[name] for name in names]

    def _connect(
        self, config_path: str | Path, rate_limit: float
    ) -> "concurrent.futures.Future[None]":
        mcp = _library("mcp")
        if not hasattr(mcp, "Client"):
            found = importlib.metadata.version("mcp")
            raise MissingDependencyError(
                f"Tools of MCP servers need the package 'mcp' in version 2 or later, found {found}. "
                f"Install it: {INSTALL}"
            )
        configs = read_servers(config_path)
        return self._running().submit(self._connect_all(str(config_path), configs, rate_limit))

    async def _connect_all(
        self, path: str, configs: dict[str, dict[str, Any]], rate_limit: float
    ) -> None:
        servers = []
        for name, config in configs.items():
            server = self._servers.get((path, name))
            if server is None or server.config != config:
                server = self._servers[path, name] = _Server(f"{path}, {name}", config)
            servers.append(server)
        connecting = [asyncio.ensure_future(server.connect()) for server in servers]
        try:
            await asyncio.gather(*connecting)
        finally:
            for task in connecting:
                task.cancel()  # where one has failed, the others may still wait for their servers

        rate = RateLimit(rate_limit)
        for server in servers:
            for tool in server.schemas:
                if self._homes.setdefault(tool, server) is not server:
                    raise ConfigError(
                        f"{server.place}: another server has a tool '{tool}' as well "
                        f"({self._homes[tool].place}). Configure one of them."
                    )
                self._rates[tool] = rate


class _Server:
    """One server and its connection. Used from one event loop."""

    def __init__(self, place: str, config: dict[str, Any]) -> None:
        self.place = place
        self.schemas: _Schemas = {}
        self.config = config
        self._client: Any = None
        self._closing: asyncio.Event | None = None
        self._serving: asyncio.Task[None] | None = None
        self._connecting = asyncio.Lock()
        self._restart: asyncio.Task[Any] | None = None

    async def connect(self) -> Any:
        """Open the connection unless it is, read which tools the server has, return the client.

        A start ends where this is cancelled.

        Raises:
            ConfigError: the server cannot be reached, or gives no list of its tools in time.
        """
        async with self._connecting:
            if self._client is not None:
                return self._client

            ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            self._closing = asyncio.Event()
            # The client must be closed by the task that opened it.
            self._serving = asyncio.ensure_future(self._serve(ready, self._closing))

            try:
                self._client = await asyncio.wait_for(ready, START_TIMEOUT_S)
            except Exception as error:
                reason = _no_connection(error, self.config)
                raise ConfigError(f"{self.place}: {reason}") from error
            finally:
                if self._client is None:  # also where the caller was cancelled
                    self._serving.cancel()  # it may wait for the server
            return self._client

    async def disconnect(self) -> None:
        """Close the connection, and end a start that is under way."""
        self._client = None
        if self._restart is not None:
            self._restart.cancel()
            self._restart = None  # the next use may have another loop
        if self._closing is not None and self._serving is not None:
            self._closing.set()
            await asyncio.wait({self._serving}, timeout=5)

    async def call(self, tool: str, parameters: dict[str, Any], timeout: float | None) -> Any:
        """Make a call; one that finds the connection lost is made once more."""
        for is_last in (False, True):
            client = self._client
            if client is None:
                client = await self._start_again(timeout)

            try:
                return await client.call_tool(tool, parameters, read_timeout_seconds=timeout)
            except Exception as error:
                if is_last or not _is_lost(error):
                    raise _failure(error, tool, timeout) from error
                if self._client is client:
                    await self.disconnect()
        raise AssertionError("the loop above returns or raises")

    async def _start_again(self, timeout: float | None) -> Any:
        """Wait for a lost server, which is started unless it starts already. Returns its client.

        The start is a task of its own, and not of the call that needs it first. A server that
        starts more slowly than a call may take would otherwise never be ready.

        Raises:
            ToolTimeoutError: it is not ready in time.
            McpToolError: it cannot be reached.
        """
        if self._restart is None or self._restart.done():
            self._restart = asyncio.ensure_future(self.connect())
            self._restart.add_done_callback(_report_failure)
        restart = self._restart
        name = self.place.rpartition(", ")[2]

        await asyncio.wait({restart}, timeout=_longest_wait_s(timeout))
        if not restart.done():
            say_once(
                f"{self.place}: the MCP server was lost, and takes longer to start again than a "
                "call may wait. Calls of its tools end as timeouts until it is ready.",
                logging.WARNING,
            )
            raise ToolTimeoutError(
                f"the MCP server '{name}' was lost, is starting again, and was not ready in time"
            )
        if restart.cancelled() or restart.exception() is not None:
            raise McpToolError(f"the MCP server '{name}' was lost, and cannot be reached again")
        return restart.result()

    async def _serve(self, ready: "asyncio.Future[Any]", closing: asyncio.Event) -> None:
        try:
            async with contextlib.AsyncExitStack() as stack:
                client = await stack.enter_async_context(self._open(stack))
                self.schemas = await _read_schemas(client)
                if not ready.done():
                    ready.set_result(client)
                await closing.wait()
        except Exception as error:  # noqa: BLE001  (`connect` raises it)
            if not ready.done():
                ready.set_exception(error)

    def _open(self, stack: contextlib.AsyncExitStack) -> Any:
        mcp = _library("mcp")
        config = self.config
        if "command" in config:
            parameters = mcp.StdioServerParameters(
                command=config["command"],
                args=config.get("args") or [],
                env=config.get("env"),
                cwd=config.get("cwd"),
            )
            return mcp.Client(parameters)

        headers = dict(config.get("headers") or {})
        if config.get("auth_token"):
            headers["Authorization"] = f"Bearer {config['auth_token']}"
        if transport_of(config) == "sse":
            sse = _library("mcp.client.sse")
            return mcp.Client(sse.sse_client(config["url"], headers=headers))
        if not headers:
            return mcp.Client(config["url"])

        http = _library("mcp.client.streamable_http")
        client = http.create_mcp_http_client(headers=headers)
        stack.push_async_callback(client.aclose)
        return mcp.Client(http.streamable_http_client(config["url"], http_client=client))


def _report_failure(restart: "asyncio.Task[Any]") -> None:
    """Log why a server did not start again; its calls would each log the same long chain."""
    if not restart.cancelled() and restart.exception() is not None:
        say_once(f"{restart.exception()} Calls of its tools fail until then.", logging.WARNING)


def _longest_wait_s(timeout: float | None) -> float | None:
    """Return how many seconds a call may wait for a server that starts; None: without an end.

    Args:
        timeout: seconds of the call. The deadline of the tool's call may come before.
    """
    left_s = time_left()
    limit_s = left_s - min(_TO_ANSWER_S, left_s / 4)
    if timeout is not None:
        limit_s = min(limit_s, timeout)
    return None if math.isinf(limit_s) else max(limit_s, 0.0)


def _library(module: str) -> Any:
    return require(module, "A tool of an MCP server", INSTALL)


async def _read_schemas(client: Any) -> _Schemas:
    """Return {tool: schema} of a server, all pages of its list."""
    schemas: _Schemas = {}
    cursor = None
    while True:
        page = await client.list_tools(cursor=cursor)
        for tool in page.tools:
            function = {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": tool.input_schema,
            }
            schemas[tool.name] = {"type": "function", "function": function}

        cursor = page.next_cursor
        if not cursor:
            return schemas


def _failure(error: Exception, tool: str, timeout: float | None) -> Exception:
    """Return the error of a call: late, refused for its arguments, or failed."""
    types = _library("mcp_types")
    if _code(error) == types.REQUEST_TIMEOUT and timeout is not None:
        return ToolTimeoutError(f"the tool '{tool}' did not answer within {timeout:g} s")
    if _code(error) == types.INVALID_PARAMS:
        return ToolArgumentError(str(error))
    if isinstance(error, ValidationError):
        return McpToolError(f"the server breaks the protocol: {_first_problem(error)}")
    return McpToolError(_cause(error))


def _code(error: Exception) -> int | None:
    """Return the number of an error that the server or its connection answered."""
    return getattr(getattr(error, "error", None), "code", None)


def _first_problem(error: ValidationError) -> str:
    """Return place and reason of the first field that does not fit the protocol."""
    problem = error.errors()[0]
    place = ".".join(map(str, problem["loc"]))
    return f"{error.title}, {place}: {problem['msg']}"


def _is_lost(error: Exception) -> bool:
    """Whether a call failed because the connection was lost, not by the server's answer."""
    types = _library("mcp_types")
    anyio = _library("anyio")
    if _code(error) == types.CONNECTION_CLOSED:
        return True
    return isinstance(error, (OSError, anyio.ClosedResourceError, anyio.BrokenResourceError))


def _no_connection(error: BaseException, config: dict[str, Any]) -> str:
    """Return the reason why a server gave no list of its tools, and the way out."""
    first = _first(error)
    if isinstance(first, ValidationError):
        return f"the MCP server breaks the protocol: {_first_problem(first)}. Correct the server."

    is_late = isinstance(first, (TimeoutError, asyncio.TimeoutError))  # one from Python 3.11 on
    reason = f"the MCP server cannot be reached: {_cause(first)}"
    if is_late:
        reason = f"the MCP server did not list its tools within {START_TIMEOUT_S:g} s"
    if "command" not in config:
        return f"{reason}. Start it, or correct its entry."
    return f"{reason}. {_correct_command(first, config, is_late=is_late)}"


def _correct_command(error: BaseException, config: dict[str, Any], *, is_late: bool) -> str:
    """Return the way out for a server whose program was started here, or could not be."""
    if isinstance(error, FileNotFoundError) and len(config["command"].split()) > 1:
        return "Write the program alone as command, and its arguments as the list args."
    if isinstance(error, OSError) and not is_late:
        return "Correct command, or cwd, of its entry."
    if is_late:
        return "Run its command by hand: its standard output may have messages of MCP alone."
    return "Its program ended, and its standard error says why. Run its command by hand."


def _first(error: BaseException) -> BaseException:
    """Return the error itself, or the first one in a group of errors."""
    while isinstance(getattr(error, "exceptions", None), Sequence):
        error = error.exceptions[0]  # pyright: ignore[reportAttributeAccessIssue]
    return error


def _cause(error: BaseException) -> str:
    """Return class and text of an error, or of the first one in a group of errors."""
    return describe_error(_first(error))


# Connections that a program of the user's makes itself; an entry of a configuration has its own.
ClientManager = MCPClientManager()
