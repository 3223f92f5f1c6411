"""A small MCP server: over its standard streams, or over HTTP on the port that is given."""

import base64
import os
import sys

from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("small")
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJg"
    "gg=="
)


@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
def search(query: str) -> str:
    """Search."""
    return f'{{"results": ["{query} 1", "{query} 2"]}}'


@server.tool()
def fail() -> str:
    """Fail."""
    raise ToolError("broken")


@server.tool()
def picture() -> Image:
    """Return a picture."""
    return Image(data=PNG, format="png")


@server.tool()
def leave() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
def environment(name: str) -> str:
    """Return a variable."""
    return os.environ.get(name, "unset")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run()
