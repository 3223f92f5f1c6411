"""The options of a row that say how agents play it."""

from collections.abc import Iterable, Mapping
from typing import Any


def option_of(row: Mapping[str, Any], name: str) -> Any:
    """Return a field of the row or, where it has none, of its `extra_info`."""
    value = row.get(name)
    extra = row.get("extra_info")
    if value is None and isinstance(extra, Mapping):
        return extra.get(name)
    return value


def present(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Leave out None: Parquet gives every row the fields of all rows."""
    return {name: value for name, value in (kwargs or {}).items() if value is not None}


def plain_row_kwargs(kwargs: Mapping[str, Any] | None) -> dict[str, dict[str, dict[str, Any]]]:
    """Return {tool: {section: keywords}} of a row's `tools_kwargs`, without absent ones."""
    rows = {}
    for tool, sections in present(kwargs).items():
        rows[tool] = {name: dict(value) for name, value in present(sections).items()}
    return rows


def offered_tools(
    selected: Iterable[str] | None, kwargs: Mapping[str, Any] | None
) -> list[str] | None:
    """Name the tools that a row offers to the model; None: all.

    Args:
        selected: `tool_selection` of the row.
        kwargs: its `tools_kwargs`; a tool without any may have None.
    """
    if selected is not None:
        return list(selected)
    return list(present(kwargs)) or None
