"""Training on episodes of agents: the same numbers as without agents for a single turn, exact
tokens in every turn, and the same weights on several ranks."""

import json
import re
import textwrap
from pathlib import Path

import pytest

from tests.agents.scripted import chat_tokenizer
from tests.launches import launch
from tests.trainer.runs import (
    TOY,
    command_line,
    run,
    same_bits,
    start_trainer,
    step_lines,
    weights,
    without_times,
)
from verl.config import load_config
from verl.trainer.api import RLTrainer
from verl.trainer.main_ppo import main
from verl.trainer.setup import build_loaders
from verl.utils.errors import ConfigError, DataError

ROLLOUT = "actor_rollout_ref.rollout"
GUESSING = [
    f"{ROLLOUT}.agent.environment.name=number_guessing",
    f"{ROLLOUT}.multi_turn.max_tokens_per_turn=4",
    f"{ROLLOUT}.multi_turn.max_assistant_turns=3",
    "data.max_response_length=200",
    "data.max_prompt_length=256",
    "trainer.save_freq=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
]


OF_AGENTS = ("agent_loop/", "num_turns/", "val-aux/num_turns/", "training/turn_", "rollout/")


def of_training(folder: Path) -> list[dict]:
    """Return metrics of the steps, without timings and metrics that only agents have."""
    lines = []
    for line in without_times(step_lines(folder)):
        own = {}
        for name, value in line.items():
            if not name.startswith(OF_AGENTS):
                own[name] = value
        lines.append(own)
    return lines


def test_agents_of_one_turn_train_like_the_plain_rollout(tmp_path: Path):
    common = ["trainer.save_freq=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2"]
    assert run(tmp_path / "plain", *common) == 0
    assert run(tmp_path / "agents", *common, f"{ROLLOUT}.mode=async") == 0
    assert of_training(tmp_path / "agents") == of_training(tmp_path / "plain")
    assert same_bits(weights(tmp_path / "agents", 2), weights(tmp_path / "plain", 2))
    assert step_lines(tmp_path / "agents")[0]["num_turns/mean"] == 2


def test_an_environment_of_several_turns_trains_on_exact_tokens(tmp_path: Path):
    assert run(tmp_path, *GUESSING) == 0
    for line in step_lines(tmp_path):
        assert line["num_turns/max"] == 6
        assert line["agent_loop/ended_by/turns"] + line.get("agent_loop/ended_by/length", 0) > 0
        for turn in range(3):
            assert abs(line[f"training/turn_{turn}/rollout_diff_max"]) < 1e-4
        assert line["environment/turns/mean"] == pytest.approx(line["num_turns/mean"] / 2)
    assert "val/test_score/number_guessing" not in step_lines(tmp_path)[0]
    assert step_lines(tmp_path)[-1]["val-aux/num_turns/max"] == 6
    assert step_lines(tmp_path)[-1]["val-aux/environment/solved/mean"] == 0


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path):
    """Compare bits: episodes return in any order, and the engine is deterministic."""
    own = [*GUESSING, f"{ROLLOUT}.deterministic=True", "trainer.test_freq=-1"]
    assert run(tmp_path / "whole", *own, "trainer.max_steps=4") == 0
    assert run(tmp_path / "parts", *own, "trainer.max_steps=2") == 0
    assert run(tmp_path / "parts", *own, "trainer.max_steps=4") == 0
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert of_training(parts) == of_training(whole)
    assert same_bits(weights(parts, 4), weights(whole, 4))


@pytest.mark.slow
def test_two_ranks_train_on_episodes_like_one_process(tmp_path: Path):
    # Validate on one prompt, so that one of the ranks has none.
    own = [*GUESSING, "data.val_max_samples=1"]
    assert run(tmp_path / "one", *own) == 0
    done = launch(2, main, command_line(tmp_path / "two", *own))
    assert done.returncode == 0, done.stderr
    one, two = step_lines(tmp_path / "one"), step_lines(tmp_path / "two")
    for name in ("num_turns/mean", "critic/score/mean", "response_length/mean"):
        assert [line[name] for line in two] == pytest.approx([line[name] for line in one])
    validated = [name for name in one[-1] if name.startswith("val-core/")]
    assert validated
    for name in validated:
        assert two[-1][name] == pytest.approx(one[-1][name])
    left, right = weights(tmp_path / "one", 2), weights(tmp_path / "two", 2)
    for name, weight in left.items():
        assert (weight - right[name]).abs().max() < 1e-5, name


