"""Arguments that are written as text, converted by the tool's JSON schema."""

from collections.abc import Mapping, Sequence
from typing import Any

from verl.agents.formats.base import MalformedCallError, ToolCall, ToolSchemas, known_as, read_json
from verl.agents.json_types import JSON_CLASSES

# Null and truth values, as models also write them.
_WORDS = {"null": None, "none": None, "true": True, "false": False}
_PARAMETER_END = "</parameter>"


def parameter_schemas(tools: ToolSchemas, name: str) -> Mapping[str, Any]:
    """Return the schema of each parameter of a tool; empty for an unknown tool."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = _mapping(function.get("parameters"))
            return _mapping(parameters.get("properties"))
    return {}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def call_of_texts(name: str, texts: Mapping[str, str], tools: ToolSchemas) -> ToolCall:
    """Return the call of `name` with arguments that are texts; convert each by its schema.

    Raises MalformedCallError.
    """
    schemas = parameter_schemas(tools, name)
    arguments: dict[str, Any] = {}
    for key, text in texts.items():
        try:
            arguments[key] = convert(text, schemas.get(key))
        except MalformedCallError as problem:
            raise MalformedCallError(f"parameter '{key}' {problem}") from problem
    return ToolCall(name=name, arguments=arguments)


def call_of_tags(name: str, text: str, opening: str, tools: ToolSchemas) -> ToolCall:
    """Return the call of `name` with parameters between tags: `opening` NAME> and </parameter>.

    Raises MalformedCallError.
    """
    with known_as(name):
        texts = _tagged_parameters(text, opening)
        return call_of_texts(name, texts, tools)


def _tagged_parameters(text: str, opening: str) -> dict[str, str]:
    """Return the text of each parameter between `opening` NAME> and </parameter>.

    Raises MalformedCallError.
    """
    texts: dict[str, str] = {}
    pieces = text.split(opening)
    if pieces[0].strip():
        raise MalformedCallError(f"unexpected text before {opening}NAME>")

    for piece in pieces[1:]:
        name, opened, rest = piece.partition(">")
        value, closed, after = rest.partition(_PARAMETER_END)
        name = name.strip().strip('"')
        if not opened or not name:
            raise MalformedCallError(f"a parameter lacks its name in {opening}NAME>")
        if not closed:
            raise MalformedCallError(f"parameter '{name}' is not closed by {_PARAMETER_END}")
        if after.strip():
            raise MalformedCallError(f"unexpected text after parameter '{name}'")
        if name in texts:
            raise MalformedCallError(f"parameter '{name}' is given twice")
        # One line break on each side is layout; others belong to the value.
        texts[name] = value.removeprefix("\n").removesuffix("\n")
    return texts


def convert(text: str, schema: Any) -> Any:
    """Return the value of a text by a JSON schema. An unknown type stays a text.

    Raises MalformedCallError where the text is no value of any allowed type.
    """
    types = allowed_types(schema)
    kinds = [kind for kind in JSON_CLASSES if kind in types]
    if not kinds:
        return text

    for kind in kinds:
        try:
            return _value_of(kind, text)
        except MalformedCallError:
            continue
    choice = " or ".join(kinds)
    raise MalformedCallError(f"must be of type {choice}, got {text.strip()[:60]!r}")


def allowed_types(schema: Any) -> frozenset[str]:
    """Return the JSON types that a schema allows; empty where it says none that is understood."""
    if not isinstance(schema, Mapping):
        return frozenset()

    kind = schema.get("type")
    if isinstance(kind, str):
        kinds = [kind]
    elif isinstance(kind, Sequence):
        kinds = [each for each in kind if isinstance(each, str)]
    else:
        kinds = []
        for key in ("anyOf", "oneOf"):
            options = schema.get(key)
            for option in options if isinstance(options, Sequence) else ():
                types = allowed_types(option)
                if not types:
                    return frozenset()
                kinds.extend(types)

    if not all(kind in JSON_CLASSES for kind in kinds):
        return frozenset()
    return frozenset(kinds)


def _value_of(kind: str, text: str) -> Any:
    """Return the value of a text as one of a JSON type. Raises MalformedCallError if it is none."""
    if kind == "string":
        return text

    value = _WORDS.get(text.strip().lower(), text)
    if kind not in ("null", "boolean"):
        value = read_json(text)

    is_boolean = isinstance(value, bool)
    if not isinstance(value, JSON_CLASSES[kind]) or is_boolean != (kind == "boolean"):
        raise MalformedCallError(f"is no {kind}")
    if kind != "integer":
        return value

    if value != value // 1:  # also infinity, which 1e999 is
        raise MalformedCallError("is no integer")
    return int(value)
