"""A small MCP server over HTTP (`/mcp`) and server-sent events (`/sse`), on the given port."""

import sys

import uvicorn
from mcp.server.mcpserver import MCPServer

server = MCPServer("small")


@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


if __name__ == "__main__":
    app = server.streamable_http_app()
    app.router.routes += server.sse_app().routes
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]))
