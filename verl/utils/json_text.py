"""Parse JSON that a user or another program wrote."""

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError with a short reason for any other text.

    `json.loads` raises RecursionError for text that is nested too deeply; this raises ValueError.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
