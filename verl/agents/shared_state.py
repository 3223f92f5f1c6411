"""Find objects of a user's that serve all episodes, but keep the state of one in an attribute."""

from collections.abc import Mapping
from typing import Any


def overwritten(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return an attribute that has another value than before; "" if none has.

    One that was absent or None is left out: a client that the first call makes is no state of an
    episode.
    """
    for name, value in before.items():
        if value is not None and now.get(name) is not value:
            return name
    return ""


def describe_overwriting(label: str, attribute: str) -> str:
    """Return the warning about an attribute that a call has set anew."""
    return (
        f"{label} set self.{attribute} anew in a call. Its object serves all "
        "episodes, so each overwrites the value of the others. Keep the state of an episode under "
        f"its instance_id: self.{attribute}[instance_id] = ..."
    )
