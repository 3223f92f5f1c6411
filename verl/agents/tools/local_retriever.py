"""A small retrieval service to try the search tool with: BM25 over a file of JSON lines.

    python -m verl.agents.tools.local_retriever corpus.jsonl --port 8000

Each line is {"contents": "title\\ntext"}, or has `title` and `text`; other keys are kept. Then set
`retrieval_service_url: http://127.0.0.1:8000/retrieve` in the tool configuration. The whole index
is in memory, so this is for corpora of up to some hundred thousand documents.

    POST {"queries": ["..."], "topk": 3, "return_scores": true}
    -> {"result": [[{"document": {...}, "score": 1.5}, ...], ...]}

Without `return_scores` each entry is the document itself.
"""

import argparse
import heapq
import json
import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from verl.utils.entry import exit_code
from verl.utils.errors import ConfigError, DataError, describe_error

_WORD = re.compile(r"\w+")
MAX_REQUEST_BYTES = 1024**2
DEFAULT_TOPK = 3


class BM25:
    """Ranks documents by BM25 (Robertson and Zaragoza 2009), with the logarithm of Lucene.

    score(q, d) = sum over words w of q: idf(w) tf (k1 + 1) / (tf + k1 (1 - b + b |d| / mean |d|))
    """

    def __init__(self, texts: Sequence[str], k1: float = 1.2, b: float = 0.75) -> None:
        self._k1 = k1
        self._b = b
        self._lengths: list[int] = []
        self._places: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        for number, text in enumerate(texts):
            words = _words(text)
            self._lengths.append(len(words))
            for word, count in Counter(words).items():
                self._places[word].append((number, count))
        self._mean_length = sum(self._lengths) / max(len(self._lengths), 1)

    def search(self, query: str, topk: int) -> list[tuple[int, float]]:
        """Return (number, score) of the best documents that share a word with the query.

        Documents of one score come in the order of the corpus.
        """
        scores: defaultdict[int, float] = defaultdict(float)
        for word in _words(query):
            places = self._places.get(word, [])
            idf = math.log(1 + (len(self._lengths) - len(places) + 0.5) / (len(places) + 0.5))
            for number, count in places:
                relative = self._lengths[number] / self._mean_length
                norm = count + self._k1 * (1 - self._b + self._b * relative)
                scores[number] += idf * count * (self._k1 + 1) / norm
        return heapq.nsmallest(topk, scores.items(), key=lambda item: (-item[1], item[0]))


class Retriever(ThreadingHTTPServer):
    """The service, on the loopback interface.

    Args:
        corpus: documents, each with `contents`.
        port: 0 for one that is free; `url` has it.
    """

    daemon_threads = True

    def __init__(self, corpus: Sequence[dict[str, Any]], port: int = 0) -> None:
        self.corpus = corpus
        self.index = BM25([document["contents"] for document in corpus])
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def url(self) -> str:
        """Address for `retrieval_service_url`."""
        return f"http://127.0.0.1:{self.server_port}/retrieve"

    def answer(self, request: Any) -> dict[str, Any]:
        """Return the documents of a request.

        Raises:
            ValueError: it is no request of the protocol.
        """
        queries = request.get("queries") if isinstance(request, dict) else None
        if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
            raise ValueError("expected {queries: [text, ...], topk, return_scores}")
        topk = int(request.get("topk") or DEFAULT_TOPK)
        with_scores = bool(request.get("return_scores", False))
        return {"result": [self._find(query, topk, with_scores) for query in queries]}

    def _find(self, query: str, topk: int, with_scores: bool) -> list[Any]:
        found = self.index.search(query, topk)
        if not with_scores:
            return [self.corpus[number] for number, _ in found]
        return [{"document": self.corpus[number], "score": score} for number, score in found]


class _Handler(BaseHTTPRequestHandler):
    server: Retriever

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        if self.path.rstrip("/") != "/retrieve" or length > MAX_REQUEST_BYTES:
            self._send(
                404, {"error": f"expected POST /retrieve of up to {MAX_REQUEST_BYTES} bytes"}
            )
            return
        try:
            answer = self.server.answer(json.loads(self.rfile.read(length)))
        except (ValueError, TypeError) as error:
            self._send(400, {"error": str(error)})
            return
        self._send(200, answer)

    def _send(self, status: int, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Write no line for each request."""


def read_corpus(path: str | Path) -> list[dict[str, Any]]:
    """Return the documents of a file of JSON lines, each with `contents`.

    Raises:
        DataError: no such file, or a line that is no document.
    """
    documents = []
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"The corpus '{path}' cannot be read: {error}.") from error

    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)
            if "contents" not in document:
                document["contents"] = f"{document.get('title', '')}\n{document['text']}"
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"'{path}', line {number}: expected a JSON object with 'contents', or with 'title' "
                f"and 'text' ({describe_error(error)})."
            ) from error
        documents.append(document)
    return documents


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve a corpus until Ctrl-C."""
    parser = argparse.ArgumentParser(description="BM25 over a file of JSON lines.")
    parser.add_argument("corpus")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args(arguments)

    corpus = read_corpus(options.corpus)
    try:
        server = Retriever(corpus, options.port)
    except OSError as error:
        raise ConfigError(f"--port {options.port} cannot be used: {error}.") from error
    print(f"{len(corpus)} documents at {server.url}", flush=True)
    with server:
        server.serve_forever()


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


if __name__ == "__main__":
    sys.exit(exit_code(main))
