"""Agent loops in verl's two forms, from a user's file: their tokens are checked."""

import functools
import logging
from pathlib import Path

import pytest

from tests.agents.scripted import ScriptedEngine, chat_tokenizer, rollout_config
from tests.agents.user_loop_files import check_row_of, run
from verl.agents import AgentLoopOutput, AgentRunner, blocking
from verl.agents.loops.user_loop import _full_config, is_written_plain
from verl.rollout.trajectory import DROPPED_BECAUSE
from verl.utils.errors import ConfigError, RolloutError
from verl.utils.logging import say_once


def test_verl_05_loop_keeps_its_log_probs(loops: str):
    tokenizer, trajectories, metrics = run(loops, "old", episodes=3)
    for row, trajectory in enumerate(trajectories):
        first, more, second = trajectory.segments
        assert tokenizer.decode(list(first.token_ids)) == f"Reply {row} 0<|im_end|>"
        assert first.log_probs == [-1.0 - place for place in range(len(first.token_ids))]
        assert tokenizer.decode(list(more.token_ids)) == " once more "
        assert not more.is_model
        assert tokenizer.decode(list(second.token_ids)) == f"Reply {row} 1<|im_end|>"
        assert (first.turn, second.turn) == (0, 1)
        assert trajectory.num_turns == 4
    assert metrics["agent_loop/tool_calls/mean"] == 0.5
    assert metrics["agent_loop/tool_calls/count"] == len(trajectories)


def test_a_loop_reads_the_recognized_format(loops: str):
    """verl's default is hermes, and copies of its tool loop make a parser by that name."""
    context = AgentRunner(rollout_config(), chat_tokenizer()).context
    assert _full_config(context).actor_rollout_ref.rollout.multi_turn.format == "hermes"
    context = AgentRunner(rollout_config(multi_turn__format="glm"), chat_tokenizer()).context
    assert _full_config(context).actor_rollout_ref.rollout.multi_turn.format == "glm"


def test_an_output_may_end_within_a_turn(loops: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ScriptedEngine, "names_experts", True)
    _, (trajectory,), _ = run(loops, "old", response_length=7)
    assert len(trajectory.response_ids) == 7
    (segment,) = trajectory.segments
    assert segment.log_probs == [-1.0 - place for place in range(7)]
    assert segment.routed_experts is not None
    assert segment.routed_experts.flatten().tolist() == segment.token_ids


def test_loop_of_later_versions_returns_score_and_fields(loops: str):
    _, (trajectory,), metrics = run(loops, "new")
    assert metrics["agent_loop/generate_sequences/min"] > 0, "it measures nothing itself"
    assert trajectory.reward == 0.0
    assert trajectory.extra == {"turn_scores": [1.0]}


def test_a_field_that_the_trainer_sets_is_ignored_by_name(
    loops: str, caplog: pytest.LogCaptureFixture
):
    fields = {"num_turns": 77, "dropped_because": "mine", "of_mine": 1}
    with caplog.at_level(logging.WARNING, logger="verl"):
        _, (trajectory,), _ = run(loops, "new", fields={"fields": fields})
    assert trajectory.extra == {"turn_scores": [1.0], "of_mine": 1}
    assert "the field 'num_turns' of an agent or tool is ignored" in caplog.text
    assert "the field 'dropped_because' of an agent or tool is ignored" in caplog.text


def test_a_later_loop_gets_ids_of_the_template_and_fields_of_the_row(loops: str):
    extra = {"tools_kwargs": {"a": {"create_kwargs": {"x": 1}}, "b": None}}
    _, (trajectory,), _ = run(loops, "later", fields={"extra_info": extra})
    assert trajectory.extra == {
        "model": "some/model",
        "agent_name": "later",
        "tools_kwargs": {"a": {"create_kwargs": {"x": 1}}},
        "interaction_kwargs": {},
    }


