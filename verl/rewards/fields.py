"""Fields that a reward returns in addition to its score: allowed values, and columns of a batch."""

import io
import math
import pickle
import sys
from collections.abc import Mapping, Sequence
from itertools import chain
from numbers import Real
from typing import Any

import numpy as np

from verl.rewards.texts import describe_briefly
from verl.utils.imports import USER_PREFIX

_PLAIN = (float, str, bool, bytes, type(None))
_WAY_OUT = "Return numbers, texts, or lists and dicts of them; of another object its str(), say."


def fault_of(value: Any) -> str | None:
    """Describe why a field cannot have this value; None if it can.

    Columns become metrics and lines of text, and go to other ranks. One process requires the same,
    so that a program that runs on one rank also runs on many.
    """
    if type(value) in _PLAIN:
        return None
    if type(value) is int:
        # Compare before converting: float(10**400) raises.
        if -sys.float_info.max <= value <= sys.float_info.max:
            return None
        way_out = "Return a text of it, hex(n) say, or its logarithm."
        return f"is a whole number of {value.bit_length()} bits, too large for a float. {way_out}"

    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        return None
    try:
        _Elsewhere(io.BytesIO(pickle.dumps(value))).load()
    except Exception as error:  # noqa: BLE001 - a user's class may raise anything
        fact = f"is of type {type(value).__name__} and cannot be sent to another process"
        return f"{fact} ({describe_briefly(error)}). {_WAY_OUT}"

    try:
        str(value)
    # An integer of more than 4,300 digits, or a user's __str__.
    except Exception as error:  # noqa: BLE001
        fact = f"is of type {type(value).__name__} and cannot be written as text"
        return f"{fact} ({describe_briefly(error)}). {_WAY_OUT}"

    return None


class _Elsewhere(pickle.Unpickler):
    """Unpickle as in another process, which has not loaded the file of the reward function."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if module_name.startswith(USER_PREFIX):
            raise pickle.UnpicklingError(
                f"the class '{global_name}' is defined in a file that only this process loads"
            )
        return super().find_class(module_name, global_name)


def shown(value: Any) -> str:
    """Return the start of a value's repr, or a note if it has none.

    Integers of more than 4,300 digits have none.
    """
    try:
        return repr(value)[:100]
    except Exception:  # noqa: BLE001 - a user's __repr__, in a message about another fault
        return "a value that cannot be written"


def collect_extra(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return one list of length B for each field, in order of first appearance.

    A row without a field has NaN if the field's other values are numbers, else None.
    """
    collected: dict[str, list[Any]] = {}
    for name in dict.fromkeys(chain.from_iterable(rows)):
        present = [row[name] for row in rows if name in row]
        filler = math.nan if all(isinstance(entry, Real) for entry in present) else None
        collected[name] = [row.get(name, filler) for row in rows]
    return collected
