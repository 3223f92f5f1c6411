"""Rules that are tables: each row is a condition, and the message where a configuration meets it."""

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from verl.config.keys import value_at

# Takes the configuration of its root and yields contradictions: expectation, fact, way out.
Messages = Iterator[str]
Rule = Callable[[Any], Messages]
Row = tuple[bool, str] | tuple[bool, str, Mapping[str, str]]
Rows = Iterable[Row]
KEY_IN_MESSAGE = re.compile(r"\{([a-z_.]+)(=?)\}")


def table(rows: Callable[[Any], Rows]) -> Rule:
    """Make a rule of a function that returns rows.

    In a message, {trainer.mode} is the value of that key, and {trainer.mode=} is trainer.mode=sync.
    A third entry of a row, {"found": text}, gives the text for {found}. Text that a user may have
    written, such as a file's name, belongs there: in an f-string, its braces would be read as keys.
    """

    @functools.wraps(rows)
    def rule(config: Any) -> Messages:
        for is_met, message, *more in rows(config):
            if is_met:
                texts = more[0] if more else {}
                yield _filled(message, config, texts)

    return rule


def _filled(message: str, config: Any, texts: Mapping[str, str]) -> str:
    """Replace the names in braces by the texts of that name, or by the values of these keys."""

    def written(key: re.Match[str]) -> str:
        path, equals = key.groups()
        value = texts[path] if path in texts else value_at(config, path)
        return f"{path}={value}" if equals else str(value)

    return KEY_IN_MESSAGE.sub(written, message)
