"""Tools of agents: their classes, functions and servers, and how calls of a model reach them.

`base` has the class that a tool derives from and the settings of its calls, `calls` the tools of a
run. Where they run is decided in `homes`: `host` for this process, `processes` for helpers.
"""

from typing import TYPE_CHECKING

from verl.utils.lazy import lazy_names

if TYPE_CHECKING:
    from verl.agents.tools.base import BaseTool, ToolArgumentError, ToolTimeoutError
    from verl.agents.tools.calls import ToolSession, ToolSet
    from verl.agents.tools.config_file import (
        ToolType,
        get_tool_class,
        initialize_tools_from_config,
    )
    from verl.agents.tools.functions import FunctionTool, function_tool
    from verl.agents.tools.results import ToolResult
    from verl.agents.tools.schemas import (
        OpenAIFunctionCallSchema,
        OpenAIFunctionParametersSchema,
        OpenAIFunctionParsedSchema,
        OpenAIFunctionPropertySchema,
        OpenAIFunctionSchema,
        OpenAIFunctionToolCall,
        OpenAIFunctionToolSchema,
        ToolResponse,
    )

__all__ = [
    "BaseTool",
    "FunctionTool",
    "OpenAIFunctionCallSchema",
    "OpenAIFunctionParametersSchema",
    "OpenAIFunctionParsedSchema",
    "OpenAIFunctionPropertySchema",
    "OpenAIFunctionSchema",
    "OpenAIFunctionToolCall",
    "OpenAIFunctionToolSchema",
    "ToolArgumentError",
    "ToolResponse",
    "ToolResult",
    "ToolSession",
    "ToolSet",
    "ToolTimeoutError",
    "ToolType",
    "function_tool",
    "get_tool_class",
    "initialize_tools_from_config",
]
_SCHEMAS = [name for name in __all__ if name.startswith("OpenAI")]
# Imported at first use: helper processes and `verl` itself need few of them.
__getattr__ = lazy_names(
    __name__,
    {
        **dict.fromkeys(_SCHEMAS, "verl.agents.tools.schemas"),
        "BaseTool": "verl.agents.tools.base",
        "FunctionTool": "verl.agents.tools.functions",
        "ToolArgumentError": "verl.agents.tools.base",
        "ToolTimeoutError": "verl.agents.tools.base",
        "ToolResponse": "verl.agents.tools.schemas",
        "ToolResult": "verl.agents.tools.results",
        "ToolSession": "verl.agents.tools.calls",
        "ToolSet": "verl.agents.tools.calls",
        "ToolType": "verl.agents.tools.config_file",
        "function_tool": "verl.agents.tools.functions",
        "get_tool_class": "verl.agents.tools.config_file",
        "initialize_tools_from_config": "verl.agents.tools.config_file",
    },
)
