"""Texts for the observations and actions of gymnasium's own environments."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from verl.agents.environments.base import ActionError, last_whole_number, name_of
from verl.utils.errors import RolloutError

# An observation with more numbers is an image or a grid, which a text would not show well.
MAX_NUMBERS = 64


def observation_text(world: Any, observation: Any) -> str:
    """Return the text of an observation: the rendering of the world, or the observation itself.

    With `render_mode="ansi"` the world's own drawing is the text. Otherwise a text stays as it is,
    and numbers, tuples, dicts and small arrays become JSON, such as "[14, 10, 0]".

    Raises:
        RolloutError: the observation is none of these, or has more than MAX_NUMBERS numbers.
    """
    if getattr(world, "render_mode", None) == "ansi":
        return str(world.render())
    if isinstance(observation, str):
        return observation

    value = _rounded(observation)
    try:
        text = json.dumps(value)
    except TypeError:
        text = ""
    if not text or _count_numbers(value) > MAX_NUMBERS:
        shape = getattr(observation, "shape", "")
        raise RolloutError(
            f"{name_of(world)} must observe a text, or up to {MAX_NUMBERS} numbers, got "
            f"{type(observation).__name__}{shape}. Derive GymEnvironment with as_text=..., which "
            "turns it into a text, or set render_mode to ansi where the world has it."
        )
    return text


def action_reader(world: Any) -> Callable[[str], Any]:
    """Return the function that turns a model's text into an action of the world.

    For a choice among n actions it takes the last whole number of the text. A world of texts gets
    the text.

    Raises:
        RolloutError: the world has actions of another kind.
    """
    space = world.action_space
    kind = type(space).__name__
    if kind == "Text":
        return lambda text: text
    if kind != "Discrete":
        raise RolloutError(
            f"{name_of(world)} takes actions of {space}; a text becomes one only for Discrete and "
            "Text. Derive GymEnvironment with as_action=..., which reads them."
        )

    first = int(space.start)
    last = first + int(space.n) - 1

    def read(text: str) -> int:
        choice = last_whole_number(text)
        if choice is None or not first <= choice <= last:
            raise ActionError(f"Answer with a whole number from {first} to {last}.")
        return choice

    return read


def _rounded(value: Any) -> Any:
    """Return lists, dicts and Python's numbers for those of NumPy. Fractions keep six digits."""
    if isinstance(value, Mapping):
        return {str(key): _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}")
    as_list = getattr(value, "tolist", None)
    return value if as_list is None else _rounded(as_list())


def _count_numbers(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return sum(map(_count_numbers, value))
    return 1
