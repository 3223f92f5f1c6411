"""A small MCP server over its standard streams, without the slow import of the package.

An argument is the JSON list of tools that it claims to have.
"""

import json
import os
import sys
from typing import Any

PNG = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJg"
    "gg=="
)
TOOLS = {
    "add": ("Add two numbers.", {"a": "integer", "b": "integer"}),
    "search": ("Search.", {"query": "string"}),
    "fail": ("Fail.", {}),
    "picture": ("Return a picture.", {}),
    "part_of_picture": ("Return the beginning of a picture.", {}),
    "leave": ("End the server.", {}),
    "environment": ("Return a variable.", {"name": "string"}),
    "resources": ("Return parts without a text.", {}),
    "structured": ("Return an object alone.", {}),
    "strict": ("Refuse the parameters.", {}),
    "hang": ("Never answer.", {}),
}
UNKNOWN_METHOD = {"code": -32601, "message": "unknown method"}


def describe(name: str) -> dict[str, Any]:
    """Return a tool as `tools/list` has it."""
    description, parameters = TOOLS[name]
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"name": name, "description": description, "inputSchema": schema}


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the result of `tools/call`."""
    text = ""
    if name == "add" and not isinstance(arguments["a"], str):
        text = str(arguments["a"] + arguments["b"])
    elif name == "search":
        results = [f"{arguments['query']} {number}" for number in (1, 2)]
        text = json.dumps({"results": results})
    elif name == "environment":
        text = os.environ.get(arguments["name"], "unset")
    elif name == "leave":
        os._exit(3)
    elif name == "resources":
        embedded = {"uri": "file:///a", "text": "in a resource"}
        link = {"type": "resource_link", "uri": "file:///b", "name": "b"}
        sound = {"type": "audio", "data": "AAAA", "mimeType": "audio/wav"}
        return {"content": [{"type": "resource", "resource": embedded}, link, sound]}
    elif name == "structured":
        return {"content": [], "structuredContent": {"sum": 3}}
    elif name in ("picture", "part_of_picture"):
        data = PNG if name == "picture" else PNG[:56]
        return {"content": [{"type": "image", "data": data, "mimeType": "image/png"}]}

    is_error = name == "fail" or isinstance(arguments.get("a"), str)
    content = [{"type": "text", "text": "broken" if is_error else text}]
    return {"content": content, "isError": is_error}


def answer(method: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a response that holds its result or error."""
    if method == "initialize":
        information = {
            "protocolVersion": parameters["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "small", "version": "1"},
        }
        return {"result": information}
    if method == "tools/list" and len(sys.argv) > 1:
        return {"result": {"tools": json.loads(sys.argv[1])}}
    if method == "tools/list":  # in two pages
        names = list(TOOLS)
        if parameters.get("cursor") == "rest":
            return {"result": {"tools": [describe(name) for name in names[2:]]}}
        return {"result": {"tools": [describe(name) for name in names[:2]], "nextCursor": "rest"}}
    if method == "tools/call" and parameters["name"] == "strict":
        return {"error": {"code": -32602, "message": "no such parameter"}}
    if method == "tools/call":
        return {"result": call(parameters["name"], parameters.get("arguments") or {})}
    return {"error": UNKNOWN_METHOD}


if __name__ == "__main__":
    for line in sys.stdin:
        request = json.loads(line)
        hangs = request.get("params", {}).get("name") == "hang"
        if "id" in request and not hangs:
            response = answer(request["method"], request.get("params") or {})
            print(json.dumps({"jsonrpc": "2.0", "id": request["id"], **response}), flush=True)
