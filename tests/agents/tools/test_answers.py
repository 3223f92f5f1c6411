import json
import re
from decimal import Decimal
from pathlib import PurePath
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from pydantic import BaseModel, Field, ValidationError

from verl.agents.tools import ToolResponse
from verl.agents.tools.answers import TextLimit, describe_failure, finite, read_answer
from verl.utils.errors import ConfigError

ANY = TextLimit(None)
IMAGE = Image.new("RGB", (24, 24))


@pytest.mark.parametrize(
    ("side", "cut"),
    [
        ("left", "01234...(truncated)"),
        ("right", "(truncated)...56789"),
        ("middle", "01...(truncated)...89"),
    ],
)
def test_a_long_text_is_cut_as_verl_cuts_it(side, cut):
    assert TextLimit(5, side).cut("0123456789") == cut
    assert TextLimit(10, side).cut("0123456789") == "0123456789"


def test_no_limit_and_a_limit_of_zero():
    assert TextLimit(None, "left").cut("x" * 1000) == "x" * 1000
    assert TextLimit(0, "middle").cut("abc") == "...(truncated)..."
    assert TextLimit(0, "right").cut("abc") == "(truncated)..."


def test_wrong_limits_are_refused():
    with pytest.raises(ConfigError, match="tool_response_truncate_side.*'center'"):
        TextLimit(5, "center")
    with pytest.raises(ConfigError, match="max_tool_response_length"):
        TextLimit(-1, "left")


@pytest.mark.parametrize(
    ("value", "text", "reward", "metrics"),
    [
        ("hi", "hi", None, {}),
        (("hi", 0.5, {"a": 1}), "hi", 0.5, {"a": 1}),
        (("hi", 1), "hi", 1.0, {}),
        (("hi",), "hi", None, {}),
        ((ToolResponse(text="hi"), np.float32(0.5), None), "hi", 0.5, {}),
        ({"text": "hi"}, "hi", None, {}),
        (None, "", None, {}),
        ({"answer": 42}, '{"answer": 42}', None, {}),
        ([1, "ä"], '[1, "ä"]', None, {}),
        (3, "3", None, {}),
        ({"n": np.int64(3), "l": np.array([1, 2])}, '{"n": 3, "l": [1, 2]}', None, {}),
    ],
)
def test_all_shapes_of_answers_are_read(value, text, reward, metrics):
    answer = read_answer(value, ANY)
    assert (answer.text, answer.reward, answer.metrics) == (text, reward, metrics)


def test_images_and_videos_come_from_dicts_and_responses():
    for value in (
        {"text": "see", "image": ["i"], "video": ["v"]},
        ToolResponse(text="see", image=["i"], video=["v"]),
        SimpleNamespace(text="see", image=["i"], video=["v"]),
    ):
        answer = read_answer(value, ANY)
        assert (answer.text, answer.images, answer.videos) == ("see", ["i"], ["v"])


@pytest.mark.parametrize(
    "value", [("a", "b"), ("a", float("nan")), ("a", 1, {}, 2), (), ("a", 1, [3])]
)
def test_other_shapes_are_errors(value):
    with pytest.raises((TypeError, ValueError)):
        read_answer(value, ANY)


@pytest.mark.parametrize("value", ["a lot", [1.0], None])
def test_a_reward_that_is_no_number_is_named(value):
    with pytest.raises(
        TypeError, match="the step reward must be a number, got (str|list|NoneType)"
    ):
        finite(value, "the step reward")


@pytest.mark.parametrize(
    "value",
    [object(), {"found": object()}, b"12", len, lambda: "12", IMAGE, {"images": [IMAGE]}, [IMAGE]],
)
def test_a_value_without_a_text_is_refused(value):
    with pytest.raises(TypeError, match="must return a text, a ToolResponse, or values that JSON"):
        read_answer(value, ANY)


@pytest.mark.parametrize(
    ("fields", "fact"),
    [
        ({"image": IMAGE}, r"ToolResponse.image must be a list of images, got Image. Use image=\["),
        ({"image": "a.png"}, r"image must be a list of images, got str. Use image=\[\.\.\.\]"),
        ({"video": b"00"}, "ToolResponse.video must be a list of videos, got bytes"),
        ({"text": 5}, r"ToolResponse.text must be a text, got int. Use text=str\("),
    ],
)
def test_fields_of_a_response_are_named(fields, fact):
    with pytest.raises(ValueError, match=fact):
        ToolResponse(**fields)
    with pytest.raises(ValueError, match=fact) as raised:
        read_answer(fields, ANY)
    assert re.fullmatch(f"Error: ValidationError: .*{fact}.*", describe_failure(raised.value, ANY))
    assert "pydantic" not in describe_failure(raised.value, ANY)


def test_errors_of_other_models_give_places_and_reasons():
    class City(BaseModel):
        name: str
        size: int = Field(ge=0)

    with pytest.raises(ValidationError) as raised:
        City.model_validate({"size": -1})
    line = describe_failure(raised.value, ANY)
    assert line.startswith("Error: ValidationError: name: Field required; size: Input should be")
    assert "http" not in line


def test_images_may_be_paths():
    answer = read_answer(ToolResponse(image=[PurePath("a.png"), IMAGE]), ANY)
    assert answer.images == ["a.png", IMAGE]


def test_a_value_with_a_text_of_its_own_is_read():
    assert read_answer({"n": Decimal("3.5"), "p": PurePath("a")}, ANY).text == (
        '{"n": "3.5", "p": "a"}'
    )


def _pieces():
    yield "a"


async def _later_pieces():
    yield "a"


@pytest.mark.parametrize("value", [_pieces(), _later_pieces()])
def test_an_answer_in_pieces_is_refused(value):
    with pytest.raises(TypeError, match="whole answer, got .*generator. Replace yield by return"):
        read_answer(value, ANY)


@pytest.mark.parametrize(
    ("given", "read"), [("caf\ud83d", "caf\ufffd"), ("\ud83d\ude00", "\U0001f600"), ("é", "é")]
)
def test_halves_of_characters_are_replaced(given, read):
    assert read_answer(given, ANY).text == read
    assert describe_failure(ValueError(given), ANY).endswith(read)


def test_metrics_become_plain_values():
    metrics = {"n": np.int64(3), "s": "x" * 1000, "o": object(), "l": [np.float64(0.5)]}
    plain = read_answer(("a", 0, metrics), ANY).metrics
    assert plain["n"] == 3
    assert plain["l"] == [0.5]
    assert len(plain["s"]) == 200
    assert json.loads(json.dumps(plain)) == plain


def test_an_error_is_one_short_line():
    error = ValueError("first\nsecond" + "x" * 10_000)
    line = describe_failure(error, TextLimit(100, "left"))
    assert line.startswith("Error: ValueError: first second")
    assert len(line) <= 120
    assert "\n" not in line
