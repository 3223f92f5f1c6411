"""An engine with scripted replies, and a run of agent loops on it."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from tests.agents.templates import FAMILIES
from tests.agents.tokenizers import word_tokenizer
from verl.agents import AgentRunner, EngineClient, EngineSteps, Episode
from verl.config.model import ModelConfig
from verl.config.rollout import RolloutConfig
from verl.rollout import Completion, Request, Room, SamplingParams, Trajectory

PARAMS = SamplingParams(max_new_tokens=512)
# (row, turn, text of the prompt) -> the reply
Script = Callable[[int, int, str], str]


class ScriptedEngine:
    """Answers every request by a function of its row, its turn and the text of its prompt.

    The log-prob of a token is -its position - 1, so that each is known. A reply that is longer than
    its limit is cut; otherwise the end-of-turn token follows. With `names_experts`, the expert of a
    token has its id.
    """

    names_experts = False

    def __init__(self, tokenizer: Any, script: Script) -> None:
        self.tokenizer = tokenizer
        self.script = script
        self.prompts: list[tuple[int, ...]] = []
        self._finished: list[Completion] = []

    @property
    def has_work(self) -> bool:
        return bool(self._finished)

    def reserve(self, room: Room) -> None:
        pass

    def submit(
        self, requests: Sequence[Request], params: SamplingParams, *, seed: int, step: int
    ) -> None:
        for request in requests:
            self.prompts.append(request.prompt_ids)
            text = self.tokenizer.decode(list(request.prompt_ids))
            limits = request.limits or (params.max_new_tokens,) * len(request.sample_ids)
            for sample_id, limit in zip(request.sample_ids, limits):
                turn, row = divmod(sample_id, 1 << 32)
                reply = self.script(row, turn, text)
                ids = self.tokenizer.encode(reply, add_special_tokens=False)
                whole = [*ids, self.tokenizer.eos_token_id]
                drawn = whole[:limit]

                self._finished.append(
                    Completion(
                        sample_id=sample_id,
                        token_ids=drawn,
                        log_probs=[-1.0 - place for place in range(len(drawn))],
                        finish_reason="stop" if len(drawn) == len(whole) else "length",
                        routed_experts=np.array(drawn)[:, None] if self.names_experts else None,
                    )
                )

    def step(self) -> list[Completion]:
        finished = self._finished
        self._finished = []
        return finished

    def abort(self, sample_ids: Iterable[int] | None = None) -> list[Completion]:
        self._finished = []
        return []

    def statistics(self) -> dict[str, float]:
        return {}


def chat_tokenizer(family: str = "qwen2.5") -> Any:
    """Build a small tokenizer with the chat template of a family."""
    traits = FAMILIES[family]
    tokenizer = word_tokenizer(traits.specials, eos=traits.end, template=traits.template)
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def rollout_config(**settings: Any) -> RolloutConfig:
    """Build a rollout section; `multi_turn__x` and `agent__x` set keys of its subsections."""
    config = RolloutConfig(prompt_length=2000, response_length=2000, mode="async")
    for name, value in settings.items():
        section: Any = config
        *path, key = name.split("__")
        for part in path:
            section = getattr(section, part)
        setattr(section, key, value)
    return config


def episode(tokenizer: Any, row: int = 0, **fields: Any) -> Episode:
    """Make an episode with a short question."""
    messages = [{"role": "user", "content": f"Question {row}?"}]
    ids: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return Episode(
        row=row,
        messages=messages,
        prompt_ids=tokenizer.encode(ids, add_special_tokens=False),
        fields={"raw_prompt": messages, **fields},
    )


def play(
    config: RolloutConfig,
    tokenizer: Any,
    script: Script,
    episodes: Sequence[Episode],
) -> tuple[list[Trajectory], dict[str, float], ScriptedEngine]:
    """Play episodes on a scripted engine. Return trajectories, metrics and the engine."""
    engine = ScriptedEngine(tokenizer, script)
    runner = AgentRunner(config, tokenizer, model=ModelConfig(path="some/model"))
    client = EngineClient(EngineSteps(engine, PARAMS, seed=0, step=1), max_model_len=4000)
    try:
        trajectories = runner.play(episodes, client)
        return trajectories, runner.metrics(), engine
    finally:
        runner.close()


def text_of(tokenizer: Any, trajectory: Trajectory, source: str) -> list[str]:
    """Decode all segments of a source."""
    texts = []
    for segment in trajectory.segments:
        if segment.source == source:
            texts.append(tokenizer.decode(list(segment.token_ids)))
    return texts