@pytest.mark.parametrize("loop", ["whole", "parts"])
def test_a_loop_from_a_users_file_trains(tmp_path: Path, loop: str):
    """Train with a loop that returns scores and several outputs, and with one without scores.

    The latter reads the configuration of the run.
    """
    (tmp_path / "loops.py").write_text(
        textwrap.dedent(
            """
            from verl.agents import AgentLoopBase, AgentLoopOutput

            class Whole(AgentLoopBase):
                @classmethod
                def init_class(cls, config, tokenizer, **kwargs):
                    assert config.trainer.max_steps == 2

                async def run(self, messages, sampling_params):
                    assert self.config.algorithm.adv_estimator == "grpo"
                    assert self.config.actor_rollout_ref.actor.optim.lr == 1e-3
                    assert self.config.actor_rollout_ref.rollout.response_length == 8
                    text = self.tokenizer.apply_chat_template(
                        messages, add_generation_prompt=True, tokenize=False
                    )
                    ids = self.tokenizer.encode(text, add_special_tokens=False)
                    first = await self.server_manager.generate(
                        "a", prompt_ids=ids, sampling_params={**sampling_params, "max_tokens": 3}
                    )
                    second = await self.server_manager.generate(
                        "a", prompt_ids=ids + first, sampling_params=sampling_params
                    )
                    response = (first + second)[:8]
                    return AgentLoopOutput(
                        prompt_ids=ids,
                        response_ids=response,
                        response_mask=[1] * len(response),
                        num_turns=2,
                        reward_score=self.score(response),
                    )

                def score(self, response):
                    return None

            class Parts(Whole):
                def score(self, response):
                    return len(set(response)) / 8

                async def run(self, messages, sampling_params):
                    one = await super().run(messages, sampling_params)
                    first = one.model_copy(update={"reward_score": None})
                    return [first, one] if len(one.response_ids) % 2 else one
            """
        )
    )
    (tmp_path / "loops.yaml").write_text(
        f"- {{name: whole, _target_: {tmp_path}/loops.py:Whole}}\n"
        f"- {{name: parts, _target_: {tmp_path}/loops.py:Parts}}\n"
    )
    own = [
        f"{ROLLOUT}.agent.agent_loop_config_path={tmp_path}/loops.yaml",
        f"{ROLLOUT}.agent.default_agent_loop={loop}",
        f"{ROLLOUT}.agent.gives_reward={loop == 'parts'}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    ]
    assert run(tmp_path / "run", *own) == 0
    for line in step_lines(tmp_path / "run"):
        assert line["critic/score/max"] > 0
        assert line["actor/grad_norm"] > 0


def test_a_missing_score_is_an_error_where_loops_give_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    own = [f"{ROLLOUT}.agent.gives_reward=True", f"{ROLLOUT}.mode=async"]
    assert run(tmp_path / "run", *own) == 1
    assert "gives_reward=True, but no episode has a score" in capsys.readouterr().err


@pytest.mark.slow
def test_ranks_that_share_an_engine_play_the_same_episodes(tmp_path: Path):
    shared = [*GUESSING, f"{ROLLOUT}.tensor_model_parallel_size=2"]
    assert run(tmp_path / "one", *GUESSING) == 0
    done = launch(2, main, command_line(tmp_path / "two", *shared, base=TOY))
    assert done.returncode == 0, done.stderr
    one, two = step_lines(tmp_path / "one"), step_lines(tmp_path / "two")
    assert two[0]["num_turns/mean"] == one[0]["num_turns/mean"]
    assert two[0]["critic/score/mean"] == pytest.approx(one[0]["critic/score/mean"])


LOOPS = """
from verl.agents import AgentLoopBase, AgentLoopOutput


class Halves(AgentLoopBase):
    async def run(self, messages, sampling_params):
        text = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        outputs = []
        for score in (9.0, None):
            drawn = await self.server_manager.generate(
                "a", prompt_ids=ids, sampling_params=sampling_params
            )
            outputs.append(
                AgentLoopOutput(
                    prompt_ids=ids,
                    response_ids=drawn,
                    response_mask=[1] * len(drawn),
                    reward_score=score or len(set(drawn)) / 8,
                )
            )
        return outputs


class Fails(AgentLoopBase):
    async def run(self, messages, sampling_params):
        raise KeyError("the sandbox is gone")
"""


def loop_of(tmp_path: Path, name: str) -> list[str]:
    (tmp_path / "loops.py").write_text(LOOPS)
    (tmp_path / "loops.yaml").write_text(f"- {{name: own, _target_: {tmp_path}/loops.py:{name}}}")
    return [
        f"{ROLLOUT}.agent.agent_loop_config_path={tmp_path}/loops.yaml",
        f"{ROLLOUT}.agent.default_agent_loop=own",
        f"{ROLLOUT}.agent.gives_reward=True",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    ]


def test_remax_compares_with_the_end_of_the_greedy_episode(tmp_path: Path):
    own = [*loop_of(tmp_path, "Halves"), "algorithm.adv_estimator=remax"]
    trainer = start_trainer(tmp_path / "run", *own)
    trainer.load_checkpoint()
    given = next(iter(trainer.train_loader))
    ends = trainer.generate_greedy(given).batch["rm_scores"].sum(-1)
    batch = trainer.estimate_advantages(trainer.collect(given))
    trainer.tracker.finish()
    assert len(ends) == 4
    assert ends.max() <= 1
    assert batch.batch["reward_baselines"].tolist() == ends.repeat_interleave(8).tolist()
    assert batch.batch["response_mask"].any(-1).all()


def test_episodes_that_all_fail_end_the_run_with_their_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture
):
    own = [*loop_of(tmp_path, "Fails"), f"{ROLLOUT}.agent.on_error=drop"]
    assert run(tmp_path / "run", *own) != 0
    said = capsys.readouterr().err
    assert "All 16 episodes of this step were dropped" in said
    assert re.search(r"KeyError \(.*loops\.py:\d+\): 'the sandbox is gone'", said)


