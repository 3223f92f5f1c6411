"""Format a user's values and errors for messages, readable and of limited length."""

import traceback
from typing import Any

from verl.utils.errors import describe_error, text_of

MAX_ERROR_CHARACTERS = 500
MAX_TRACEBACK_CHARACTERS = 10_000
MAX_SAMPLE_CHARACTERS = 1_000


def cut(text: str, limit: int) -> str:
    """Return at most about `limit` characters of a text: its beginning and its end."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} ... ({len(text) - 2 * half} characters cut) ... {text[-half:]}"


def on_one_line(value: Any, limit: int = MAX_SAMPLE_CHARACTERS) -> str:
    """Return a value as text on one line, with line breaks and control characters escaped."""
    text = cut(text_of(value), limit)
    escaped = (char if char.isprintable() else repr(char)[1:-1] for char in text)
    return "".join(escaped)


def describe_briefly(error: BaseException) -> str:
    """Return the class of an error and its text, at most about MAX_ERROR_CHARACTERS."""
    return cut(describe_error(error), MAX_ERROR_CHARACTERS)


def format_traceback(error: BaseException) -> str:
    """Return the traceback of an error."""
    text = "".join(traceback.format_exception(error)).rstrip()
    return cut(text, MAX_TRACEBACK_CHARACTERS)


def traceback_below(error: BaseException | None) -> str:
    """Return the traceback of an error as lines below a message that has its text.

    "" if nothing was raised: an error that describes the end of a process has no traceback.
    """
    if error is None or (error.__traceback__ is None and error.__cause__ is None):
        return ""
    return "\n" + format_traceback(error)
