"""The base class of tools, and how its methods are called in the ways of all verl versions.

    class Weather(BaseTool):
        async def create(self, instance_id=None, city="", **kwargs):
            self.cities[instance_id] = city
            return instance_id, ToolResponse()          # or the identifier alone, as in verl 0.5

        async def execute(self, instance_id, parameters, **kwargs):
            return ToolResponse(text="sunny"), 0.0, {}  # or "sunny", 0.0, {}

A trajectory has one instance of each tool that it uses: `create` when the tool is first called, or
at the start where the row has arguments for it; `calc_reward` and `release` at its end, whatever
happened. One object serves all trajectories, so state of a trajectory lies under its identifier.

Keys of `config` that the calls read, next to those of the class:

    isolation        "process": in helper processes, which are replaced when they hang or die. The
                     default, except for classes of this package. "thread": in this process.
    timeout_s        deadline of a call, with its retries; default: that of the run
    retries          further attempts after an error or a crash; default 0
    retry_delay_s    wait before the first of them, doubled each time; default 0.5
    parallel         whether one instance takes several calls of a turn at once. The default is no
                     for a class with `create`: the order of calls may change its state.

`execute` gets the state of the episode as `agent_data` (`verl.agents.tools.agent_data.AgentData`)
if it declares a parameter of that name or takes `**kwargs`. In a helper process it gets a copy, and
with `**kwargs` only if the code of its class names the key: `kwargs.get("agent_data")`.

A class without `create`, `calc_reward` and `release` of its own keeps nothing between calls, and
none of the three is called.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, ClassVar
from uuid import uuid4

from pydantic import ValidationError

from verl.agents.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.rewards.texts import describe_briefly
from verl.utils.errors import ConfigError
from verl.utils.logging import logger
from verl.utils.signatures import class_names_key, declares, taken_by, takes_any_keyword

# Keys of `config` that decide how a tool of any class is called.
CALL_SETTINGS = ("isolation", "parallel", "retries", "retry_delay_s", "timeout_s")
AGENT_DATA = "agent_data"  # the keyword of `execute`
Executed = tuple[ToolResponse, float, dict[str, Any]]  # answer, step reward, metrics


class ToolArgumentError(ValueError):
    """The model's arguments do not fit. Its text is the answer, and the call counts as malformed.

    A tool raises it for a mistake of the model, which no error policy of the run applies to.
    """


class ToolTimeoutError(RuntimeError):
    """The service behind a tool did not answer within a deadline of its own.

    A tool raises it so that the call counts as `timeout`.
    """


class BaseTool:
    """A tool of which every trajectory has an instance, known by an identifier.

    One object holds the instances of all trajectories of its process.

    All methods are coroutines; a plain method of a subclass runs in a thread.

    Attributes:
        config_keys: keys of `config` that the class reads, next to those of its base classes. Where
            a class declares them, other keys are errors at start; else all keys pass.

    Args:
        config: settings of the class and of its calls, see the module.
        tool_schema: the schema that the model reads; None: that of `get_openai_tool_schema`.

    Raises:
        ConfigError: there is no schema.
    """

    config_keys: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None
    ) -> None:
        self.config = config
        self.tool_schema: Any = tool_schema
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        if self.tool_schema is None:
            raise ConfigError(
                f"{type(self).__name__} needs a tool_schema. Write one in the tool configuration, "
                "or return it from get_openai_tool_schema."
            )
        self.tool_schema = as_schema(self.tool_schema)
        self.name: str = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema | None:
        """Return the schema of a class that brings its own."""
        return self.tool_schema

    async def create(
        self, instance_id: str | None = None, **kwargs: Any
    ) -> "str | tuple[str, ToolResponse]":
        """Make the instance of a trajectory and return its identifier.

        Args:
            kwargs: `create_kwargs` of the row, each under its name, and all of them as
                `create_kwargs`.
        """
        return instance_id or str(uuid4())

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """Make a call and return (answer, step reward, metrics), or the first of these alone.

        The answer is a text, a ToolResponse or a dict with `text`, `image` and `video`.
        """
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Return the reward of the whole trajectory, for the state of the instance."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Drop the instance."""

    def takes_agent_data(self, *, is_copied: bool) -> bool:
        """Return whether `execute` gets the state of the episode; see the module.

        Nearly every `execute` has `**kwargs`. A copy goes to those alone whose class names the key,
        in `execute` or in a method that it may call.

        Args:
            is_copied: it is sent to a helper process with every call.
        """
        if declares(self.execute, AGENT_DATA):
            return True
        if not takes_any_keyword(self.execute):
            return False
        return not is_copied or class_names_key(type(self), AGENT_DATA, BaseTool)

    def shut_down(self) -> None:
        """Free resources that all instances share. Called once, at the end of the run."""