def test_a_loop_of_verl_07_gets_its_arguments_and_helpers(loops: str):
    tokenizer, (trajectory,), _ = run(loops, "seven")
    first, between, second = trajectory.segments
    assert tokenizer.decode(list(first.token_ids)) == "Reply 0 0<|im_end|>"
    assert tokenizer.decode(list(between.token_ids)) == (
        "<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(list(second.token_ids)) == "Reply 0 1<|im_end|>"


def test_a_loop_without_an_output_is_an_error(loops: str):
    with pytest.raises(RolloutError, match="'nothing' must return an AgentLoopOutput .* got None"):
        run(loops, "nothing")


def test_an_empty_response_is_an_error_of_its_loop(loops: str):
    with pytest.raises(RolloutError, match="'empty' returned no response_ids in sample 0"):
        run(loops, "empty")


@pytest.mark.parametrize("name", ["plain", "generator"])
def test_a_loop_that_is_not_async_is_named_before_models_load(loops: str, name: str):
    with pytest.raises(ConfigError, match=rf"'{name}' .* must be async: write `async def run\("):
        check_row_of(loops, name)


def test_a_decorated_run_passes_the_check_of_async():
    def traced(function):
        @functools.wraps(function)
        def run(*args, **kwargs):
            return function(*args, **kwargs)

        return run

    def bare(function):
        return lambda *args, **kwargs: function(*args, **kwargs)

    async def run(self, sampling_params, **kwargs):
        return None

    assert not is_written_plain(traced(run))
    assert not is_written_plain(bare(run))


def test_a_run_that_gives_no_coroutine_is_an_error(loops: str):
    with pytest.raises(RolloutError, match=r"'hidden' must be async: write `async def run\("):
        run(loops, "hidden")


def test_a_key_that_no_method_of_the_loop_names_is_warned_of(
    loops: str, caplog: pytest.LogCaptureFixture
):
    file = Path(loops)
    file.write_text(file.read_text().replace("word: once more", "wrod: once more"))
    with caplog.at_level("WARNING", logger="verl"):
        run(loops, "old")
        run(loops, "seven")
    assert caplog.text.count("which no method of") == 1
    assert "'old' has the key 'wrod', which no method of Old names. Nearest known: word." in (
        caplog.text
    )


def test_sampling_parameters_without_an_effect_are_taken(loops: str):
    _, (trajectory,), _ = run(loops, "free")
    assert trajectory.response_ids


def test_a_class_that_cannot_be_prepared_is_named(loops: str):
    with pytest.raises(ConfigError, match=r"'unprepared' cannot be used: .*'database'"):
        run(loops, "unprepared")


def test_a_loop_may_take_the_configuration_itself(loops: str):
    _, (trajectory,), _ = run(loops, "earlier")
    assert trajectory.response_ids


def test_a_class_with_further_arguments_is_named_before_models_load(loops: str):
    with pytest.raises(ConfigError, match=r"'unmade' cannot be made: .*'database'.* options"):
        check_row_of(loops, "unmade")


def test_an_episode_may_give_several_trajectories(loops: str):
    _, trajectories, _ = run(loops, "new", episodes=2, fields={"outputs": 3})
    found = [(each.row, each.part, each.reward) for each in trajectories]
    assert found == [(row, part, 0.25 * part) for row in range(2) for part in range(3)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("retokenizes", r"marks tokens as the model's that the engine did not draw there"),
        ("warm", r"'temperature'\] is 0.1 in an agent loop, the rollout's is 1.0"),
        ("stops", r"sampling_params\['stop'\]=\['Observation:'\] cannot be set for one turn"),
        (
            "raises",
            r"The agent loop 'raises' failed in sample 0. It raised KeyError "
            r"\(.*loops.py:\d+\): 'nothing here'\. Fix the loop",
        ),
        ("weighted", r"response_mask of the agent loop 'weighted' must have 1 .* got \[2\]"),
        ("exits", r"It raised SystemExit \(.*loops.py:\d+\): 3\. Fix the loop"),
        ("asserts", r"AssertionError \(.*helper.py:3\): assert len\(tokens\) > 0\. Fix the loop"),
    ],
)
def test_loop_that_changes_tokens_is_an_error(loops: str, name: str, message: str):
    with pytest.raises(RolloutError, match=message):
        run(loops, name)


