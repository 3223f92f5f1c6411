"""Read the return values of tools, in the shapes of all verl versions, as plain bounded values."""

import inspect
import json
import math
import os
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from verl.agents.tools.schemas import ToolResponse
from verl.utils.errors import ConfigError, text_of
from verl.utils.json_text import whole_characters

SIDES = ("left", "middle", "right")
MAX_METRIC_CHARACTERS = 200
MAX_ERROR_CHARACTERS = 1_000
_MEDIA = {"text", "image", "video"}
# Of an object, in its text: "<Image size=24x24 at 0x7F30>".
_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]+>")


@dataclass(frozen=True)
class TextLimit:
    """Longest text of an answer, in characters, and the side that verl 0.5 keeps or cuts.

    "left" keeps the beginning, "right" the end, "middle" half of the limit at each end. The mark
    of the cut comes on top. `characters` None: no limit.

    Raises:
        ConfigError: an unknown side or a negative length.
    """

    characters: int | None = None
    side: str = "middle"

    def __post_init__(self) -> None:
        if self.side not in SIDES:
            raise ConfigError(
                f"multi_turn.tool_response_truncate_side must be one of {', '.join(SIDES)}, got "
                f"{self.side!r}."
            )
        if self.characters is not None and self.characters < 0:
            raise ConfigError(
                f"multi_turn.max_tool_response_length must be at least 0, got {self.characters}. "
                "Set it to null for no limit."
            )

    def cut(self, text: str) -> str:
        """Return the text within the limit."""
        limit = self.characters
        if limit is None or len(text) <= limit:
            return text
        if self.side == "left":
            return text[:limit] + "...(truncated)"
        if self.side == "right":
            return "(truncated)..." + text[len(text) - limit :]

        half = limit // 2
        return text[:half] + "...(truncated)..." + text[len(text) - half :]


@dataclass
class ToolAnswer:
    """The answer of one call of `execute`, in plain values."""

    text: str = ""
    images: list[Any] = field(default_factory=list)
    videos: list[Any] = field(default_factory=list)
    reward: float | None = None
    metrics: dict[str, Any] = field(default_factory=dict)


def read_answer(value: Any, limit: TextLimit) -> ToolAnswer:
    """Return the answer in `value`: a text, dict or ToolResponse, alone or with reward and metrics.

    Raises:
        TypeError, ValueError: the value has none of these shapes.
    """
    reward = None
    metrics: Any = None
    if isinstance(value, tuple):
        if not 1 <= len(value) <= 3:
            raise ValueError(
                "a tool must return (answer), (answer, reward) or (answer, reward, metrics), got "
                f"a tuple of {len(value)}"
            )
        value, reward, metrics = (*value, None, None)[:3]

    answer = _read_content(value)
    answer.text = limit.cut(whole_characters(answer.text))
    answer.reward = None if reward is None else finite(reward, "the step reward")
    answer.metrics = _plain_metrics(metrics)
    return answer


def finite(value: Any, name: str) -> float:
    """Return a number as a float.

    Raises:
        TypeError, ValueError: it is none, or not finite.
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        got = f"{type(value).__name__} {text_of(value)[:50]!r}"
        raise TypeError(f"{name} must be a number, got {got}") from None
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {number}")
    return number


def describe_failure(error: BaseException, limit: TextLimit) -> str:
    """Return an error as the model reads it: one line, cut."""
    text = _text_of_error(error)
    text = " ".join(text[: 2 * MAX_ERROR_CHARACTERS].split())
    line = f"Error: {type(error).__name__}: {text}" if text else f"Error: {type(error).__name__}"
    return limit.cut(whole_characters(line[:MAX_ERROR_CHARACTERS]))


def _text_of_error(error: BaseException) -> str:
    """Return the text of an error; of pydantic's, the places and reasons alone."""
    if not isinstance(error, ValidationError):
        return text_of(error)

    problems = []
    for problem in error.errors(include_url=False, include_input=False):
        raised = problem.get("ctx", {}).get("error")  # by a validator, with a sentence of its own
        if raised is not None:
            problems.append(text_of(raised))
            continue
        place = ".".join(map(str, problem["loc"]))
        problems.append(f"{place}: {problem['msg']}" if place else problem["msg"])
    return "; ".join(problems)


def _read_content(value: Any) -> ToolAnswer:
    """Read a text, a dict, a ToolResponse, or a value that JSON can write."""
    if value is None:
        return ToolAnswer()
    if isinstance(value, str):
        return ToolAnswer(text=value)

    response: Any = value
    if isinstance(value, Mapping) and value and set(value) <= _MEDIA:
        response = ToolResponse.model_validate(dict(value))
    # A ToolResponse of ours, or of a package with the same fields.
    if all(hasattr(response, name) for name in _MEDIA):
        images = [_plain_path(image) for image in response.image or ()]
        return ToolAnswer(response.text or "", images, list(response.video or []))
    if isinstance(value, Iterator | AsyncIterator):
        raise TypeError(
            f"a tool must return its whole answer, got {type(value).__name__}. Replace yield by "
            "return"
        )
    return ToolAnswer(text=json.dumps(value, ensure_ascii=False, default=_for_json))


def _for_json(value: Any) -> Any:
    """Return the numbers of an array or a tensor; text for another value that has one.

    Raises:
        TypeError: the text would be an address in memory, other in every run, or Python's notation
            of bytes.
    """
    if hasattr(value, "tolist"):
        return value.tolist()

    kind = type(value)
    has_text = kind.__str__ is not object.__str__ or kind.__repr__ is not object.__repr__
    text = text_of(value)
    is_binary = isinstance(value, bytes | bytearray)
    if not has_text or is_binary or _ADDRESS.search(text) or inspect.isroutine(value):
        raise TypeError(
            f"a tool must return a text, a ToolResponse, or values that JSON can write, got "
            f"{kind.__name__}. Convert it to a text first, or return images as "
            "ToolResponse(image=[...])"
        )
    return text


def _plain_path(image: Any) -> Any:
    """Return a path as a text, and any other image as it is."""
    return os.fspath(image) if isinstance(image, os.PathLike) else image


def _plain_metrics(metrics: Any) -> dict[str, Any]:
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise TypeError(f"the metrics of a call must be a dict, got {type(metrics).__name__}")
    return {str(name): _plain(value) for name, value in metrics.items()}


def _plain(value: Any) -> Any:
    """Return a value that JSON holds as it is; text for any other."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return value[:MAX_METRIC_CHARACTERS]
    if hasattr(value, "item") and getattr(value, "size", 1) == 1:
        return _plain(value.item())
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(entry) for name, entry in value.items()}
    return text_of(value)[:MAX_METRIC_CHARACTERS]
