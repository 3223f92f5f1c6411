"""A file of agent loops in verl's two forms, and runs of one of them."""

from contextlib import closing

from tests.agents.scripted import chat_tokenizer, episode, play, rollout_config
from verl.agents import AgentRunner
from verl.agents.checks import check_rows

LOOPS = '''
import asyncio
import runpy
import time
from pathlib import Path

from verl.agents import AgentLoopBase, AgentLoopOutput


class Old(AgentLoopBase):
    """verl 0.5: run(messages, sampling_params), ids as a plain list, no log-probs."""

    @classmethod
    def init_class(cls, config, tokenizer, **kwargs):
        cls.prepared = getattr(cls, "prepared", 0) + 1

    def __init__(self, trainer_config, server_manager, tokenizer, word="again", **kwargs):
        super().__init__(trainer_config, server_manager, tokenizer, **kwargs)
        self.word = word

    async def run(self, messages, sampling_params):
        assert self.prepared == 1
        prompt = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        prompt_ids = self.tokenizer.encode(prompt, add_special_tokens=False)
        first = await self.server_manager.generate(
            "id", prompt_ids=prompt_ids, sampling_params=sampling_params
        )
        more = self.tokenizer.encode(f" {self.word} ", add_special_tokens=False)
        second = await self.server_manager.generate(
            "id", prompt_ids=prompt_ids + first + more, sampling_params=sampling_params
        )
        ids = first + more + second
        mask = [1] * len(first) + [0] * len(more) + [1] * len(second)
        limit = self.config.actor_rollout_ref.rollout.response_length
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=ids[:limit],
            response_mask=mask[:limit],
            num_turns=4,
            metrics={"tool_calls": 0.5},
        )


class New(AgentLoopBase):
    """verl 0.6 and later: run(sampling_params, **kwargs), a score, fields for the reward."""

    async def run(self, sampling_params, **kwargs):
        prompt = self.tokenizer.apply_chat_template(
            kwargs["raw_prompt"], add_generation_prompt=True, tokenize=False
        )
        prompt_ids = self.tokenizer.encode(prompt, add_special_tokens=False)
        drawn = await self.server_manager.generate(
            request_id="id", prompt_ids=prompt_ids, sampling_params=sampling_params
        )
        outputs = []
        for number in range(kwargs.get("outputs", 1)):
            outputs.append(
                AgentLoopOutput(
                    prompt_ids=prompt_ids,
                    response_ids=drawn.token_ids,
                    response_mask=[1] * len(drawn.token_ids),
                    response_logprobs=drawn.log_probs,
                    reward_score=0.25 * number,
                    extra_fields={"turn_scores": [1.0], **kwargs.get("fields", {})},
                )
            )
        return outputs if len(outputs) > 1 else outputs[0]


class Seven(AgentLoopBase):
    """verl 0.7: all arguments by position, and the helpers of the base class."""

    def __init__(
        self, trainer_config, server_manager, tokenizer, processor, dataset_cls, data_config, word
    ):
        super().__init__(
            trainer_config, server_manager, tokenizer, processor, dataset_cls, data_config
        )
        self.word = word

    async def run(self, sampling_params, **kwargs):
        assert self.dataset_config.max_prompt_length == 2000
        messages = kwargs["raw_prompt"]
        assert await self.process_vision_info(messages) == {}
        ids = await self.apply_chat_template(messages)
        first = await self.server_manager.generate(
            request_id="id", prompt_ids=ids, sampling_params=sampling_params
        )
        more = [{"role": "user", "content": self.word}]
        added = await self.apply_chat_template(more, remove_system_prompt=True)
        second = await self.server_manager.generate(
            request_id="id",
            prompt_ids=ids + first.token_ids + added,
            sampling_params=sampling_params,
        )
        return AgentLoopOutput(
            prompt_ids=ids,
            response_ids=first.token_ids + added + second.token_ids,
            response_mask=[1] * len(first) + [0] * len(added) + [1] * len(second),
        )


class Unscored(New):
    async def run(self, sampling_params, **kwargs):
        output = await super().run(sampling_params, **kwargs)
        output.reward_score = float("nan")
        return output


class Empty(New):
    async def run(self, sampling_params, **kwargs):
        output = await super().run(sampling_params, **kwargs)
        output.response_ids = output.response_mask = []
        return output


class Nothing(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        return None


class Retokenizes(New):
    async def run(self, sampling_params, **kwargs):
        output = await super().run(sampling_params, **kwargs)
        output.response_ids = [*output.response_ids[:-1], 5]
        return output


class Warm(New):
    async def run(self, sampling_params, **kwargs):
        return await super().run({**sampling_params, "temperature": 0.1}, **kwargs)


class Stops(New):
    async def run(self, sampling_params, **kwargs):
        return await super().run({**sampling_params, "stop": ["Observation:"]}, **kwargs)


class Free(New):
    """Parameters that change no token are taken."""

    async def run(self, sampling_params, **kwargs):
        free = {"logprobs": 1, "stop": None, "presence_penalty": 0.0, "n": 1, "max_tokens": 50}
        return await super().run({**sampling_params, **free}, **kwargs)


class Later(AgentLoopBase):
    """verl 0.6 and later, with ids straight from the chat template."""

    @classmethod
    def init_class(cls, config, tokenizer, processor):
        cls.model = config.actor_rollout_ref.model.path
        cls.processor_of_class = processor

    def __init__(self, trainer_config, server_manager, tokenizer, processor):
        super().__init__(trainer_config, server_manager, tokenizer, processor=processor)

    async def run(self, sampling_params, **kwargs):
        assert self.processor is None and self.processor_of_class is None
        ids = self.tokenizer.apply_chat_template(
            kwargs["raw_prompt"], add_generation_prompt=True, tokenize=True
        )
        drawn = await self.server_manager.generate(
            request_id="id", prompt_ids=ids, sampling_params=sampling_params
        )
        names = ("agent_name", "tools_kwargs", "interaction_kwargs")
        return AgentLoopOutput(
            prompt_ids=ids,
            response_ids=drawn,
            response_mask=[1] * len(drawn),
            extra_fields={"model": self.model, **{name: kwargs[name] for name in names}},
        )


class Earlier(New):
    """Before verl 0.5: the configuration itself, under the name `config`."""

    def __init__(self, config, server_manager, tokenizer):
        super().__init__(config, server_manager, tokenizer)
        assert config.actor_rollout_ref.rollout.response_length > 0


class Unmade(New):
    def __init__(self, trainer_config, server_manager, tokenizer, database):
        super().__init__(trainer_config, server_manager, tokenizer)


class Unprepared(New):
    @classmethod
    def init_class(cls, config, tokenizer, database):
        pass


class Plain(New):
    def run(self, sampling_params, **kwargs):
        return None


class Generator(New):
    async def run(self, sampling_params, **kwargs):
        yield None


class Hidden(New):
    run = lambda self, sampling_params, **kwargs: None


class Raises(New):
    async def run(self, sampling_params, **kwargs):
        raise KeyError("nothing here")


class Exits(New):
    async def run(self, sampling_params, **kwargs):
        raise SystemExit(3)


class Blocks(New):
    async def run(self, sampling_params, **kwargs):
        time.sleep(0.3)
        await asyncio.sleep(0)
        return await super().run(sampling_params, **kwargs)


class Waits(New):
    async def run(self, sampling_params, **kwargs):
        try:
            await asyncio.wait_for(asyncio.sleep(10), 0.3)
        except asyncio.TimeoutError:
            return await super().run(sampling_params, **kwargs)


class Short(New):
    async def run(self, sampling_params, **kwargs):
        output = await super().run(sampling_params, **kwargs)
        output.response_logprobs = [0.0] * (len(output.response_ids) + 1)
        return output


class Weighted(New):
    async def run(self, sampling_params, **kwargs):
        output = await super().run(sampling_params, **kwargs)
        output.response_mask = [2] * len(output.response_ids)
        return output


class Overlong(New):
    async def run(self, sampling_params, **kwargs):
        output = await super().run(sampling_params, **kwargs)
        output.response_ids = output.response_ids + [1] * 5000
        output.response_mask = output.response_mask + [0] * 5000
        return output


class Asserts(New):
    async def run(self, sampling_params, **kwargs):
        return runpy.run_path(Path(__file__).with_name("helper.py"))["answer"]([])
'''


HELPER = """
def answer(tokens):
    assert len(tokens) > 0
"""


def check_row_of(loops: str, name: str) -> None:
    """Check a row that the loop `name` plays, as a run does before models load."""
    config = rollout_config(agent__agent_loop_config_path=loops)
    place = "rows.parquet, row 0"

    def column(asked):
        return iter([(place, name if asked == "agent_name" else None)])

    with closing(AgentRunner(config, chat_tokenizer())):
        check_rows(config, None, None, column)


def run(loops: str, name: str, episodes: int = 1, fields: dict | None = None, **settings):
    tokenizer = chat_tokenizer()
    config = rollout_config(agent__agent_loop_config_path=loops, **settings)
    rows = [episode(tokenizer, row, agent_name=name, **(fields or {})) for row in range(episodes)]
    trajectories, metrics, _ = play(config, tokenizer, lambda r, t, p: f"Reply {r} {t}", rows)
    return tokenizer, trajectories, metrics
