"""The keywords that a function takes."""

import functools
from typing import Any

from verl.utils.signatures import declares, keywords_of, taken_by, takes_any_keyword


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


def test_what_a_function_declares_and_takes():
    assert keywords_of(named) == ["first", "second"]
    assert not takes_any_keyword(named)
    assert keywords_of(anything) == ["first"]
    assert takes_any_keyword(anything)
    assert takes_any_keyword(functools.partial(anything, first=1))
    assert declares(anything, "first")
    assert not declares(anything, "others")
