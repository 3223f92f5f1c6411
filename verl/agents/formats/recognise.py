"""Recognise the tool-call format of a chat template by its text."""

# Format (None: one that is unknown here), and groups of markers. A template of the format has one
# whole group. The first that fits counts: templates of later formats have earlier tags, too.
_MARKERS: tuple[tuple[str | None, tuple[tuple[str, ...], ...]], ...] = (
    ("gpt-oss", (("<|channel|>", "to=functions."), ("<|channel|>", "functions."))),
    ("kimi", (("<|tool_call_argument_begin|>",),)),
    ("deepseek", (("<｜tool▁call▁begin｜>",), ("<｜DSML｜",), ("｜DSML｜", "invoke"))),
    ("minimax", (("<minimax:tool_call>", "<invoke name="),)),
    ("seed", (("<seed:tool_call>", "<function="),)),
    (None, (("<invoke name=",), ("<tool_calls>[",))),
    ("qwen3_coder", (("<tool_call>", "<function=", "<parameter="),)),
    (None, (("<function=",),)),
    ("glm", (("<arg_key>", "<arg_value>"),)),
    ("gemma", (("<|tool_call>", "<tool_call|>"), ("<start_function_call>",))),
    ("mistral", (("[TOOL_CALLS]",),)),
    ("hermes", (("<tool_call>", "</tool_call>"),)),
    (
        "llama3_json",
        (("<|python_tag|>",), ("<|start_header_id|>", '"parameters": '), ("<|eom_id|>",)),
    ),
)


def recognise_format(chat_template: str | None) -> str | None:
    """Return the name of the format that a template has the markers of, or None."""
    if chat_template is None:
        return None
    for name, groups in _MARKERS:
        for group in groups:
            if all(marker in chat_template for marker in group):
                return name
    return None
