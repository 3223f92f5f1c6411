"""Agent loops in verl's form: a class with `run`, which gives tokens and their masks."""

import copy
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from omegaconf import OmegaConf

from verl.agents.blocking import BLOCKING_S, watched
from verl.agents.entries import checked_roles
from verl.agents.loops.base import AgentContext, Episode, agent_loops, check_prompt
from verl.agents.loops.run_results import check_annotated_result, outputs_of
from verl.agents.loops.server_manager import NumberedTurns, ServerManager, sampling_dict
from verl.agents.loops.user_base import AgentLoopBase, TrainerConfig
from verl.agents.row_options import present
from verl.agents.user_thread import is_finite_number
from verl.config import config_to_dict
from verl.data.rl_dataset import RLDataset
from verl.rollout.trajectory import Segment, Trajectory, fields_of_user
from verl.utils.errors import ConfigError, RolloutError, describe_error
from verl.utils.logging import say_once
from verl.utils.registry import nearest_names
from verl.utils.signatures import class_names_key, keywords_of, taken_by

# What the class of a loop gets in any case, and what it gets if it declares it.
_GIVEN = ("trainer_config", "server_manager", "tokenizer")
_OFFERED = ("processor", "dataset_cls", "dataset_config", "data_config")


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
        self.check()
        return UserLoop(context, self.name, self.loop_class, self.options)

    def check(self) -> None:
        """Raise ConfigError if the class cannot play: it has no async `run`, its `run` is annotated
        with a result that has no tokens, or its constructor has arguments that loops do not get."""
        run = getattr(self.loop_class, "run", None)
        if not callable(run):
            raise ConfigError(
                f"The agent loop '{self.name}' needs an async method run, but "
                f"{self.loop_class.__name__} has none. Derive it from verl.agents.AgentLoopBase."
            )
        if is_written_plain(run):
            raise ConfigError(
                f"run of the agent loop '{self.name}' ({self.loop_class.__name__}) must be async: "
                "write `async def run(...)`, and return the AgentLoopOutput."
            )
        check_annotated_result(run, self.name)

        given = keywords_for(
            self.loop_class, dict.fromkeys((*_GIVEN, *_OFFERED, "config")), self.options
        )
        try:
            inspect.signature(self.loop_class).bind(**given)
        except TypeError as error:
            raise ConfigError(
                f"The agent loop '{self.name}' cannot be made: {self.loop_class.__name__}(...): "
                f"{error}. Its __init__ gets {', '.join(_GIVEN)}, those of {', '.join(_OFFERED)} "
                f"that it names, and the options of its entry: {', '.join(self.options) or 'none'}."
            ) from error
        self._warn_of_unread_options()

    def _warn_of_unread_options(self) -> None:
        keywords = keywords_of(self.loop_class)
        if hasattr(self.loop_class, "init_class"):
            keywords += keywords_of(self.loop_class.init_class)
        known = [name for name in keywords if name not in (*_GIVEN, *_OFFERED, "config")]

        for option in self.options:
            if class_names_key(self.loop_class, option, AgentLoopBase):
                continue
            say_once(
                f"The entry of the agent loop '{self.name}' has the key '{option}', which no "
                f"method of {self.loop_class.__name__} names. Nearest known: "
                f"{nearest_names(option, known)}.",
                logging.WARNING,
            )

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
        self, context: AgentContext, name: str, loop_class: Any, options: Mapping[str, Any]
    ) -> None:
        self.context = context
        self.name = name
        self.loop_class = loop_class
        self.options = dict(options)
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
                f"{describe_error(error)}. It gets config, tokenizer, processor, and the "
                f"options of its entry: {', '.join(self.options) or 'none'}."
            ) from error

    async def play(self, episode: Episode) -> list[Trajectory]:
        """See `AgentLoop.play`."""
        server = ServerManager(self.context, episode)
        data = TrainerConfig(self.trainer_config.config.data)
        given = {
            "trainer_config": self.trainer_config,
            "server_manager": server,
            "tokenizer": self.tokenizer,
            "config": self.trainer_config.config,
            "processor": self.processor,
            "dataset_cls": RLDataset,
            "dataset_config": data,
            "data_config": data,
        }
        loop = self.loop_class(**keywords_for(self.loop_class, given, self.options))
        outputs = outputs_of(await self._run(loop, episode), self.name)

        trajectories = []
        for number, output in enumerate(outputs):
            trajectories.append(self._trajectory(episode, output, server, number))
        metrics = outputs[-1].metrics
        seconds = metrics if isinstance(metrics, Mapping) else dict(metrics)
        # verl's loops measure both themselves; a loop that does not has its turns measured.
        generating = float(seconds.get("generate_sequences") or server.seconds)
        self.context.tally.note("generate_sequences", generating)
        self.context.tally.note("tool_calls", float(seconds.get("tool_calls") or 0.0))
        return trajectories

    async def _run(self, loop: Any, episode: Episode) -> Any:
        sampling = sampling_dict(self.context.client.params)
        parameters = list(inspect.signature(loop.run).parameters)
        if parameters[:1] == ["messages"]:
            answer = loop.run(list(episode.messages), sampling)
        else:
            fields = {
                **episode.fields,
                "raw_prompt": list(episode.messages),
                "agent_name": episode.option("agent_name") or self.name,
                "tools_kwargs": present(episode.option("tools_kwargs")),
                "interaction_kwargs": present(episode.option("interaction_kwargs")),
            }
            answer = loop.run(sampling, **fields)

        if not inspect.isawaitable(answer):
            raise RolloutError(
                f"run of the agent loop '{self.name}' must be async: write `async def run(...)`."
            )
        return await watched(answer, self._warn_of_blocking)

    def _warn_of_blocking(self) -> None:
        say_once(
            f"The agent loop '{self.name}' blocks the event loop of all episodes: they and the "
            f"engine wait for more than {BLOCKING_S:g} s in one piece of its code. Await inside "
            "it, or call slow functions by `await asyncio.to_thread(function, ...)`.",
            logging.WARNING,
        )

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

        if not response:
            raise RolloutError(
                f"The agent loop '{self.name}' returned no response_ids in sample {episode.row}; "
                "one token at least is due. Raise an error to drop such an episode, with "
                "actor_rollout_ref.rollout.agent.on_error=drop."
            )

        if any(entry not in (0, 1) for entry in mask):
            raise RolloutError(
                f"response_mask of the agent loop '{self.name}' must have 1 for tokens that the "
                f"model drew and 0 for all others, got {sorted(set(mask) - {0, 1})[:5]}."
            )

        log_probs = getattr(output, "response_logprobs", None)
        if log_probs and len(log_probs) != len(response):
            say_once(
                f"The agent loop '{self.name}' returned response_logprobs of another length than "
                "response_ids. They are not read: the log-probs that were recorded with the drawn "
                "tokens count. Leave them out, or give each token one.",
                logging.WARNING,
            )

        most = self.context.max_response_tokens
        if len(response) > most:
            say_once(
                f"The agent loop '{self.name}' returned more response_ids than the {most} of "
                "data.max_response_length, and those beyond are cut. Stop before that, or raise the "
                "key.",
                logging.WARNING,
            )
        response = response[:most]
        prompt = [int(token) for token in output.prompt_ids]
        check_prompt(episode, prompt, self.context.config.prompt_length)

        score = getattr(output, "reward_score", None)
        if score is not None and not is_finite_number(score):
            raise RolloutError(
                f"reward_score of the agent loop '{self.name}' must be a finite number or None, got "
                f"{score!r}."
            )

        extra = fields_of_user(getattr(output, "extra_fields", None))
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
            reward=score,
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
            own = asked.drawn.token_ids
            count = min(len(own), len(shown))

            # The output may end within a turn, at the limit of the response.
            is_whole = count == len(own) or end == len(response)
            if asked.prompt_ids == before and own[:count] == shown[:count] and is_whole and count:
                return asked.drawn.first(count).segment(turn)

        text = self.context.tokenizer.decode(shown[:8])
        raise RolloutError(
            f"The agent loop '{self.name}' marks tokens as the model's that the engine did not "
            f"draw there: {shown[:8]} ({text!r}) at response token {place}. Return the ids of "
            "server_manager.generate as they are, after the prompt_ids that were given to it, with "
            "mask 0 for all others. Never tokenize the text again. Where a role has a policy of "
            "its own, give generate the role of the output."
        )


