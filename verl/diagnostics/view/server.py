"""Serve the page of `verl view` on this machine alone."""

import hmac
import json
import secrets
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from verl.diagnostics.view.answers import Answers
from verl.diagnostics.view.page import live_page
from verl.utils.errors import ConfigError, VerlError

HOST = "127.0.0.1"
_LAST_PORT = 65535
_TOKEN_HEADER = "X-Verl-Token"


class ViewServer(ThreadingHTTPServer):
    """A server on the loopback interface. Every request needs the token of `url`.

    Args:
        answers: answers the page's questions.
        port: 0 takes a free one.

    Raises:
        ConfigError: the port is out of range, or cannot be used.
    """

    daemon_threads = True

    def __init__(self, answers: Answers, port: int = 0) -> None:
        if not 0 <= port <= _LAST_PORT:
            raise ConfigError(
                f"Expected a port from 0 to {_LAST_PORT}, got {port}. Leave --port out to take a "
                "free one."
            )
        self.answers = answers
        self.token = secrets.token_urlsafe(24)
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise ConfigError(
                f"Port {port} cannot be used ({error.strerror}). Choose another one, or leave "
                "--port out to take a free one."
            ) from error

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the traceback of a request that failed, unless the browser has left.

        A tab that is closed or loaded again does not wait for its answers.
        """
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        """Return the address to open."""
        return f"http://{HOST}:{self.server_port}/?token={self.token}"

    def allows(self, host: str | None, origin: str | None, token: str | None) -> bool:
        """Check a request: sent to this address, by our page or by no page, with the token.

        A foreign page that resolves its own name to this machine sends that name as host.
        """
        names = (f"{HOST}:{self.server_port}", f"localhost:{self.server_port}")
        own_origins = [f"http://{name}" for name in names]
        if host not in names or (origin is not None and origin not in own_origins):
            return False
        return token is not None and hmac.compare_digest(token.encode(), self.token.encode())


class _Handler(BaseHTTPRequestHandler):
    server: ViewServer  # pyright: ignore[reportIncompatibleVariableOverride]
    server_version = "verl"
    sys_version = ""

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        in_url = parse_qs(address.query).get("token", [None])[0]
        token = self.headers.get(_TOKEN_HEADER) or in_url
        if not self.server.allows(self.headers["Host"], self.headers["Origin"], token):
            self._reply(403, "text/plain", b"Open the address that verl view printed.\n")
        elif address.path == "/":
            policy, page = live_page()
            self._reply(200, "text/html", page.encode(), policy)
        elif address.path.startswith("/api/"):
            self._answer(address.path.removeprefix("/api/"))
        else:
            self._reply(404, "text/plain", b"There is no such page.\n")

    def _answer(self, question: str) -> None:
        try:
            answer: Any = self.server.answers.answer(question)
            status = 200
        except VerlError as error:
            answer = {"error": str(error)}
            status = 404
        self._reply(status, "application/json", json.dumps(answer).encode())

    def _reply(
        self, status: int, kind: str, body: bytes, policy: str = "default-src 'none'"
    ) -> None:
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cache-Control": "no-store",
        }

        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Keep requests, which hold the token, out of the terminal."""
