"""HTTP connections that another thread can break off, which ends any wait on them."""

import contextlib
import re
import socket
from contextvars import ContextVar
from typing import Any, Protocol

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection

# A connection or its pool, in the messages of urllib3: HTTPConnection(host='a', port=80)
_CONNECTION = re.compile(r"\b\w+\(host='[^']*', port=\w+\): ")


class Breakable(Protocol):
    """A wait for an answer, such as one on a connection."""

    def break_off(self) -> None:
        """End the wait, from another thread than the one that waits."""
        ...


class Exchange(Protocol):
    """A request and its answer, under the eyes of another thread."""

    def begin_attempt(self, connection: Breakable) -> None:
        """Note the connection, before a request is sent on it."""
        ...

    def check_connected(self) -> None:
        """Raise if the exchange was broken off before the connection had a socket."""
        ...


# The exchange of this thread. Without one, connections are ordinary ones.
exchange_here: ContextVar[Exchange | None] = ContextVar("exchange", default=None)


class WatchedConnection:
    """A connection with requests that can be broken off."""

    sock: Any
    # The connection drops its socket before an answer without a length has been read.
    _last_sock: Any = None

    def connect(self) -> None:
        super().connect()  # pyright: ignore[reportAttributeAccessIssue]
        self._last_sock = self.sock
        exchange = exchange_here.get()
        if exchange is not None:
            exchange.check_connected()

    def request(self, *args: Any, **options: Any) -> None:
        exchange = exchange_here.get()
        if exchange is not None:
            exchange.begin_attempt(self)
        super().request(*args, **options)  # pyright: ignore[reportAttributeAccessIssue]

    def break_off(self) -> None:
        """Shut the socket down, while another thread reads from it."""
        if self._last_sock is None:
            return
        # The peer may have closed it, or the reader may just have finished.
        with contextlib.suppress(OSError):
            self._last_sock.shutdown(socket.SHUT_RDWR)


class _WatchedHTTP(WatchedConnection, HTTPConnection):
    """HTTP that can be broken off."""


class _WatchedHTTPS(WatchedConnection, HTTPSConnection):
    """HTTPS that can be broken off."""


class _HTTPPool(urllib3.HTTPConnectionPool):
    ConnectionCls = _WatchedHTTP  # pyright: ignore[reportAssignmentType]


class _HTTPSPool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _WatchedHTTPS  # pyright: ignore[reportAssignmentType]


def watched_pools(**options: Any) -> urllib3.PoolManager:
    """Return a `urllib3.PoolManager` of watched connections."""
    manager = urllib3.PoolManager(**options)
    manager.pool_classes_by_scheme = {"http": _HTTPPool, "https": _HTTPSPool}
    return manager


def describe_failure(error: Exception) -> str:
    """Return the reason of an error without the connection and its pool, which urllib3 names."""
    reason: Any = error
    while isinstance(reason, urllib3.exceptions.MaxRetryError) and reason.reason is not None:
        reason = reason.reason
    text = str(reason)
    if len(reason.args) == 2 and isinstance(reason.args[1], str):
        text = reason.args[1]  # (connection, text)
    return _CONNECTION.sub("", text).rstrip(".")