def declared_keys(tool_class: type[BaseTool]) -> list[str]:
    """Return `config_keys` of a class and of its base classes.

    Raises:
        ConfigError: a class declares something else than names.
    """
    declared: list[str] = []
    for each in tool_class.__mro__:
        keys = vars(each).get("config_keys", ())
        is_list = isinstance(keys, Collection) and not isinstance(keys, str)
        if not is_list or not all(isinstance(key, str) for key in keys):
            raise ConfigError(
                f"{each.__name__}.config_keys must be a tuple of names such as ('unit',), got "
                f"{keys!r}."
            )
        declared += keys
    return declared


def shut_down(tool: BaseTool) -> None:
    """Free the shared resources of a tool. A failure is logged."""
    try:
        tool.shut_down()
    except Exception as error:  # noqa: BLE001  (a user's code, at the end of the run)
        logger.warning("The tool '%s' failed in shut_down: %s", tool.name, describe_briefly(error))


def check_names(placed: Iterable[tuple[str, str]]) -> None:
    """Check that no two tools have one name.

    Args:
        placed: name of each tool, and where it comes from.

    Raises:
        ConfigError: two have; the message says where both come from.
    """
    places: dict[str, str] = {}
    for name, place in placed:
        if name in places:
            raise ConfigError(
                f"{place}: the tool name '{name}' is taken by {places[name]}. Give one of them "
                "another name: function.name of its tool_schema, or @function_tool(name=...)."
            )
        places[name] = place


def as_schema(schema: Any) -> OpenAIFunctionToolSchema:
    """Return a schema from one, from plain values, or from another class with the same fields.

    Raises:
        ConfigError: it is none; the message names the field.
    """
    if isinstance(schema, OpenAIFunctionToolSchema):
        return schema
    if hasattr(schema, "model_dump"):
        schema = schema.model_dump(exclude_unset=True)
    try:
        return OpenAIFunctionToolSchema.model_validate(schema)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "tool_schema"
        raise ConfigError(
            f"tool_schema must be {{type: function, function: {{name, description, parameters}}}}; "
            f"{place}: {first['msg']}."
        ) from error


def create_arguments(
    create: Callable[..., Any], create_kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the keywords of `create`, for the signatures of verl 0.5 and of later versions.

    verl 0.5 gives each value under its name, later versions give all as `create_kwargs`. A
    function gets both where it takes both.
    """
    keywords = dict(create_kwargs)
    if declares(create, "create_kwargs"):
        keywords = taken_by(create, keywords)
        keywords["create_kwargs"] = dict(create_kwargs)
    elif takes_any_keyword(create) and create_kwargs:
        keywords["create_kwargs"] = dict(create_kwargs)
    return keywords


def keeps_instances(tool: BaseTool) -> bool:
    """Whether the class has `create`, `calc_reward` or `release` of its own."""
    names = ("create", "calc_reward", "release")
    return any(getattr(type(tool), name) is not getattr(BaseTool, name) for name in names)


def created_id(answer: Any, instance_id: str) -> str:
    """Return the identifier in the answer of `create`; None stands for the one it was given."""
    if isinstance(answer, tuple) and answer:
        answer = answer[0]
    if answer is None:
        return instance_id
    if not isinstance(answer, str):
        raise TypeError(
            f"create must return the identifier of its instance, a str, or (identifier, "
            f"ToolResponse), got {type(answer).__name__}"
        )
    return answer