def is_written_plain(run: Any) -> bool:
    """Return whether `run` is written as `def run`, or as a generator, in place of `async def run`.

    The function that a decorator of another name returns may give a coroutine, so it passes.
    """
    written = inspect.unwrap(run)
    if not inspect.isfunction(written) or written.__name__ != "run":
        return False
    return not inspect.iscoroutinefunction(written)


def keywords_for(
    loop_class: type, given: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the keywords that the class of a loop gets, out of all that there are.

    A class that declares `config` in place of `trainer_config` gets the configuration itself.
    """
    always: list[str] = list(_GIVEN)
    declared = keywords_of(loop_class)
    if "config" in declared and "trainer_config" not in declared:
        always[0] = "config"
    offered = {name: given[name] for name in _OFFERED}
    return {
        **{name: given[name] for name in always},
        **taken_by(loop_class, offered),
        **options,
    }


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
    own = {
        "actor_rollout_ref": {"rollout": asdict(rollout), "model": model},
        "data": {
            "max_prompt_length": rollout.prompt_length,
            "max_response_length": rollout.response_length,
            "return_raw_chat": True,
            "tool_config_path": rollout.multi_turn.tool_config_path,
        },
    }

    whole = {} if context.run is None else config_to_dict(context.run)
    tree = OmegaConf.merge(whole, own)
    # verl's loops read a name, by default hermes.
    tree.actor_rollout_ref.rollout.multi_turn.format = context.format_name or "hermes"
    tree.data.apply_chat_template_kwargs = {}  # those of the run are part of the template
    return tree
