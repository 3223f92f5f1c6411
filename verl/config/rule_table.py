"""Rules that are tables: each row is a condition, and the message where a configuration meets it."""

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from verl.config.keys import value_at

# Takes the configuration of its root and yields contradictions: expectation, fact, way out.
Messages = Iterator[str]
Rule = Callable[[Any], Messages]
Rows = Iterable[tuple[bool, str]]
KEY_IN_MESSAGE = re.compile(r"\{([a-z_.]+)(=?)\}")


def table(rows: Callable[[Any], Rows]) -> Rule:
    """Make a rule of a function that returns rows.

    In a message, {trainer.mode} is the value of that key, and {trainer.mode=} is trainer.mode=sync.
    """

    @functools.wraps(rows)
    def rule(config: Any) -> Messages:
        def written(key: re.Match[str]) -> str:
            path, equals = key.groups()
            value = value_at(config, path)
            return f"{path}={value}" if equals else str(value)

        for is_met, message in rows(config):
            if is_met:
                yield KEY_IN_MESSAGE.sub(written, message)

    return rule
