"""Search through a retrieval service with the protocol of Search-R1.

    POST {"queries": [...], "topk": 3, "return_scores": true}
    -> {"result": [[{"document": {"contents": "title\\ntext"}, "score": 1.5}, ...], ...]}

`python -m verl.agents.tools.local_retriever corpus.jsonl` is such a service.
"""

import json
from typing import Any

from verl.agents.tools.base import BaseTool, Executed, ToolArgumentError
from verl.agents.tools.rate_limit import RateLimit
from verl.agents.tools.schemas import (
    OpenAIFunctionToolSchema,
    ToolResponse,
    function_schema,
)
from verl.agents.tools.threads import run_in_thread
from verl.config.reward import RequestsConfig
from verl.rewards.json_client import JsonClient
from verl.utils.errors import ConfigError, RewardError

MAX_RETRIES = 10
BACKOFF_S = 0.5
# Keys of `config` that `client_of` reads.
LIMITS = ("num_workers", "rate_limit", "enable_global_rate_limit", "requests_per_s")
_BETWEEN_QUERIES = "\n---\n"


class SearchTool(BaseTool):
    """Finds documents for a list of queries.

    Config:
        retrieval_service_url: where queries are posted; required.
        topk: documents of a query; default 3.
        timeout: seconds of one request; default 30.
        num_workers, rate_limit: requests under way at once, at most; default 120 each.
        enable_global_rate_limit: whether `rate_limit` holds; default true.
        requests_per_s: requests that begin in a second, at most; default: no limit.

    A lost connection and the statuses 429, 500, 502, 503 and 504 are tried again up to ten times,
    with growing waits or after the answer's Retry-After; `requests_per_s` counts retries, too. A
    call whose next attempt would come after its deadline fails at once, with the last answer as the
    reason.

    Raises:
        ConfigError: there is no address, or it is none.
    """

    config_keys = ("retrieval_service_url", "topk", "timeout", *LIMITS)

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None
    ) -> None:
        super().__init__(config, tool_schema)
        self._topk = int(config.get("topk", 3))
        requests = RequestsConfig(
            timeout_s=float(config.get("timeout", 30)),
            max_retries=MAX_RETRIES,
            backoff_s=BACKOFF_S,
        )
        self._client = client_of(
            self,
            "retrieval_service_url",
            example="http://127.0.0.1:8000/retrieve.",
            at_once=120,
            requests=requests,
        )

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        queries = {
            "type": "array",
            "items": {"type": "string"},
            "description": "Queries, each of which is searched for.",
        }
        description = "Search for documents on the given queries."
        return self.tool_schema or function_schema("search", description, {"query_list": queries})

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> Executed:
        """Return the documents as JSON text, {"result": "Doc 1 (Title: ...) ..."}.

        Raises:
            ToolArgumentError: `query_list` is no list of texts.
            RuntimeError: the service gave no answer.
        """
        queries = parameters.get("query_list")
        if isinstance(queries, str):
            queries = [queries]
        if not queries or not isinstance(queries, list):
            raise ToolArgumentError(f"'{self.name}' needs query_list, a list of strings")

        found = await run_in_thread(self._search, [str(query) for query in queries])
        texts = [_as_text(documents) for documents in found]
        metrics = {
            "query_count": len(queries),
            "total_results": sum(len(documents) for documents in found),
        }
        result = json.dumps({"result": _BETWEEN_QUERIES.join(texts)}, ensure_ascii=False)
        return ToolResponse(text=result), 0.0, metrics

    def _search(self, queries: list[str]) -> list[list[Any]]:
        body = {"queries": queries, "topk": self._topk, "return_scores": True}
        try:
            found = self._client.post("", body).get("result")
        except RewardError as error:
            raise RuntimeError(f"the search failed: {error}") from error
        if not isinstance(found, list) or not all(isinstance(each, list) for each in found):
            raise RuntimeError("the search failed: the service answered no list of documents")
        if len(found) != len(queries):
            raise RuntimeError(
                f"the search failed: the service answered {len(found)} lists of documents for "
                f"{len(queries)} queries"
            )
        return found


def client_of(
    tool: BaseTool,
    key: str,
    *,
    example: str,
    at_once: int,
    requests: RequestsConfig,
    path: str = "",
) -> JsonClient:
    """Return the client of the service that a tool's `config` names.

    Args:
        key: of `config`, with the address.
        example: an address, and another way out, for the error.
        at_once: requests under way, unless `num_workers` or verl's `rate_limit` says otherwise.
        requests: deadlines and retries.
        path: end of the address that may be left out.

    Raises:
        ConfigError: there is no address, or it is none.
    """
    config = tool.config
    url = config.get(key)
    if not url:
        raise ConfigError(f"The tool '{tool.name}' needs config.{key}, such as {example}")

    limits = [int(config.get("num_workers", at_once))]
    if config.get("enable_global_rate_limit", True):
        limits.append(int(config.get("rate_limit", at_once)))
    return JsonClient(
        url.rstrip("/").removesuffix(path),
        key=f"{key} of the tool '{tool.name}'",
        max_concurrent=max(min(limits), 1),
        requests=requests,
        wait_for_turn=RateLimit(config.get("requests_per_s")).wait,
    )


def _as_text(documents: list[Any]) -> str:
    blocks = []
    for number, entry in enumerate(documents, 1):
        document = entry.get("document", entry) if isinstance(entry, dict) else entry
        contents = document.get("contents", "") if isinstance(document, dict) else document
        title, _, text = str(contents).partition("\n")
        blocks.append(f"Doc {number} (Title: {title})\n{text}")
    return "\n\n".join(blocks)
