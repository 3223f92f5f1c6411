"""Images of tools become picture tokens in the next prompt, behind the ids that the model drew."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.agents.scripted import PARAMS, ScriptedEngine, rollout_config
from tests.tiny_vision_models import IMAGE
from tests.vision_folders import TEMPLATE, save_vision_folder, some_image
from verl.agents import AgentRunner, EngineClient, EngineSteps, Episode
from verl.config.model import ModelConfig
from verl.data.pictures import PictureReader
from verl.models.load import load_tokenizer
from verl.models.processor import load_picture_processor
from verl.rollout import Request, SamplingParams, Trajectory
from verl.utils.errors import ConfigError, DataError, RolloutError

pytestmark = pytest.mark.usefixtures("one_nursery")

TOOLS = '''
import numpy as np
from PIL import Image

from verl.agents.tools import function_tool
from verl.agents.tools.schemas import ToolResponse


@function_tool(isolation="thread")
def draw(seed: int, height: int = 24) -> ToolResponse:
    """Draw a picture of noise.

    Args:
        seed: of the noise.
        height: of the picture.
    """
    pixels = np.random.default_rng(seed).integers(0, 255, (height, 24, 3), dtype=np.uint8)
    return ToolResponse(text="drawn", image=[Image.fromarray(pixels)])


@function_tool(isolation="thread")
def film(seed: int) -> ToolResponse:
    """Make a film.

    Args:
        seed: of it.
    """
    return ToolResponse(video=["film.mp4"])


@function_tool(isolation="thread")
def lose(seed: int) -> ToolResponse:
    """Name an image that is not there.

    Args:
        seed: of it.
    """
    return ToolResponse(image=["lost.png"])


@function_tool(isolation="thread")
def inject(seed: int) -> str:
    """Return the picture token as text.

    Args:
        seed: of it.
    """
    return "<|image_pad|>"
'''
WITH_TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool.function.name }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}" + TEMPLATE
)


class SeeingEngine(ScriptedEngine):
    """A scripted engine that keeps its requests."""

    def __init__(self, tokenizer: Any, script: Any) -> None:
        super().__init__(tokenizer, script)
        self.requests: list[Request] = []

    def submit(
        self, requests: Sequence[Request], params: SamplingParams, *, seed: int, step: int
    ) -> None:
        self.requests += requests
        super().submit(requests, params, seed=seed, step=step)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> PictureReader:
    folder = save_vision_folder(tmp_path_factory.mktemp("vision"))
    tokenizer = load_tokenizer(folder)
    picture = "<|vision_start|><|image_pad|><|vision_end|>"
    tokenizer.chat_template = WITH_TOOLS.replace("PICTURE", picture)
    processor = load_picture_processor(folder, tokenizer)
    assert processor is not None
    return PictureReader(processor, tokenizer)


@pytest.fixture
def tools(tmp_path: Path) -> str:
    path = tmp_path / "tools.py"
    path.write_text(TOOLS)
    return str(path)


def call(name: str, arguments: str = '{"seed": 1}') -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def look(reader: PictureReader, row: int = 0) -> Episode:
    """Make an episode whose prompt has a picture."""
    prompt = [{"role": "user", "content": "<image>How many?"}]
    ids, messages, pictures = reader.encode(prompt, [some_image()], Path())
    return Episode(row=row, messages=messages, prompt_ids=ids, fields={}, pictures=pictures)


def play(
    reader: PictureReader,
    tools: str,
    script: Any,
    *,
    sees: bool = True,
    **settings: Any,
) -> tuple[Trajectory, SeeingEngine, dict[str, float]]:
    config = rollout_config(
        multi_turn__function_tool_path=tools, multi_turn__format="hermes", **settings
    )
    engine = SeeingEngine(reader.tokenizer, script)
    episode = look(reader)
    if not sees:
        ids = reader.tokenizer.encode("Draw.", add_special_tokens=False)
        messages = [{"role": "user", "content": "Draw."}]
        episode = Episode(row=0, messages=messages, prompt_ids=ids, fields={})
    model = ModelConfig(path="models/texts")
    runner = AgentRunner(config, reader.tokenizer, model=model, pictures=reader if sees else None)
    client = EngineClient(EngineSteps(engine, PARAMS, seed=0, step=1), max_model_len=4000)
    try:
        (trajectory,) = runner.play([episode], client)
        return trajectory, engine, runner.metrics()
    finally:
        runner.close()


def draws_twice(row: int, turn: int, prompt: str) -> str:
    return call("draw", f'{{"seed": {turn}, "height": {24 + 16 * turn}}}') if turn < 2 else "Two."


def test_the_next_prompt_extends_the_drawn_ids_by_the_pictures_of_the_tool(
    reader: PictureReader, tools: str
) -> None:
    trajectory, engine, _ = play(reader, tools, draws_twice)
    assert [len(request.pictures) for request in engine.requests] == [1, 2, 3]
    whole = (*trajectory.prompt_ids, *trajectory.response_ids)
    for request in engine.requests:
        assert whole[: len(request.prompt_ids)] == request.prompt_ids
        features = sum(picture.num_tokens for picture in request.pictures)
        assert request.prompt_ids.count(IMAGE) == features
        # each in one piece, in order
        begin = 0
        for picture in request.pictures:
            start = request.prompt_ids.index(IMAGE, begin) - picture.token_ids.index(IMAGE)
            begin = start + len(picture.token_ids)
            assert request.prompt_ids[start:begin] == picture.token_ids

    assert trajectory.pictures == engine.requests[-1].pictures
    own, small, tall = trajectory.pictures
    assert own.key != small.key
    assert tall.num_tokens > small.num_tokens
    for segment in trajectory.segments:
        assert (IMAGE in segment.token_ids) == (segment.source == "tool")


def test_images_without_room_end_the_episode(reader: PictureReader, tools: str) -> None:
    whole, _, _ = play(reader, tools, draws_twice)
    used = sum(len(segment.token_ids) for segment in whole.segments[:2])
    trajectory, engine, metrics = play(reader, tools, draws_twice, response_length=used)
    assert metrics["agent_loop/ended_by/length"] == 1
    assert len(engine.requests) == 1
    assert len(trajectory.pictures) == 1  # that of the prompt


def test_a_drawn_picture_token_ends_the_episode(reader: PictureReader, tools: str) -> None:
    trajectory, engine, metrics = play(
        reader, tools, lambda row, turn, prompt: "<|image_pad|>" + call("draw")
    )
    assert metrics["agent_loop/ended_by/picture_token"] == 1
    assert len(engine.requests) == 1
    assert IMAGE in trajectory.segments[-1].token_ids
    assert len(trajectory.pictures) == 1


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        ("film", "'film' returned videos"),
        ("lose", r"'lose' returned images .* image 0 .*there is no file .*lost\.png"),
        ("inject", "picture tokens .* for 0 images"),
    ],
)
def test_other_answers_are_errors(
    reader: PictureReader, tools: str, tool: str, message: str
) -> None:
    with pytest.raises((DataError, RolloutError), match=message):
        play(reader, tools, lambda row, turn, prompt: call(tool))


def test_images_for_a_model_of_text_are_an_error(reader: PictureReader, tools: str) -> None:
    message = "'draw' returned images, but the model 'models/texts' reads text alone. Set .*path to"
    with pytest.raises(RolloutError, match=message):
        play(reader, tools, draws_twice, sees=False)


def test_prompts_that_are_rendered_again_are_refused(reader: PictureReader, tools: str) -> None:
    with pytest.raises(ConfigError, match="use_inference_chat_template"):
        play(reader, tools, draws_twice, multi_turn__use_inference_chat_template=True)


def test_a_picture_counts_as_its_placeholder_before_it_is_read(
    reader: PictureReader, tools: str
) -> None:
    prompt = [{"role": "user", "content": "<image>How many?"}]

    def column(name: str) -> Iterator[tuple[str, Any]]:
        yield "rows.parquet, row 0", prompt if name == "prompt" else None

    def too_long(limit: int) -> list[str]:
        config = rollout_config(
            multi_turn__function_tool_path=tools,
            multi_turn__format="hermes",
            prompt_length=limit,
        )
        runner = AgentRunner(config, reader.tokenizer, pictures=reader)
        try:
            return runner.prompts_too_long(column, "prompt")
        finally:
            runner.close()

    turns = "<|im_start|>system\ndraw\nfilm\nlose\ninject\n<|im_end|>\n<|im_start|>user\n"
    picture = "<|vision_start|><|image_pad|><|vision_end|>"
    text = turns + picture + "How many?<|im_end|>\n<|im_start|>assistant\n"
    length = len(reader.tokenizer.encode(text, add_special_tokens=False))
    assert too_long(length) == []
    assert too_long(length - 1) == ["rows.parquet, row 0"]


def test_other_loops_refuse_prompts_with_pictures(reader: PictureReader, tools: str) -> None:
    keys = {
        "agent__default_agent_loop": "environment_agent",
        "agent__environment__name": "number_guessing",
    }
    with pytest.raises(RolloutError, match="'environment_agent' cannot play prompts with pictures"):
        play(reader, tools, draws_twice, **keys)
