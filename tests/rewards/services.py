"""Services over HTTP, simulated by a small server in a thread."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from verl.config.reward import RequestsConfig

FAST = RequestsConfig(timeout_s=2.0, max_retries=3, backoff_s=0.01)


class QuietServer(ThreadingHTTPServer):
    """Ignore clients that disconnect: a report would be printed into a later test."""

    def handle_error(self, request: object, client_address: object) -> None: ...


class Service:
    """Answer POSTs with `respond(body)`: (status, headers, JSON), after `delay_s`."""

    def __init__(self, respond) -> None:
        self.respond = respond
        self.requests: list[tuple[str, dict[str, str], Any, float]] = []
        self.delay_s = 0.0
        self.at_once = self.most_at_once = 0
        self._lock = threading.Lock()
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with service._lock:
                    service.at_once += 1
                    service.most_at_once = max(service.most_at_once, service.at_once)
                    service.requests.append((self.path, dict(self.headers), body, time.monotonic()))

                time.sleep(service.delay_s)
                status, headers, answer = service.respond(body)
                with service._lock:
                    service.at_once -= 1
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(data))}.items():
                    self.send_header(name, value)

                self.end_headers()
                self.wfile.write(data)

            def do_GET(self):
                self.send_response(404)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format, *args):
                """Suppress lines on stderr."""

        self.server = QuietServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()


def says(text: str):
    return lambda body: (
        200,
        {},
        {"choices": [{"message": {"role": "assistant", "content": text}}]},
    )


def run_code(body: dict[str, Any]):
    """Answer like run_code of SandboxFusion, with the program run here."""
    import contextlib
    import io

    output = io.StringIO()
    code = 0
    with contextlib.redirect_stdout(output):
        try:
            exec(
                body["code"],
                {"input": iter(body["stdin"].splitlines()).__next__, "__name__": "__main__"},
            )
        except SystemExit as error:
            code = int(error.code or 0)
        except Exception:  # noqa: BLE001  (as the service does)
            code = 1
    result = {
        "status": "Finished",
        "return_code": code,
        "stdout": output.getvalue(),
        "stderr": "",
        "execution_time": 0.1,
    }
    return 200, {}, {"status": "Success" if code == 0 else "Failed", "run_result": result}
