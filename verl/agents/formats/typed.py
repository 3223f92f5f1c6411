"""Arguments that are written as text, converted by the tool's JSON schema."""

from collections.abc import Mapping, Sequence
from typing import Any

from verl.agents.formats.base import MalformedCallError, ToolCall, ToolSchemas, malformed, read_json

# In the order in which several allowed types are tried: a text is anything, so it comes last.
_ORDER = ("null", "boolean", "integer", "number", "object", "array", "string")
_PARAMETER_END = "</parameter>"


def parameter_schemas(tools: ToolSchemas, name: str) -> Mapping[str, Any]:
    """Return the schema of each parameter of a tool; empty for an unknown tool."""
    for tool in tools:
        function = tool.get("function", tool)
        if not isinstance(function, Mapping) or function.get("name") != name:
            continue
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        return properties if isinstance(properties, Mapping) else {}
    return {}


def call_of_texts(
    name: str,
    texts: Mapping[str, str],
    tools: ToolSchemas,
    *,
    raw: str,
    expected: str,
) -> ToolCall:
    """Return the call of `name` with arguments that are texts; convert each by its schema."""
    schemas = parameter_schemas(tools, name)
    arguments: dict[str, Any] = {}
    for key, text in texts.items():
        try:
            arguments[key] = convert(text, schemas.get(key))
        except MalformedCallError as problem:
            return malformed(f"parameter '{key}' {problem}", expected, raw=raw, name=name)
    return ToolCall(name=name, arguments=arguments, raw=raw)


def call_of_tags(
    name: str,
    text: str,
    opening: str,
    tools: ToolSchemas,
    *,
    raw: str,
    expected: str,
) -> ToolCall:
    """Return the call of `name` with parameters between tags: `opening` NAME> and </parameter>."""
    try:
        texts = _tagged_parameters(text, opening)
    except MalformedCallError as problem:
        return malformed(str(problem), expected, raw=raw, name=name)
    return call_of_texts(name, texts, tools, raw=raw, expected=expected)


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
    if not types:
        return text

    for kind in _ORDER:
        if kind not in types:
            continue
        try:
            return _READ[kind](text)
        except MalformedCallError:
            continue
    choice = " or ".join(kind for kind in _ORDER if kind in types)
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

    known = frozenset(kinds)
    return known if known <= set(_ORDER) else frozenset()


def _read_null(text: str) -> None:
    if text.strip().lower() not in ("null", "none"):
        raise MalformedCallError("is not null")


def _read_boolean(text: str) -> bool:
    word = text.strip().lower()
    if word not in ("true", "false"):
        raise MalformedCallError("is not a boolean")
    return word == "true"


def _read_number(text: str) -> int | float:
    value = read_json(text)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise MalformedCallError("is not a number")
    return value


def _read_integer(text: str) -> int:
    value = _read_number(text)
    if value != value // 1:  # also infinity, which 1e999 is
        raise MalformedCallError("is not an integer")
    return int(value)


def _read_object(text: str) -> dict[str, Any]:
    value = read_json(text)
    if not isinstance(value, dict):
        raise MalformedCallError("is not an object")
    return value


def _read_array(text: str) -> list[Any]:
    value = read_json(text)
    if not isinstance(value, list):
        raise MalformedCallError("is not an array")
    return value


_READ = {
    "null": _read_null,
    "boolean": _read_boolean,
    "integer": _read_integer,
    "number": _read_number,
    "object": _read_object,
    "array": _read_array,
    "string": str,
}
