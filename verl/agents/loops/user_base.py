"""The classes that agent loops of a user derive from and return, in verl's form."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cached_property
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from verl.agents.formats.base import ToolSchemas
from verl.agents.loops.server_manager import NO_MEDIA
from verl.utils.errors import RolloutError


class AgentLoopMetrics(BaseModel):
    """Seconds that a loop spent."""

    model_config = ConfigDict(extra="allow")

    generate_sequences: float = 0.0
    tool_calls: float = 0.0


class AgentLoopOutput(BaseModel):
    """One trajectory in verl's form.

    Args:
        prompt_ids: the prompt of the first turn.
        response_ids: everything after it.
        response_mask: 1 for tokens that the engine drew.
        response_logprobs: ignored; the recorded ones count.
        num_turns: messages of the conversation.
        reward_score: score of the trajectory; None: the reward function gives it.
        role: name of the agent, where an episode has several. Roles are compared apart.
        is_trained: whether the trajectory is learned from; False for a frozen agent.
        extra_fields: further entries of `extra_info` for the reward function. `num_turns` is none
            of them: give the argument.
    """

    model_config = ConfigDict(extra="allow")

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    num_turns: int = 0
    reward_score: float | None = None
    role: str = ""
    is_trained: bool = True
    metrics: AgentLoopMetrics = Field(default_factory=AgentLoopMetrics)
    extra_fields: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _refuse_misspelled(self) -> "AgentLoopOutput":
        """Raise ValueError for a field that is nearly one of these. Those of later versions stay."""
        for name in self.model_extra or ():
            close = get_close_matches(name, type(self).model_fields, n=1, cutoff=0.85)
            if close:
                raise ValueError(f"AgentLoopOutput has no field '{name}'. Nearest: {close[0]}")
        return self


class TrainerConfig:
    """Holds the configuration, or its section `data`, as `.config`, as verl passes it to a loop."""

    def __init__(self, config: Any) -> None:
        self.config = config


class AgentLoopBase(ABC):
    """Base of agent loops in verl's form. One object plays one episode.

    A subclass implements `run(messages, sampling_params)`, as in verl 0.5, or
    `run(sampling_params, **kwargs)`, as in 0.6 and later, with the columns of the row as `kwargs`.

    Example:
        ```python
        @register("echo")
        class Echo(AgentLoopBase):
            async def run(self, sampling_params, **kwargs):
                ids = self.tokenizer.apply_chat_template(
                    kwargs["raw_prompt"], add_generation_prompt=True
                )
                drawn = await self.server_manager.generate(
                    "0", prompt_ids=ids, sampling_params=sampling_params
                )
                return AgentLoopOutput(
                    prompt_ids=ids, response_ids=drawn, response_mask=[1] * len(drawn)
                )
        ```
    """

    _class_initialized: ClassVar[bool] = False
    apply_chat_template_kwargs: ClassVar[Mapping[str, Any]] = {}

    def __init__(
        self,
        trainer_config: Any,
        server_manager: Any,
        tokenizer: Any,
        processor: Any = None,
        dataset_cls: Any = None,
        dataset_config: Any = None,
        *,
        data_config: Any = None,
        **kwargs: Any,
    ) -> None:
        self.config = getattr(trainer_config, "config", trainer_config)
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        self.processor = processor
        self.dataset_cls = dataset_cls
        section = dataset_config if data_config is None else data_config
        self.dataset_config = getattr(section, "config", section)
        self.data_config = self.dataset_config

    @property
    def loop(self) -> Any:
        """The running asyncio loop."""
        return asyncio.get_running_loop()

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any, **kwargs: Any) -> None:
        """Prepare the class. Called once in each process."""
        cls._class_initialized = True

    @cached_property
    def system_prompt(self) -> list[int]:
        """Token ids that the template writes before the first message of a conversation."""
        return system_prompt_of(self.tokenizer)

    async def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: ToolSchemas | None = None,
        images: Any = None,
        videos: Any = None,
        remove_system_prompt: bool = False,
    ) -> list[int]:
        """Return the token ids of messages with the generation prompt, as in verl 0.7.

        Args:
            messages: of the prompt, or those that continue a conversation.
            tools: OpenAI schemas.
            remove_system_prompt: leave out `system_prompt`, for messages that continue one.

        Raises RolloutError for images and videos.
        """
        if images or videos:
            raise RolloutError(NO_MEDIA)
        ids = _rendered(self.tokenizer, messages, tools=tools, add_generation_prompt=True)
        return ids[len(self.system_prompt) :] if remove_system_prompt else ids

    async def process_vision_info(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the images and videos of messages, as in verl 0.7: none in this version.

        Raises RolloutError for messages with any.
        """
        for message in messages:
            content = message.get("content")
            parts = content if isinstance(content, list) else ()
            if any(part.get("type") in ("image", "video") for part in parts):
                raise RolloutError(NO_MEDIA)
        return {}

    @abstractmethod
    async def run(self, *args: Any, **kwargs: Any) -> Any:
        """Play one episode. Return an AgentLoopOutput or a list of them."""
        raise NotImplementedError


def system_prompt_of(tokenizer: Any, **template_kwargs: Any) -> list[int]:
    """Return the token ids that a chat template writes before the first message.

    `template_kwargs` are variables of the template.
    """
    question = {"role": "user", "content": ""}
    options = {**template_kwargs, "add_generation_prompt": False}
    once = _rendered(tokenizer, [question], **options)
    twice = _rendered(tokenizer, [question, question], **options)
    return once[: 2 * len(once) - len(twice)]


def _rendered(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
    return tokenizer.apply_chat_template(
        list(messages), tokenize=True, return_dict=False, **options
    )
