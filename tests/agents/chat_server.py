"""A small server with OpenAI's chat/completions, which notes its requests."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Chat(BaseHTTPRequestHandler):
    """Answers chat/completions with the model and the seed that were asked for."""

    asked: list[dict[str, Any]]
    answer: dict[str, Any] | None = None
    status = 200

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append({"path": self.path, "key": self.headers["Authorization"], **body})
        reply = {"choices": [{"message": {"content": f"{body['model']} {body['seed']}"}}]}
        data = json.dumps(self.answer or reply).encode()
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serving() -> Iterator[tuple[str, type[Chat]]]:
    """Serve, and give the base URL and the handler with its requests."""
    handler = type("OneChat", (Chat,), {"asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", handler
    finally:
        server.shutdown()
        server.server_close()
