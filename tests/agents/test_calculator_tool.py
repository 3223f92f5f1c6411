"""The calculator is exact, answers mistakes with a sentence, and cannot be kept busy."""

import inspect
import time

import pytest
from hypothesis import given
from hypothesis.strategies import integers, sampled_from

from verl.agents.tools.base import ToolArgumentError
from verl.agents.tools.calculator import calculator


@given(one=integers(-999, 999), other=integers(1, 999), sign=sampled_from(["+", "-", "*", "//"]))
def test_results_match_python(one, other, sign):
    text = f"{one} {sign} {other}"
    assert calculator(text) == str(eval(text))


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12 * (3 + 4)", "84"),
        (" -7 % 3 ", "2"),
        ("2 ** 10", "1024"),
        ("1 / 4", "0.25"),
        ("0.1 + 0.2", "0.3"),
        ("6 / 3", "2"),
        ("2 ** -1", "0.5"),
        ("+5", "5"),
    ],
)
def test_values(expression, value):
    assert calculator(expression) == value


@pytest.mark.parametrize(
    ("expression", "fact"),
    [
        ("1 / 0", "Division by zero"),
        ("5 % (2 - 2)", "Division by zero"),
        ("0 ** -1", "Division by zero"),
        ("two", "Expected numbers and"),
        ("__import__('os')", "Expected numbers and"),
        ("'a' * 9", "Expected numbers and"),
        ("True + 1", "Expected numbers and"),
        ("1 << 9", "Expected"),
        ("2 ** 0.5", "whole number"),
        ("1 +", "Not an arithmetic expression"),
        ("", "Not an arithmetic expression"),
        ("1\0", "Not an arithmetic expression"),
        ("9" * 300, "200 characters"),
        ("9 ** 9 ** 9 ** 9", "bits"),
        ("9 ** 300 * 9 ** 300", "bits"),
    ],
)
def test_mistakes_of_the_model_are_answered_quickly(expression, fact):
    begin = time.monotonic()
    with pytest.raises(ToolArgumentError, match=fact):
        calculator(expression)
    assert time.monotonic() - begin < 1


def test_deep_nesting_is_an_error():
    with pytest.raises(ToolArgumentError):
        calculator("(" * 99 + "1" * 3 + ")" * 98)
    assert calculator("-" * 150 + "1") == "1"


def test_signature_and_docstring_describe_one_text_parameter():
    (parameter,) = inspect.signature(calculator).parameters.values()
    assert (parameter.name, parameter.annotation) == ("expression", str)
    assert "Args:\n    expression:" in (inspect.getdoc(calculator) or "")