def test_a_rollout_of_the_api_gives_one_text_for_each_episode(tmp_path: Path):
    own = [*loop_of(tmp_path, "Halves"), "trainer.logger=[]"]
    trainer = RLTrainer(load_config(command_line(tmp_path / "run", *own)))
    batch = trainer.rollout(["a b", "c d"], n=2, as_batch=True)
    assert len(batch) == 8
    texts = trainer.rollout(["a b", "c d"], n=2)
    assert [len(each) for each in texts] == [2, 2]
    ends = batch.batch["responses"][batch.non_tensor_batch["episode_part"] == 1]
    said = trainer.tokenizer.batch_decode(ends, skip_special_tokens=True)
    assert [text for each in texts for text in each] == said


@pytest.mark.parametrize("drops", [False, True])
def test_prompts_are_filtered_with_their_tools(tmp_path: Path, drops: bool):
    tools = tmp_path / "tools.py"
    tools.write_text(
        'async def add(a: int) -> int:\n    """Add one.\n\n    Args:\n        a: it."""\n'
    )
    rows = []
    for words in (3, 500):
        row = {"prompt": "one " * words, "data_source": "toy", "reward_model": {"ground_truth": ""}}
        rows.append(json.dumps(row))
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))

    tokenizer = chat_tokenizer()
    limit = len(tokenizer.encode("one " * 500)) + 99  # enough without the schema of the tool
    config = load_config(
        [
            f"data.train_files={tmp_path}/rows.jsonl",
            f"data.val_files={tmp_path}/rows.jsonl",
            "data.train_batch_size=1",
            "actor_rollout_ref.actor.ppo_mini_batch_size=1",
            "actor_rollout_ref.model.path=toy",
            f"data.max_prompt_length={limit}",
            f"data.filter_overlong_prompts={drops}",
            f"{ROLLOUT}.multi_turn.enable=True",
            f"{ROLLOUT}.multi_turn.function_tool_path={tools}",
        ]
    )
    if not drops:
        with pytest.raises(DataError, match=r"row 1: .* with the tools .*filter_overlong_prompts"):
            build_loaders(config, tokenizer)
        return
    for loader in build_loaders(config, tokenizer):
        assert loader is not None
        assert [item["index"] for item in loader.dataset] == [0]


def test_a_mere_validation_checks_each_row_once(tmp_path: Path, monkeypatch):
    row = {"prompt": "one", "data_source": "toy", "reward_model": {"ground_truth": ""}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    checked = []

    def check_rows(self, column, prompt_key):
        checked.extend(column("extra_info"))

    monkeypatch.setattr("verl.agents.AgentRunner.check_rows", check_rows)
    config = load_config(
        [
            "trainer.val_only=True",
            f"data.val_files={tmp_path}/rows.jsonl",
            "actor_rollout_ref.model.path=toy",
            f"{ROLLOUT}.mode=async",
        ]
    )
    build_loaders(config, chat_tokenizer())
    assert len(checked) == 1


@pytest.mark.parametrize("follows_template", [False, True])
def test_uneven_mini_batches_are_refused_where_each_episode_is_one_row(
    tmp_path: Path, monkeypatch, follows_template: bool
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    row = {"prompt": "one", "data_source": "toy", "reward_model": {"ground_truth": ""}}
    text = json.dumps({**row, "agent_name": "tool_agent"}) + "\n"
    (tmp_path / "rows.jsonl").write_text(text * 6)
    config = load_config(
        [
            f"data.train_files={tmp_path}/rows.jsonl",
            "data.train_batch_size=6",
            "actor_rollout_ref.model.path=toy",
            "actor_rollout_ref.actor.ppo_mini_batch_size=3",
            f"{ROLLOUT}.n=3",
            f"{ROLLOUT}.mode=async",
            f"{ROLLOUT}.multi_turn.use_inference_chat_template={follows_template}",
        ]
    )
    if follows_template:  # an episode may have several rows
        build_loaders(config, chat_tokenizer())
        return
    with pytest.raises(ConfigError, match=r"by the 2 ranks .* got 3 . 3 = 9. Set .*_size=2, or"):
        build_loaders(config, chat_tokenizer())
