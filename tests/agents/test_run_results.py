"""The value that `run` of a user's agent loop returns, and the prompts that it draws from."""

import textwrap
from pathlib import Path

import pytest

from tests.agents.scripted import chat_tokenizer, episode, play, rollout_config
from verl.agents import AgentLoopOutput
from verl.agents.loops.run_results import check_annotated_result, outputs_of
from verl.agents.loops.server_manager import TokenOutput
from verl.agents.loops.user_loop import UserLoopMaker
from verl.utils.errors import ConfigError, RolloutError

LOOP = """
from verl.agents import AgentLoopBase


class Draws(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        drawn = await self.server_manager.generate(
            "id", prompt_ids={prompt}, sampling_params=sampling_params
        )
        return {result}
"""


def run(folder: Path, prompt: str, result: str) -> None:
    """Play an episode by a loop that draws from `prompt` and returns `result`."""
    (folder / "loop.py").write_text(textwrap.dedent(LOOP).format(prompt=prompt, result=result))
    (folder / "loops.yaml").write_text("- {name: draws, _target_: loop.py:Draws}")
    config = rollout_config(
        agent__agent_loop_config_path=str(folder / "loops.yaml"),
        agent__default_agent_loop="draws",
    )
    tokenizer = chat_tokenizer()
    play(config, tokenizer, lambda row, turn, prompt: "An answer.", [episode(tokenizer)])


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        ("self.tokenizer.decode(drawn)", r"got the text 'An answer\.<\|im_end\|>'"),
        ("drawn", r"got the answer of server_manager\.generate"),
        ("[drawn, drawn]", r"got the answer of server_manager\.generate"),
        ("None", r"got None \(is a return statement missing\?\)"),
        ("{'response_ids': drawn}", "got dict"),
    ],
)
def test_a_result_without_tokens_is_shown_with_the_way_out(tmp_path: Path, result, shown):
    way_out = r"Return AgentLoopOutput\(prompt_ids=.*never tokenizes a text again"
    with pytest.raises(RolloutError, match=rf"'draws' must return .*{shown}\. {way_out}"):
        run(tmp_path, prompt="[5, 6]", result=result)


def test_outputs_stay_in_order():
    outputs = [
        AgentLoopOutput(prompt_ids=[1], response_ids=[token], response_mask=[1]) for token in (2, 3)
    ]
    assert outputs_of(outputs, "mine") == outputs
    assert outputs_of(outputs[0], "mine") == outputs[:1]
    with pytest.raises(RolloutError, match="'mine' returned no output"):
        outputs_of([], "mine")


@pytest.mark.parametrize("annotation", ["str", "dict[str, int]", "'str'", "tuple[list[int], str]"])
def test_an_annotation_that_promises_no_tokens_is_an_error_before_models_load(annotation):
    scope: dict = {}
    exec(f"async def run(self, sampling_params, **kwargs) -> {annotation}: ...", scope)
    loop_class = type("Annotated", (), {"run": scope["run"]})

    with pytest.raises(ConfigError, match=r"'mine' is annotated with -> (str|dict|tuple)"):
        UserLoopMaker("mine", loop_class, {}).check()


@pytest.mark.parametrize("annotation", [AgentLoopOutput, list[AgentLoopOutput], "Any", None])
def test_other_annotations_pass(annotation):
    async def run(self, sampling_params, **kwargs):
        return TokenOutput(token_ids=[])

    run.__annotations__["return"] = annotation
    check_annotated_result(run, "mine")
    del run.__annotations__["return"]
    check_annotated_result(run, "mine")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("'What is 2 + 3?'", r"a list of token ids, got str 'What is 2 \+ 3\?'\. Encode a text by"),
        ("self.tokenizer('Hello')", "a list of token ids, got BatchEncoding .*input_ids"),
        ("[[5, 6]]", r"a list of token ids, got list '\[\[5, 6\]\]'.* of a batch \[0\]"),
        ("None", "a list of token ids, got NoneType"),
        ("[]", "prompt_ids of server_manager.generate is empty"),
    ],
)
def test_a_prompt_that_is_no_list_of_token_ids_is_an_error(tmp_path: Path, prompt, message):
    with pytest.raises(RolloutError, match=message):
        run(tmp_path, prompt=prompt, result="None")