@pytest.mark.parametrize(("name", "warnings"), [("blocks", 1), ("waits", 0)])
def test_a_loop_that_blocks_all_episodes_is_named(
    loops: str,
    name: str,
    warnings: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    say_once.cache_clear()
    monkeypatch.setattr(blocking, "BLOCKING_S", 0.2)
    with caplog.at_level("WARNING", logger="verl"):
        _, trajectories, _ = run(loops, name, episodes=2)
    assert len(trajectories) == 2
    assert caplog.text.count("blocks the event loop of all episodes") == warnings


def test_log_probs_of_another_length_are_a_warning(loops: str, caplog: pytest.LogCaptureFixture):
    say_once.cache_clear()
    with caplog.at_level("WARNING", logger="verl"):
        _, (trajectory,), _ = run(loops, "short")
        run(loops, "new")
    assert trajectory.segments[0].log_probs[0] == -1.0, "those of the engine"
    assert caplog.text.count("response_logprobs of another length") == 1
    assert "'new'" not in caplog.text


def test_tokens_beyond_the_response_are_cut_with_a_warning(
    loops: str, caplog: pytest.LogCaptureFixture
):
    say_once.cache_clear()
    with caplog.at_level("WARNING", logger="verl"):
        _, trajectories, _ = run(loops, "overlong", episodes=2)
    (limit,) = {len(each.response_ids) for each in trajectories}
    message = f"'overlong' returned more response_ids than the {limit} of data.max_response_length"
    assert caplog.text.count(message) == 1


def test_a_misspelled_field_of_an_output_is_named():
    tokens = {"prompt_ids": [1], "response_ids": [2], "response_mask": [1]}
    assert AgentLoopOutput(**tokens, mm_processor_kwargs={}).model_extra  # of later versions
    with pytest.raises(ValueError, match="no field 'reward_scor'. Nearest: reward_score"):
        AgentLoopOutput(**tokens, reward_scor=1.0)


def test_a_score_that_is_no_number_is_an_error(loops: str):
    with pytest.raises(
        RolloutError, match="reward_score of the agent loop 'unscored' must be a fin"
    ):
        run(loops, "unscored")


def test_an_episode_whose_loop_raises_can_be_dropped(loops: str):
    _, (trajectory,), metrics = run(loops, "raises", agent__on_error="drop")
    assert trajectory.is_dropped
    assert "nothing here" in trajectory.extra[DROPPED_BECAUSE]
    assert metrics["agent_loop/dropped"] == 1


def test_a_missing_loop_file_names_its_key(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"agent_loop_config_path: expected a YAML file at"):
        run(str(tmp_path / "nothing.yaml"), "a")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "loops.yaml', line 1, column 5, is not YAML: expected the node content"),
        ("name: a", "must be a list of"),
        ("- name: a", "entry 0: expected the keys name and _target_"),
        ("- {name: a, _target_: verl.rollout.trajectory.Trajectory}", "with run .*or with play"),
        ("- {name: a, _target_: verl.agents.nothing.Here}", "entry 0: _target_: "),
        (
            "[{name: a, _target_: verl.agents.AgentLoopBase},"
            " {name: a, _target_: verl.agents.AgentLoopBase}]",
            "entry 1: the name 'a' is taken by entry 0",
        ),
        (
            "- {name: a, _target_: verl.agents.loops.single_turn.SingleTurnLoop, turns: 3}",
            "entry 0: keys other than name and _target_ .* got turns",
        ),
    ],
)
def test_invalid_loop_files_are_errors(tmp_path: Path, text: str, message: str):
    path = tmp_path / "loops.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        run(str(path), "a")
