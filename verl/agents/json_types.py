"""The types of JSON, as schemas of tools name them."""

from typing import Any

# In the order in which several allowed types are tried: a text is anything, so it comes last.
JSON_CLASSES: dict[str, Any] = {
    "null": type(None),
    "boolean": bool,
    "integer": (int, float),  # a number without a fraction may be written as 2.0
    "number": (int, float),
    "object": dict,
    "array": list,
    "string": str,
}


def json_kind(value: Any) -> str:
    """Return the name that JSON has for the type of a value."""
    for kind, classes in JSON_CLASSES.items():
        if isinstance(value, classes) and kind != "integer":
            return kind
    return type(value).__name__
