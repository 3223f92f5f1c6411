"""Schemas of tools and of the calls that a model makes, as verl names them.

Keys that no field declares (`items` of an array, nested objects) are kept and reach the prompt.
"""

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from verl.agents.json_types import JSON_CLASSES, json_kind


class _Schema(BaseModel):
    model_config = ConfigDict(extra="allow")


class OpenAIFunctionPropertySchema(_Schema):
    """One parameter. `type` is absent where the schema says `anyOf` instead."""

    type: str | list[str] | None = None
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(_Schema):
    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] = {}
    required: list[str] = []

    def problems_of(self, arguments: Mapping[str, Any]) -> list[str]:
        """Return the arguments that are missing or have another type than the schema asks for."""
        problems = [f"{name}: missing" for name in self.required if name not in arguments]
        for name, value in arguments.items():
            asked = self.properties[name].type if name in self.properties else None
            kinds = [asked] if isinstance(asked, str) else asked or []
            known = [kind for kind in kinds if kind in JSON_CLASSES]
            if known and not any(isinstance(value, JSON_CLASSES[kind]) for kind in known):
                problems.append(f"{name}: expected {' or '.join(kinds)}, got {json_kind(value)}")
        return problems


class OpenAIFunctionSchema(_Schema):
    name: str
    description: str = ""
    parameters: OpenAIFunctionParametersSchema = OpenAIFunctionParametersSchema()
    strict: bool = False


class OpenAIFunctionToolSchema(_Schema):
    """A tool as OpenAI-style chat templates print it."""

    type: str = "function"
    function: OpenAIFunctionSchema

    def for_prompt(self) -> dict[str, Any]:
        """Return the plain values that a chat template prints: only keys that were given."""
        return self.model_dump(exclude_unset=True, exclude_none=True)


def function_schema(
    name: str, description: str, properties: dict[str, dict[str, Any]]
) -> OpenAIFunctionToolSchema:
    """Return the schema of a tool with these parameters, all of them required."""
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": name, "description": description, "parameters": parameters}
    return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})


class OpenAIFunctionParsedSchema(_Schema):
    """A call as a parser finds it. `arguments` is JSON text."""

    name: str
    arguments: str


class OpenAIFunctionCallSchema(_Schema):
    """A call with decoded arguments."""

    name: str
    arguments: dict[str, Any]

    @staticmethod
    def from_openai_function_parsed_schema(
        parsed_schema: OpenAIFunctionParsedSchema,
    ) -> "tuple[OpenAIFunctionCallSchema, bool]":
        """Return the decoded call, and whether decoding failed.

        Text that is not a JSON object counts as a failure and gives a call without arguments.
        """
        try:
            arguments = json.loads(parsed_schema.arguments)
        except ValueError:
            arguments = None

        failed = not isinstance(arguments, dict)
        call = OpenAIFunctionCallSchema(
            name=parsed_schema.name, arguments={} if failed else arguments
        )
        return call, failed


class OpenAIFunctionToolCall(_Schema):
    """A call with its identifier, as an assistant message holds it."""

    id: str
    type: Literal["function"] = "function"
    function: OpenAIFunctionCallSchema


class ToolResponse(BaseModel):
    """Answer of a tool: text, images, videos, or several of them."""

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    @field_validator("text", "image", "video", mode="before")
    @classmethod
    def _check_type(cls, value: Any, info: ValidationInfo) -> Any:
        """Return the value of a field. Raises ValueError, with the way out, for another type."""
        name = info.field_name
        got = type(value).__name__
        if name == "text" and not isinstance(value, str | None):
            raise ValueError(f"ToolResponse.text must be a text, got {got}. Use text=str(...)")
        if name != "text" and not isinstance(value, list | tuple | None):
            raise ValueError(
                f"ToolResponse.{name} must be a list of {name}s, got {got}. Use {name}=[...]"
            )
        return value

    def is_empty(self) -> bool:
        """Whether there is no text, no image and no video."""
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        """Whether there is text, and no image or video."""
        return bool(self.text) and not (self.image or self.video)
