"""`model.external_lib` and tools of a training with agents: each reply of the model calls a tool."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from verl.agents.formats.base import ParsedReply, ToolCall, tool_formats
from verl.agents.tools import function_tool


@function_tool
def calculator(text: str) -> str:
    """Count characters, which takes a while. Named as the rows of the data set expect.

    Args:
        text: to count.
    """
    time.sleep(0.05 * (len(text) % 5))
    return f"{len(text)} characters"


class AlwaysCalls:
    """Takes every text for a call, since a model that is not trained for it makes none."""

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]]) -> ParsedReply:
        """See `ToolFormat.parse`."""
        return ParsedReply(
            content="", calls=(ToolCall(name="calculator", arguments={"text": text}),)
        )


if "always_calls" not in tool_formats:  # the file is read as tools, too
    tool_formats.register("always_calls")(AlwaysCalls)


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    """Return the share of different characters, a reward that differs among samples."""
    return len(set(solution_str)) / max(1, len(solution_str))
