"""Tools of MCP servers.

One entry of a tool configuration with `config: {type: mcp}` stands for all tools of its servers, or
for those in `tool_selected_list`. A class of a user's derives from MCPBaseTool and reads the
server's answers in its own way.
"""

import base64
import io
import json
from collections.abc import Sequence
from typing import Any

from verl.agents.tools.base import BaseTool, Executed, ToolArgumentError
from verl.agents.tools.config_file import is_number, make_tool
from verl.agents.tools.mcp_clients import ClientManager, MCPClientManager, McpToolError
from verl.agents.tools.schemas import ToolResponse
from verl.utils.errors import ConfigError
from verl.utils.imports import require

TIMEOUT_S = 30.0
RATE_LIMIT_PER_S = 10.0


class MCPBaseTool(BaseTool):
    """One tool of a server.

    Config:
        timeout: seconds of one call; default 30.
        rate_limit: calls that begin in a second, at most, for all tools of the entry; default 10.
    """

    config_keys = ("timeout", "rate_limit")

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        super().__init__(config, tool_schema)
        self.timeout = float(config.get("timeout", TIMEOUT_S))
        self.clients: MCPClientManager = ClientManager

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> Executed:
        """Make the call on the server.

        Raises:
            ToolArgumentError: the server refused arguments that do not fit its schema.
            ToolTimeoutError: the server did not answer in time.
            McpToolError: the server answered that it failed, or was lost.
        """
        result = await self.clients.call_tool(self.name, parameters, self.timeout)
        text, metrics = self._parse_tool_result(result.content)
        if result.is_error and not self.clients.fits(self.name, parameters):
            raise ToolArgumentError(text)
        if result.is_error:
            raise McpToolError(text)

        images = [_image(part) for part in result.content if part.type == "image"]
        if not text and not images and result.structured_content is not None:
            text = json.dumps(result.structured_content, ensure_ascii=False)
        return ToolResponse(text=text, image=images or None), 0.0, metrics

    def _parse_tool_result(self, content: list[Any]) -> tuple[str, dict[str, Any]]:
        """Return the text of an answer for the model, and metrics of the call.

        Args:
            content: parts of the answer, each with a `type` such as "text".
        """
        texts = [_text(part) for part in content if part.type != "image"]
        return "\n".join(texts), {}

    def shut_down(self) -> None:
        """End the connections of the tools of this entry."""
        self.clients.close()


class MCPSearchTool(MCPBaseTool):
    """A search of an MCP server, with the number of results as a metric.

    Answers that are JSON with a list `results` are passed on as they are.
    """

    def _parse_tool_result(self, content: list[Any]) -> tuple[str, dict[str, Any]]:
        text, _ = super()._parse_tool_result(content)
        count = 0
        for part in content:
            if part.type == "text":
                count += _count_results(part.text)
        return text, {"query_count": 1, "total_results": count}


def mcp_tools(
    tool_class: type[MCPBaseTool], config: dict[str, Any], mcp: dict[str, Any], *, place: str
) -> list[BaseTool]:
    """Connect to the servers of an entry and return its tools.

    Args:
        place: file and entry, for errors.

    Raises:
        ConfigError: the servers, or the list of selected tools, are wrong.
    """
    if not issubclass(tool_class, MCPBaseTool):
        raise ConfigError(
            f"{place}, class_name: config.type=mcp needs a subclass of MCPBaseTool "
            "(verl.agents.tools.mcp)."
        )
    selected = mcp.get("tool_selected_list")
    if selected is not None and (isinstance(selected, str) or not isinstance(selected, Sequence)):
        raise ConfigError(f"{place}, mcp.tool_selected_list: expected a list, got {selected!r}.")

    _check_limits(config, place)
    path = mcp["mcp_servers_config_path"]
    rate_limit = config.get("rate_limit", RATE_LIMIT_PER_S)
    clients = MCPClientManager()
    try:
        schemas = clients.connect(path, rate_limit, selected)
        if not schemas:
            raise ConfigError(f"the servers of '{path}' have no tools. Leave it out.")
        tools = []
        for schema in schemas:
            name = f"the server's tool '{schema['function']['name']}'"
            tool = make_tool(tool_class, config, schema, place=name)
            tool.clients = clients
            tools.append(tool)
        return tools
    except ConfigError as error:
        clients.close()
        raise ConfigError(f"{place}, mcp: {error}") from error
    except BaseException:
        clients.close()
        raise


def _check_limits(config: dict[str, Any], place: str) -> None:
    """Check the numbers of an entry. Raises ConfigError."""
    timeout = config.get("timeout", TIMEOUT_S)
    if not is_number(timeout) or timeout <= 0:
        raise ConfigError(f"{place}, config.timeout: expected seconds above 0, got {timeout!r}.")

    rate = config.get("rate_limit")
    if rate is not None and (not is_number(rate) or rate < 0):
        raise ConfigError(
            f"{place}, config.rate_limit: expected calls a second, or 0 for no limit, got {rate!r}."
        )


def _text(part: Any) -> str:
    """Return a part of an answer as a text; one that has none becomes a note."""
    if part.type == "text":
        return part.text
    if part.type == "resource_link":
        return f"[{part.name}: {part.uri}]"
    resource = getattr(part, "resource", None)
    if resource is None:
        return f"[{part.type}]"
    return getattr(resource, "text", f"[{resource.uri}]")


def _image(part: Any) -> Any:
    """Return an image of an answer as one of PIL."""
    pil = require("PIL.Image", "An image of an MCP server", "pip install pillow")
    try:
        image = pil.open(io.BytesIO(base64.b64decode(part.data)))
        image.load()  # a part of an image fails only here
    except (OSError, ValueError) as error:
        raise McpToolError(
            f"the server's image of the type {part.mime_type} cannot be read: {error}"
        ) from error
    return image


def _count_results(text: str) -> int:
    try:
        answer = json.loads(text)
    except ValueError:
        return 0
    results = answer.get("results") if isinstance(answer, dict) else answer
    return len(results) if isinstance(results, list) else 0
