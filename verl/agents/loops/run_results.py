"""Check the value that `run` of a user's agent loop returns."""

import inspect
from collections.abc import Callable
from typing import Any, get_origin

from verl.agents.loops.server_manager import TokenOutput
from verl.utils.errors import ConfigError, RolloutError

# No value of these types has the tokens of an episode.
_NO_OUTPUTS = ("bool", "bytes", "dict", "float", "int", "str", "tuple")
_WAY_OUT = (
    "Return AgentLoopOutput(prompt_ids=..., response_ids=..., response_mask=...): the ids that were "
    "given to server_manager.generate, those that it returned, and 1 for each of the latter. The "
    "trainer learns from drawn tokens, and never tokenizes a text again."
)


def check_annotated_result(run: Callable[..., Any], name: str) -> None:
    """Check the annotation of `run` where it has one: `-> str` promises no AgentLoopOutput.

    Raises ConfigError for a type that has no tokens.

    Args:
        name: of the agent loop.
    """
    annotation = inspect.signature(run).return_annotation
    written = annotation
    if not isinstance(annotation, str):  # a text with `from __future__ import annotations`
        written = getattr(get_origin(annotation) or annotation, "__name__", "")

    if written in _NO_OUTPUTS:
        raise ConfigError(
            f"run of the agent loop '{name}' is annotated with -> {written}, but it must return an "
            f"AgentLoopOutput or a list of them. {_WAY_OUT}"
        )


def outputs_of(result: Any, name: str) -> list[Any]:
    """Return the outputs in the value of `run`: one, or a list of several.

    Raises RolloutError for a value that holds none, or another thing.

    Args:
        name: of the agent loop.
    """
    outputs = [result]
    if isinstance(result, list) and not isinstance(result, TokenOutput):
        outputs = result
    if not outputs:
        raise RolloutError(f"The agent loop '{name}' returned no output. {_WAY_OUT}")

    for output in outputs:
        if not hasattr(output, "response_ids"):
            raise RolloutError(
                f"run of the agent loop '{name}' must return an AgentLoopOutput or a list of them, "
                f"got {_described(output)}. {_WAY_OUT}"
            )
    return outputs


def _described(value: Any) -> str:
    if value is None:
        return "None (is a return statement missing?)"
    if isinstance(value, TokenOutput):
        return "the answer of server_manager.generate"
    if isinstance(value, str):
        return f"the text {value[:80]!r}"
    return type(value).__name__
