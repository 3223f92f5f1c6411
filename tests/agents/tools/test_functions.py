import asyncio
import os
import threading
from typing import Annotated, Literal

import pytest
from pydantic import Field

from tests.agents.tools.user_tools import call, one, tool_set
from verl.agents.tools import FunctionTool, ToolResponse, ToolSet, function_tool
from verl.agents.tools.functions import as_tool, load_function_tools
from verl.utils.errors import ConfigError


@function_tool
def search(
    query: str,
    limits: list[int],
    kind: Literal["web", "news"] = "web",
    near: float | None = None,
    schema: Annotated[dict[str, str] | None, Field(description="a mapping")] = None,
) -> str:
    """Search for documents.

    The best come first.

    Args:
        query (str): what to look for:
            a few words
        limits: sizes
        kind: where to search

    Returns:
        text: not an argument
    """
    return f"{query!r} {limits!r} {kind} {near!r} {threading.current_thread().name}"


def test_the_schema_comes_from_signature_and_docstring():
    function = FunctionTool(search).tool_schema.for_prompt()["function"]
    assert function["name"] == "search"
    assert function["description"] == "Search for documents.\n\nThe best come first."

    parameters = function["parameters"]
    assert parameters["required"] == ["query", "limits"]
    assert parameters["properties"] == {
        "query": {"type": "string", "description": "what to look for: a few words"},
        "limits": {"type": "array", "items": {"type": "integer"}, "description": "sizes"},
        "kind": {
            "type": "string",
            "enum": ["web", "news"],
            "default": "web",
            "description": "where to search",
        },
        "near": {"type": "number"},
        "schema": {
            "type": "object",
            "additionalProperties": {"type": "string"},
            "description": "a mapping",
        },
    }


@function_tool(name="plain", description="Described here.", retries=2)
async def coroutine(n: int, agent_data=None):
    return {"text": f"{n} {agent_data} {threading.current_thread().name}"}, 0.25, {"n": n}


def test_functions_run_in_a_thread_or_the_event_loop():
    async def run():
        tools = tool_set(search, coroutine)
        session = await tools.open("test")
        first = await one(session, "search", query="a", limits=["1", 2])
        calls = await session.call([call("plain", n=3)], turn=1, agent_data="data")
        rewards = await session.finish()
        await tools.aclose()
        return first, calls[0], rewards

    first, second, rewards = asyncio.run(run())
    assert first.text.startswith("'a' [1, 2] web None verl-tool")
    assert "loop" not in first.text
    assert second.text == "3 data verl-tool-loop-0"
    assert (second.reward, second.metrics) == (0.25, {"n": 3})
    assert rewards == {}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"limits": [1]}, "query: Field required"),
        ({"query": "a", "limits": ["x"]}, "limits.0: Input should be a valid integer"),
        ({"query": "a", "limits": [], "more": 1}, "more: Extra inputs"),
        ({"query": "a", "limits": [], "kind": "mail"}, "kind: Input should be 'web' or 'news'"),
    ],
)
def test_arguments_that_do_not_fit_are_the_models_mistake(arguments, problem):
    async def run():
        tools = tool_set(search, policy="drop")
        session = await tools.open("test")
        result = await one(session, "search", **arguments)
        await session.finish()
        await tools.aclose()
        return result

    result = asyncio.run(run())
    assert (result.outcome, result.consequence) == ("malformed", "continue")
    assert result.text.startswith("Error: the arguments of 'search' do not fit")
    assert problem in result.text


def _no_docstring(a: int):
    return a


def _no_type(a):
    """Do it."""


def _rest(*a: int):
    """Do it."""


def _opaque(a: threading.Thread):
    """Do it."""


def _yields(a: str):
    """Do it."""
    yield a


async def _yields_later(a: str):
    """Do it."""
    yield a


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_no_docstring, "no docstring"),
        (_no_type, "'a' has no type"),
        (_rest, "Name each parameter"),
        (_opaque, "JSON cannot hold"),
        (_yields, "has a yield. Return the whole answer"),
        (_yields_later, "has a yield. Return the whole answer"),
    ],
)
def test_uncallable_functions_are_rejected(function, message):
    with pytest.raises(ConfigError, match=message):
        FunctionTool(function)


def test_two_tools_of_one_name_are_an_error():
    with pytest.raises(ConfigError, match="the tool name 'search' is taken by the tools given"):
        tool_set(search, FunctionTool(search))


def test_a_file_gives_its_marked_functions(tmp_path):
    path = tmp_path / "marked.py"
    path.write_text(
        "from json import dumps\n"
        "from verl.agents.tools import function_tool\n"
        "def helper(a): return a\n"
        "@function_tool('second')\n"
        "def b(x: int) -> str:\n    'Second.'\n    return str(helper(x))\n"
        "@function_tool\n"
        "def a(x: int) -> str:\n    'First.'\n    return str(x)\n"
    )
    assert [tool.name for tool in load_function_tools(str(path))] == ["second", "a"]


