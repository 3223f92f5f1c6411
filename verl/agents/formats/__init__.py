"""Tool-call formats: how models write calls of tools, and how to read them."""

from verl.agents.formats import (  # noqa: F401 - each registers its format
    deepseek,
    gemma,
    glm,
    gpt_oss,
    hermes,
    kimi,
    llama3_json,
    minimax,
    mistral,
    qwen3_coder,
)
from verl.agents.formats.base import ParsedReply, ToolCall, ToolFormat, new_call_id, tool_formats
from verl.agents.formats.recognise import recognise_format
from verl.agents.formats.tool_parser import (
    CallFormat,
    FunctionCall,
    ToolParser,
    parse_reply,
    tool_format,
)

__all__ = [
    "CallFormat",
    "FunctionCall",
    "ParsedReply",
    "ToolCall",
    "ToolFormat",
    "ToolParser",
    "new_call_id",
    "parse_reply",
    "recognise_format",
    "tool_format",
    "tool_formats",
]
