"""The keywords that a function takes."""

import functools
from typing import Any

import pytest

from verl.utils.errors import ConfigError
from verl.utils.signatures import (
    check_keywords,
    declares,
    keywords_of,
    names_key,
    taken_by,
    takes_any_keyword,
)


def named(place: int, /, first: int, *rest: int, second: int = 0) -> tuple[int, int]:
    return first, second


def anything(first: int = 0, **others: Any) -> dict[str, Any]:
    return others


class Made:
    def __init__(self, first: int) -> None:
        self.first = first

    def method(self, first: int) -> None: ...


def test_only_accepted_keywords_are_passed():
    given = {"place": 0, "rest": 0, "first": 1, "second": 2, "third": 3}
    assert taken_by(named, given) == {"first": 1, "second": 2}
    assert taken_by(anything, given) == given
    assert taken_by(Made, given) == taken_by(Made(1).method, given) == {"first": 1}


def test_a_function_with_other_names_is_refused():
    check_keywords(lambda one, other=1: None, ["one"], "mine")
    message = (
        r"^mine is called with the keywords one; its signature is \(two\): missing .* 'two'\. "
        r"Give its parameters these names\.$"
    )
    with pytest.raises(ConfigError, match=message):
        check_keywords(lambda two: None, ["one"], "mine")


def test_what_a_function_declares_and_takes():
    assert keywords_of(named) == ["first", "second"]
    assert not takes_any_keyword(named)
    assert keywords_of(anything) == ["first"]
    assert takes_any_keyword(anything)
    assert takes_any_keyword(functools.partial(anything, first=1))
    assert declares(anything, "first")
    assert not declares(anything, "others")


def reads_directly(**kwargs: Any) -> Any:
    return kwargs["key"]


def reads_in_a_lambda(**kwargs: Any) -> Any:
    return sorted(range(2), key=lambda _: kwargs.get("key"))


def reads_in_a_parameter(**kwargs: Any) -> Any:
    def read(key: Any = None, **others: Any) -> Any:
        return key, others

    return read(**kwargs)


def reads_in_a_pattern(**kwargs: Any) -> Any:
    match kwargs:
        case {"key": value}:
            return value
    return None


def reads_others(**kwargs: Any) -> Any:
    """Read no "key"."""
    return [kwargs[name] for name in ("keys", "other")]


def test_a_key_is_found_wherever_the_code_of_a_function_names_it():
    for function in (
        reads_directly,
        reads_in_a_lambda,
        reads_in_a_parameter,
        reads_in_a_pattern,
        functools.wraps(reads_directly)(anything),
    ):
        assert names_key(function, "key"), function
    assert not names_key(reads_others, "key")
    assert not names_key(len, "key")
