"""Tools as users write them, for verl 0.5 and for later versions; some of them do harm."""

import asyncio
import os
import re
import signal
import time
from typing import Any

from verl.agents.formats.base import ToolCall
from verl.agents.tools import BaseTool, ToolResponse, ToolSession, ToolSet
from verl.agents.tools.schemas import OpenAIFunctionToolSchema, function_schema


def call(name: str, /, **arguments: Any) -> ToolCall:
    """Return a well-formed call."""
    return ToolCall(name=name, arguments=arguments)


async def one(session: ToolSession, name: str, /, turn: int = 0, **arguments: Any) -> Any:
    """Make one call and return its result."""
    (result,) = await session.call([call(name, **arguments)], turn=turn)
    return result


def schema(name: str, **properties: str) -> dict[str, Any]:
    """Return a schema with parameters of the given types, all of them required."""
    parameters = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
        "required": list(properties),
    }
    function = {"name": name, "description": f"The tool {name}.", "parameters": parameters}
    return {"type": "function", "function": function}


def tool_set(*tools: Any, **settings: Any) -> ToolSet:
    """Return a set of tools in this process."""
    settings = {"timeout_s": 5.0, "max_tool_response_length": None, **settings}
    return ToolSet.from_config(tools=tools, **settings)


class OldCounter(BaseTool):
    """Written for verl 0.5: plain identifiers and texts, `create_kwargs` under their names."""

    def __init__(self, config: Any, tool_schema: Any) -> None:
        super().__init__(config, tool_schema)
        self.totals: dict[str, int] = {}

    def get_openai_tool_schema(self) -> Any:
        return self.tool_schema or schema("old_counter", n="integer")

    async def create(self, instance_id: str | None = None, start: int = 0, **kwargs: Any) -> str:
        assert instance_id is not None
        self.totals[instance_id] = start
        return instance_id

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[str, float, dict[str, Any]]:
        before = self.totals[instance_id]
        await asyncio.sleep(parameters.get("delay_s", 0))
        self.totals[instance_id] = before + parameters["n"] * kwargs.get("factor", 1)
        return f"total {self.totals[instance_id]}", 0.5, {"pid": os.getpid()}

    async def calc_reward(self, instance_id: str, bonus: float = 0.0, **kwargs: Any) -> float:
        return self.totals[instance_id] + bonus

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self.totals[instance_id]


class NewCounter(BaseTool):
    """Written for verl 0.6: (identifier, ToolResponse), all keywords as `create_kwargs`."""

    def __init__(self, config: Any, tool_schema: Any) -> None:
        super().__init__(config, tool_schema)
        self.totals: dict[str, int] = {}

    def get_openai_tool_schema(self) -> Any:
        return self.tool_schema or schema("new_counter", n="integer")

    async def create(
        self, instance_id: str | None = None, create_kwargs: dict[str, Any] | None = None
    ) -> tuple[str, ToolResponse]:
        identifier = f"mine-{instance_id}"
        self.totals[identifier] = (create_kwargs or {}).get("start", 0)
        return identifier, ToolResponse(text="ready")

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], *, agent_data: Any = None
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        self.totals[instance_id] += parameters["n"]
        text = f"total {self.totals[instance_id]} for {agent_data}"
        return ToolResponse(text=text), 0.0, {}

    async def calc_reward(self, instance_id: str) -> float:
        return float(self.totals[instance_id])


class Hostile(BaseTool):
    """Does the harm that its argument names, in a coroutine."""

    def get_openai_tool_schema(self) -> Any:
        return self.tool_schema or schema("hostile", harm="string")

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> str:
        assert instance_id is not None
        return instance_id

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        harm = parameters["harm"]
        if harm == "sleep":
            await asyncio.sleep(3600)
        elif harm == "late":
            await asyncio.sleep(self.config.get("late_s", 1.0))
        elif harm == "deaf":
            while True:
                try:
                    await asyncio.sleep(3600)
                except asyncio.CancelledError:
                    continue
        return do_harm(harm)


class HostileInThread(Hostile):
    """Does the same harm in a plain method, which runs in a thread."""

    def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        harm = parameters["harm"]
        if harm in ("sleep", "late"):
            time.sleep(3600 if harm == "sleep" else self.config.get("late_s", 1.0))
        return do_harm(harm)


def do_harm(harm: str) -> Any:
    """Do the harm that needs no coroutine."""
    if harm == "busy":
        while True:
            pass
    elif harm == "block":
        time.sleep(3)
    elif harm == "stuck":  # holds the interpreter's lock
        re.match(r"(a+)+$", "a" * 40 + "b")
    elif harm == "raise":
        raise KeyError("no such thing")
    elif harm == "exit":
        raise SystemExit(3)
    elif harm == "flood":
        return "x" * 100_000_000
    elif harm == "_exit":
        os._exit(7)
    elif harm == "kill":
        os.kill(os.getpid(), signal.SIGKILL)

    return "fine"


class BadStart(BaseTool):
    """Fails when it is made."""

    def __init__(self, config: Any, tool_schema: Any) -> None:
        raise RuntimeError("no licence")


class ByKeyword(OldCounter):
    """Takes its arguments by name alone, as verl 0.5 gives them."""

    def __init__(self, *, config: Any, tool_schema: Any) -> None:
        super().__init__(config, tool_schema)


class ByPosition(OldCounter):
    """Has other names for its arguments."""

    def __init__(self, settings: Any, schema: Any) -> None:
        super().__init__(settings, schema)


class Duck:
    """Looks like a tool, and derives from nothing."""

    name = "duck"

    def __init__(self, config: Any, tool_schema: Any) -> None:
        self.tool_schema = tool_schema

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> str:
        return "quack"


class Nameless(BaseTool):
    """Forgets to call its base class."""

    def __init__(self, config: Any, tool_schema: Any) -> None:
        self.config = config


class Misspelled(BaseTool):
    """Has no `execute`."""

    async def excute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> str:
        return "never"

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return function_schema("misspelled", "Nothing.", {})


class TakesLess(Misspelled):
    async def execute(self, parameters: dict[str, Any]) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return "never"
