"""Replies with tool calls in each format."""

import json
from typing import Any

END = {
    "hermes": "<|im_end|>",
    "qwen3_coder": "<|im_end|>",
    "gpt-oss": "<|call|>",
    "llama3_json": "<|eom_id|>",
    "mistral": "</s>",
    "gemma": "<|tool_response>",
    "glm": "<|observation|>",
    "kimi": "<|im_end|>",
    "minimax": "[e~[",
    "seed": "<seed:eos>",
    "deepseek": "<｜end▁of▁sentence｜>",
}
FORMATS = list(END)

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "detailed": {"type": "boolean"},
                "extra": {"type": "object"},
                "places": {"type": "array"},
                "ratio": {"type": ["number", "null"]},
                "free": {},
            },
        },
    },
}


def write(name: str, format_name: str, arguments: dict[str, Any], *, number: int = 0) -> str:
    """Write one call with its closing tag, without the text around it."""
    as_json = json.dumps(arguments, ensure_ascii=False)
    if format_name == "hermes":
        return f'<tool_call>\n{{"name": "{name}", "arguments": {as_json}}}\n</tool_call>'
    if format_name in ("qwen3_coder", "seed"):
        tag = "seed:tool_call" if format_name == "seed" else "tool_call"
        parameters = "".join(
            f"<parameter={key}>\n{_text(value)}\n</parameter>\n" for key, value in arguments.items()
        )
        return f"<{tag}>\n<function={name}>\n{parameters}</function>\n</{tag}>"
    if format_name == "gpt-oss":
        header = f"<|channel|>commentary to=functions.{name} <|constrain|>json"
        return f"<|start|>assistant{header}<|message|>{as_json}<|call|>"
    if format_name == "llama3_json":
        return f'{"; " if number else ""}{{"name": "{name}", "parameters": {as_json}}}'
    if format_name == "mistral":
        return (
            f'[TOOL_CALLS][{{"name": "{name}", "arguments": {as_json}, "id": "abcde000{number}"}}]'
        )
    if format_name == "gemma":
        return f"<|tool_call>call:{name}{_gemma(arguments)}<tool_call|>"
    if format_name == "glm":
        pairs = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_text(value)}</arg_value>\n"
            for key, value in arguments.items()
        )
        return f"<tool_call>{name}\n{pairs}</tool_call>"
    if format_name == "minimax":
        parameters = "".join(
            f'<parameter name="{key}">{_text(value)}</parameter>\n'
            for key, value in arguments.items()
        )
        return f'<invoke name="{name}">\n{parameters}</invoke>'
    if format_name == "kimi":
        return (
            f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{as_json}"
            "<|tool_call_end|>"
        )

    assert format_name == "deepseek"
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{as_json}<｜tool▁call▁end｜>"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _gemma(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_gemma(each) for each in value) + "]"
    return json.dumps(value)