def test_a_mark_counts_on_a_wrapped_and_on_an_imported_function(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    mark = "from verl.agents.tools import function_tool\n@function_tool\n"
    (tmp_path / "tools_elsewhere.py").write_text(f"{mark}def far() -> str:\n    'Far.'\n")
    path = tmp_path / "wrapped.py"
    path.write_text(
        "from functools import lru_cache\n"
        "from tools_elsewhere import far\n"
        f"{mark}"
        "@lru_cache\n"
        "def cached(x: int) -> str:\n    'Cached.'\n    return str(x)\n"
    )
    tools = load_function_tools(str(path))

    assert [tool.name for tool in tools] == ["far", "cached"]
    assert asyncio.run(tools[1].execute("", {"x": "3"})) == "3"


def test_a_marked_class_is_refused(tmp_path):
    path = tmp_path / "marked_class.py"
    path.write_text(
        "from verl.agents.tools import BaseTool, function_tool\n"
        "@function_tool\nclass Search(BaseTool):\n    'Search.'\n"
    )
    with pytest.raises(ConfigError, match="got the class 'Search'. Name a class in multi_turn"):
        load_function_tools(str(path))


def test_a_file_without_marks_gives_its_public_functions(tmp_path):
    path = tmp_path / "plain.py"
    path.write_text(
        "from json import dumps\n"
        "def _helper(a): return a\n"
        "def double(x: int) -> str:\n    'Double.'\n    return str(_helper(2 * x))\n"
    )
    (tool,) = load_function_tools(str(path))
    assert tool.name == "double"


@pytest.mark.parametrize("mark", ["", "@function_tool(timeout_s=3)\n"])
def test_a_tool_that_a_file_defines_twice_is_refused(tmp_path, mark: str):
    path = tmp_path / "again.py"
    path.write_text(
        "from verl.agents.tools import function_tool\n"
        "def _helper(): pass\ndef _helper(): pass\n"
        f"{mark}def convert(dollars: int):\n    'To euros.'\n"
        f"{mark}async def convert(euros: int):\n    'To dollars.'\n"
    )
    with pytest.raises(ConfigError, match=r"line \d: the function 'convert' is defined again"):
        load_function_tools(str(path))


def test_wrong_files_are_refused(tmp_path):
    path = tmp_path / "wrong.py"
    path.write_text("x = 1\n")
    with pytest.raises(ConfigError, match="defines no function"):
        load_function_tools(str(path))

    path = tmp_path / "twice.py"
    path.write_text(
        "from verl.agents.tools import function_tool\n"
        "@function_tool('f')\ndef a(x: int):\n    'A.'\n"
        "@function_tool('f')\ndef b(x: int):\n    'B.'\n"
    )
    with pytest.raises(ConfigError, match="twice.py': the tool name 'f' is taken"):
        load_function_tools(str(path))

    message = r"^multi_turn\.function_tool_path: expected a Python file at '.*missing\.py', found"
    with pytest.raises(ConfigError, match=message):
        load_function_tools(str(tmp_path / "missing.py"))


def test_functions_of_a_file_run_in_a_process_unless_they_ask_for_a_thread(tmp_path):
    path = tmp_path / "both.py"
    path.write_text(
        "import os\n"
        "from verl.agents.tools import function_tool\n"
        "@function_tool\ndef far() -> str:\n    'Far.'\n    return str(os.getpid())\n"
        "@function_tool(isolation='thread')\n"
        "def near() -> str:\n    'Near.'\n    return str(os.getpid())\n"
    )

    async def run():
        tools = ToolSet.from_config(function_tool_path=str(path))
        session = await tools.open("test")
        far = await one(session, "far")
        near = await one(session, "near")
        await session.finish()
        await tools.aclose()
        return tools.names, far.text, near.text

    names, far, near = asyncio.run(run())

    assert names == ["far", "near"]
    assert near == str(os.getpid())
    assert far != near


def test_a_response_object_is_an_answer():
    def see() -> ToolResponse:
        """See."""
        return ToolResponse(text="t", image=["i"])

    async def run():
        tools = tool_set(see)
        session = await tools.open("test")
        result = await one(session, "see")
        await session.finish()
        await tools.aclose()
        return result

    result = asyncio.run(run())
    assert (result.text, result.images) == ("t", ["i"])


def test_an_unknown_setting_is_refused():
    @function_tool(timeout=3)
    def late() -> str:
        """Wait."""
        return ""

    with pytest.raises(ConfigError, match=r"'late': unknown key 'timeout'.*timeout_s"):
        as_tool(late)
