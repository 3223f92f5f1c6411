"""Tool configurations with a small MCP server, and calls of its tools."""

import asyncio
import json
import sys
from pathlib import Path

from tests.agents.tools.user_tools import one

STDIO = {
    "command": sys.executable,
    "args": [str(Path(__file__).parent / "stdio_mcp_server.py")],
    "env": {"KEY": "value"},
}


def write_servers(folder, **servers):
    path = folder / "servers.json"
    path.write_text(json.dumps({"mcpServers": servers}))
    return path


def write_config(
    folder, server, class_name="verl.agents.tools.mcp.MCPSearchTool", *, timeout=20, **mcp
):
    servers = write_servers(folder, small=server)
    entry = {
        "class_name": class_name,
        "config": {"type": "mcp", "rate_limit": 1000, "timeout": timeout, "isolation": "thread"},
        "mcp": {"mcp_servers_config_path": str(servers), **mcp},
    }
    path = folder / "tools.yaml"
    path.write_text(json.dumps({"tools": [entry]}))
    return path


def calls_of(tools, *calls):
    async def run():
        session = await tools.open("test")
        results = []
        for turn, (name, arguments) in enumerate(calls):
            results.append(await one(session, name, turn=turn, **arguments))
        await session.finish()
        return results

    return asyncio.run(run())
