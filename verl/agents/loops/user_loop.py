"""Agent loops in verl's form: a class with `run`, which gives tokens and their masks."""

import copy
import inspect
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, ClassVar

from omegaconf import OmegaConf
from pydantic import BaseModel, ConfigDict, Field

from verl.agents.engine_client import Generated
from verl.agents.entries import checked_roles
from verl.agents.loops.base import AgentContext, Episode, agent_loops, check_prompt
from verl.data.rl_dataset import RLDataset
from verl.rollout.trajectory import MODEL, Segment, Trajectory
from verl.rollout.types import SamplingParams
from verl.utils.errors import ConfigError, DataError, RolloutError
from verl.utils.signatures import taken_by

_LIMITS = ("max_tokens", "max_new_tokens")
# Sampling parameters that change no token: log-probs are always recorded, and loops get ids.
_WITHOUT_EFFECT = (
    *("logprobs", "return_logprob"),
    *("detokenize", "skip_special_tokens", "spaces_between_special_tokens"),
)
_NO_MEDIA = (
    "Agent loops of a user's own cannot generate from images and videos in this version. Leave them "
    "out, or play such prompts by tool_agent or single_turn_agent."
)


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
        extra_fields: what the reward function gets in `extra_info`.
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


class TokenOutput(list[int]):
    """Drawn token ids, which also carry their log-probs: both forms of `generate`'s answer."""

    def __init__(
        self,
        *,
        token_ids: Sequence[int],
        log_probs: Sequence[float] | None = None,
        routed_experts: Any = None,
        stop_reason: str | None = None,
        num_preempted: int | None = 0,
        extra_fields: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(token_ids)
        self.token_ids = list(token_ids)
        self.log_probs = None if log_probs is None else list(log_probs)
        self.routed_experts = routed_experts
        self.stop_reason = stop_reason
        self.num_preempted = num_preempted
        self.extra_fields: dict[str, Any] = dict(extra_fields or {})


@dataclass(frozen=True)
class DrawnTurn:
    """A turn that a loop asked for.

    Args:
        prompt_ids: all tokens before it.
        policy: the role of the partner that drew it; empty: the actor.
        drawn: its tokens.
    """

    prompt_ids: list[int]
    policy: str
    drawn: Generated


NumberedTurns = Sequence[tuple[int, DrawnTurn]]


class ServerManager:
    """Draws turns for one episode of a user's loop, and records them.

    verl's name for it is AsyncLLMServerManager.
    """

    def __init__(self, context: AgentContext, episode: Episode) -> None:
        self._context = context
        self._episode = episode
        self._params = sampling_dict(context.client.params)
        self.drawn: list[DrawnTurn] = []
        self._turns: Counter[str] = Counter()  # by policy
        self._frozen_turn = 0

    async def reply(self, role: str, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the next turn of a frozen role (`rollout.agent.policies`) as text.

        Args:
            role: that the policy plays.
            messages: of the conversation as the role sees it.
        """
        turn = self._frozen_turn
        self._frozen_turn += 1
        own = [dict(message) for message in messages]
        return await self._context.reply_of(role, own, self._episode, turn)

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        image_data: Any = None,
        video_data: Any = None,
        role: str = "",
        **_: Any,
    ) -> TokenOutput:
        """Draw the tokens after `prompt_ids`; see `TokenOutput`.

        `role` is drawn by the policy that is trained for it next to the actor
        (`rollout.agent.policies`), or else by the actor.

        Raises RolloutError for a frozen role, and for sampling parameters that are not the run's:
        recorded log-probs are defined at its temperature, and all turns end at the run's stops. A
        limit (`max_tokens` or `max_new_tokens`) is free.
        """
        if image_data or video_data:
            raise RolloutError(_NO_MEDIA)
        if role in self._context.policies:
            raise RolloutError(
                f"The role '{role}' is frozen, so none of its tokens is learned from. Ask it by "
                "server_manager.reply(role, messages)."
            )
        limit = self._limit(sampling_params)
        policy = self._context.policy_of(role)
        turn = self._turns[policy]
        self._turns[policy] += 1
        ids = [int(token) for token in prompt_ids]
        longest = self._context.client.max_model_len
        most = longest - len(ids)
        if most < 1:
            raise DataError(
                f"Turn {turn} of sample {self._episode.row} has a prompt of {len(ids)} tokens, "
                f"which leaves no room in {longest}. End the episode before, raise "
                "actor_rollout_ref.rollout.max_model_len, or drop such episodes: "
                "actor_rollout_ref.rollout.agent.on_error=drop."
            )
        drawn = await self._context.client_of(policy).generate(
            prompt_ids=ids,
            row=self._episode.row,
            turn=turn,
            limit=most if limit is None else min(limit, most),
        )
        self.drawn.append(DrawnTurn(ids, policy, drawn))
        return TokenOutput(
            token_ids=drawn.token_ids,
            log_probs=drawn.log_probs,
            stop_reason=drawn.finish_reason,
        )

    def _limit(self, asked: Mapping[str, Any]) -> int | None:
        for name, own in self._params.items():
            value = asked.get(name, own)
            if value is not None and value != own:
                raise RolloutError(
                    f"sampling_params['{name}'] is {value!r} in an agent loop, the rollout's is "
                    f"{own!r}. Leave it as given: log-probs are recorded at the rollout's settings."
                )
        for name, value in asked.items():
            is_known = name in self._params or name in _LIMITS or name in _WITHOUT_EFFECT
            if not is_known and value and (name, value) != ("n", 1):
                raise RolloutError(
                    f"sampling_params['{name}']={value!r} cannot be set for one turn of an agent "
                    "loop. Leave it out; actor_rollout_ref.rollout.stop and stop_token_ids hold "
                    "for all turns."
                )
        limits = [asked[name] for name in _LIMITS if asked.get(name)]
        return min(limits) if limits else None


def sampling_dict(params: SamplingParams) -> dict[str, Any]:
    """Return sampling parameters under the names that verl's loops get."""
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "repetition_penalty": 1.0,
    }


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
        import asyncio

        return asyncio.get_running_loop()

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any, **kwargs: Any) -> None:
        """Prepare the class. Called once in each process."""
        cls._class_initialized = True

    @cached_property
    def system_prompt(self) -> list[int]:
        """Token ids that the template writes before the first message of a conversation."""
        question = {"role": "user", "content": ""}
        once = self._rendered([question], add_generation_prompt=False)
        twice = self._rendered([question, question], add_generation_prompt=False)
        return once[: 2 * len(once) - len(twice)]

    async def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
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
            raise RolloutError(_NO_MEDIA)
        ids = self._rendered(messages, tools=tools, add_generation_prompt=True)
        return ids[len(self.system_prompt) :] if remove_system_prompt else ids

    async def process_vision_info(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the images and videos of messages, as in verl 0.7: none in this version.

        Raises RolloutError for messages with any.
        """
        for message in messages:
            content = message.get("content")
            parts = content if isinstance(content, list) else ()
            if any(part.get("type") in ("image", "video") for part in parts):
                raise RolloutError(_NO_MEDIA)
        return {}

    def _rendered(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        return self.tokenizer.apply_chat_template(
            list(messages), tokenize=True, return_dict=False, **options
        )

    @abstractmethod
    async def run(self, *args: Any, **kwargs: Any) -> Any:
        """Play one episode. Return an AgentLoopOutput or a list of them."""
        raise NotImplementedError


def register(agent_name: str) -> Callable[[type], type]:
    """Register a loop in verl's form under a name for the column `agent_name`."""

    def add(loop_class: type) -> type:
        add_user_loop(agent_name, loop_class)
        return loop_class

    return add


def add_user_loop(agent_name: str, loop_class: type, **options: Any) -> None:
    """Register `loop_class` with keywords of its own for every object."""

    agent_loops.register(agent_name)(UserLoopMaker(agent_name, loop_class, options))


@dataclass(frozen=True)
class UserLoopMaker:
    """Makes the loop of one class of a user's."""

    name: str
    loop_class: type
    options: Mapping[str, Any]

    def __call__(self, context: AgentContext) -> "UserLoop":
        return UserLoop(context, self.name, self.loop_class, self.options)

    @property
    def roles(self) -> tuple[str, ...] | None:
        """The roles that the class declares as `roles`; None where it declares none."""
        roles = getattr(self.loop_class, "roles", None)
        if roles is None:
            return None
        return checked_roles(f"The agent loop '{self.name}'", roles)


class UserLoop:
    """Plays episodes by a loop in verl's form, and proves its tokens.

    Every token with mask 1 must be one that the engine drew, after exactly the tokens that stand
    before it in the output. Log-probs are the recorded ones.
    """

    def __init__(
        self, context: AgentContext, name: str, loop_class: type, options: Mapping[str, Any]
    ) -> None:
        self.context = context
        self.name = name
        self.loop_class = loop_class
        self.options = dict(options)
        if not callable(getattr(loop_class, "run", None)):
            raise ConfigError(
                f"The agent loop '{name}' needs an async method run, but {loop_class.__name__} has "
                "none. Derive it from verl.agents.AgentLoopBase."
            )
        self.trainer_config = TrainerConfig(_full_config(context))
        self.tokenizer = with_plain_ids(context.tokenizer)
        pictures = context.pictures
        self.processor = None if pictures is None else pictures.processor.processor
        self._prepare_class()

    def _prepare_class(self) -> None:
        prepare = getattr(self.loop_class, "init_class", None)
        if prepare is None:
            return
        given = taken_by(prepare, {"processor": self.processor})
        try:
            prepare(
                config=self.trainer_config.config,
                tokenizer=self.tokenizer,
                **given,
                **self.options,
            )
        except Exception as error:  # a user's code may raise anything
            raise ConfigError(
                f"The agent loop '{self.name}' cannot be used: its init_class raised "
                f"{type(error).__name__}: {error}. It gets config, tokenizer, processor, and the "
                f"options of its entry: {', '.join(self.options) or 'none'}."
            ) from error

    async def play(self, episode: Episode) -> list[Trajectory]:
        """See `AgentLoop.play`."""
        server = ServerManager(self.context, episode)
        data = TrainerConfig(self.trainer_config.config.data)
        given = {
            "processor": self.processor,
            "dataset_cls": RLDataset,
            "dataset_config": data,
            "data_config": data,
        }
        loop = self.loop_class(
            trainer_config=self.trainer_config,
            server_manager=server,
            tokenizer=self.tokenizer,
            **{**taken_by(self.loop_class, given), **self.options},
        )
        answer = await self._run(loop, episode)
        outputs = answer if isinstance(answer, list) else [answer]
        if not outputs:
            raise RolloutError(f"The agent loop '{self.name}' returned no output.")
        for output in outputs:
            if not hasattr(output, "response_ids"):
                raise RolloutError(
                    f"run of the agent loop '{self.name}' must return an AgentLoopOutput or a list "
                    f"of them, got {type(output).__name__}."
                )

        trajectories = []
        for number, output in enumerate(outputs):
            trajectories.append(self._trajectory(episode, output, server, number))
        metrics = outputs[-1].metrics
        seconds = metrics if isinstance(metrics, Mapping) else dict(metrics)
        for name in ("generate_sequences", "tool_calls"):
            self.context.tally.note(name, float(seconds.get(name, 0.0)))
        return trajectories

    async def _run(self, loop: Any, episode: Episode) -> Any:
        sampling = sampling_dict(self.context.client.params)
        parameters = list(inspect.signature(loop.run).parameters)
        if parameters[:1] == ["messages"]:
            return await loop.run(list(episode.messages), sampling)
        fields = {
            **episode.fields,
            "raw_prompt": list(episode.messages),
            "agent_name": episode.option("agent_name") or self.name,
            "tools_kwargs": _present(episode.option("tools_kwargs")),
            "interaction_kwargs": _present(episode.option("interaction_kwargs")),
        }
        return await loop.run(sampling, **fields)

    def _trajectory(
        self, episode: Episode, output: Any, server: ServerManager, number: int
    ) -> Trajectory:
        response = [int(token) for token in output.response_ids]
        mask = list(output.response_mask)
        if len(response) != len(mask):
            raise RolloutError(
                f"The agent loop '{self.name}' returned {len(response)} response_ids and "
                f"{len(mask)} mask entries; each token needs one."
            )
        response = response[: self.context.max_response_tokens]
        prompt = [int(token) for token in output.prompt_ids]
        check_prompt(episode, prompt, self.context.config.prompt_length)
        extra = dict(getattr(output, "extra_fields", None) or {})
        role = getattr(output, "role", "")
        policy = self.context.policy_of(role)
        turns = [(turn, each) for turn, each in enumerate(server.drawn) if each.policy == policy]
        segments = self._segments(prompt, response, mask, turns)
        for segment in segments:
            segment.is_trained = getattr(output, "is_trained", True)
        return Trajectory(
            row=episode.row,
            prompt_ids=prompt,
            segments=segments,
            part=number,
            role=role,
            reward=getattr(output, "reward_score", None),
            num_turns=output.num_turns,
            extra=extra,
        )

    def _segments(
        self, prompt: list[int], response: list[int], mask: list[int], turns: NumberedTurns
    ) -> list[Segment]:
        """Cut a response into turns that its policy drew and the text between them."""
        segments: list[Segment] = []
        place = 0
        while place < len(response):
            end = place
            while end < len(response) and mask[end] == mask[place]:
                end += 1
            if not mask[place]:
                context = response[place:end]
                segments.append(Segment(source="template", token_ids=context, turn=len(segments)))
                place = end
                continue
            while place < end:
                segment = self._drawn_at(prompt, response, place, end, turns)
                segments.append(segment)
                place += len(segment.token_ids)
        return segments

    def _drawn_at(
        self, prompt: list[int], response: list[int], place: int, end: int, turns: NumberedTurns
    ) -> Segment:
        """Find the turn that was drawn after exactly the tokens before `place`."""
        before = [*prompt, *response[:place]]
        shown = response[place:end]
        for turn, asked in turns:
            drawn = asked.drawn
            own = drawn.token_ids
            count = min(len(own), len(shown))
            # The output may end within a turn, at the limit of the response.
            is_whole = count == len(own) or end == len(response)
            if asked.prompt_ids == before and own[:count] == shown[:count] and is_whole and count:
                return Segment(
                    source=MODEL,
                    token_ids=own[:count],
                    log_probs=drawn.log_probs[:count],
                    version=drawn.version,
                    versions=None if drawn.versions is None else drawn.versions[:count],
                    turn=turn,
                )
        text = self.context.tokenizer.decode(shown[:8])
        raise RolloutError(
            f"The agent loop '{self.name}' marks tokens as the model's that the engine did not "
            f"draw there: {shown[:8]} ({text!r}) at response token {place}. Return the ids of "
            "server_manager.generate as they are, after the prompt_ids that were given to it, with "
            "mask 0 for all others. Never tokenize the text again. Where a role has a policy of "
            "its own, give generate the role of the output."
        )


def _present(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Leave out None: Parquet gives every row the fields of all rows."""
    return {name: value for name, value in (kwargs or {}).items() if value is not None}


def with_plain_ids(tokenizer: Any) -> Any:
    """Return a copy of a tokenizer whose `apply_chat_template` returns a list of token ids.

    That of transformers 5 returns a dict unless it gets `return_dict=False`; loops that were
    written for an earlier release count on the list.
    """
    plain = copy.copy(tokenizer)
    render = plain.apply_chat_template

    def apply_chat_template(*args: Any, **kwargs: Any) -> Any:
        kwargs.setdefault("return_dict", False)
        return render(*args, **kwargs)

    plain.apply_chat_template = apply_chat_template
    return plain


def _full_config(context: AgentContext) -> Any:
    """Return the configuration as verl's loops read it: by attributes, from its root."""
    rollout = context.config
    model = {} if context.model is None else asdict(context.model)
    tree = {
        "actor_rollout_ref": {"rollout": asdict(rollout), "model": model},
        "data": {
            "max_prompt_length": rollout.prompt_length,
            "max_response_length": rollout.response_length,
            "return_raw_chat": True,
            "tool_config_path": rollout.multi_turn.tool_config_path,
            "apply_chat_template_kwargs": {},  # those of the run are part of the template
        },
    }
    return OmegaConf.create(tree)
