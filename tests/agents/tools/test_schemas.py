import pytest

from verl.agents.tools import (
    OpenAIFunctionCallSchema,
    OpenAIFunctionParsedSchema,
    OpenAIFunctionToolSchema,
    ToolResponse,
)
from verl.agents.tools.base import as_schema
from verl.utils.errors import ConfigError

SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search.",
        "parameters": {
            "type": "object",
            "properties": {
                "query_list": {
                    "type": "array",
                    "items": {"type": "string"},
                    "description": "queries",
                }
            },
            "required": ["query_list"],
        },
        "strict": False,
    },
}


def test_prompt_has_exactly_the_given_fields():
    schema = OpenAIFunctionToolSchema.model_validate(SEARCH)
    assert schema.for_prompt() == SEARCH


def test_types_may_be_a_list_and_parameters_may_be_absent():
    properties = {"x": {"type": ["string", "null"], "enum": ["a", 1]}}
    parameters = {"type": "object", "properties": properties}
    given = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    assert OpenAIFunctionToolSchema.model_validate(given).for_prompt() == given

    bare = OpenAIFunctionToolSchema.model_validate({"function": {"name": "g"}})
    assert bare.type == "function"
    assert bare.function.parameters.required == []


@pytest.mark.parametrize("text", ["{", "[1]", "3", '"a"'])
def test_non_object_arguments_are_a_decode_error(text):
    parsed = OpenAIFunctionParsedSchema(name="f", arguments=text)
    call, failed = OpenAIFunctionCallSchema.from_openai_function_parsed_schema(parsed)
    assert failed
    assert call.arguments == {}


def test_arguments_are_decoded():
    parsed = OpenAIFunctionParsedSchema(name="f", arguments='{"a": [1]}')
    call, failed = OpenAIFunctionCallSchema.from_openai_function_parsed_schema(parsed)
    assert not failed
    assert (call.name, call.arguments) == ("f", {"a": [1]})


def test_a_wrong_schema_names_the_field():
    with pytest.raises(ConfigError, match="function.name"):
        as_schema({"type": "function", "function": {"description": "no name"}})


def test_kinds_of_responses():
    assert ToolResponse().is_empty()
    assert ToolResponse(text="a").is_text_only()
    assert not ToolResponse(text="a", image=["i"]).is_text_only()
    with pytest.raises(ValueError, match="image"):
        ToolResponse(image="not a list")  # pyright: ignore[reportArgumentType]
