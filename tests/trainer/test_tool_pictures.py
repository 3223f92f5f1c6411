"""Tools return images in training: rollout and trainer compute the same log-probs behind them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.agents.test_tool_pictures import TOOLS, WITH_TOOLS
from tests.tiny_vision_models import IMAGE
from tests.trainer.runs import run_until_killed, same_bits, step_lines, weights
from tests.vision_folders import save_vision_folder
from verl.agents.formats import ParsedReply, ToolCall
from verl.agents.loops.base import AgentContext
from verl.config import config_from_dict
from verl.data.shapes import rows
from verl.models.load import load_tokenizer
from verl.trainer import PPOTrainer
from verl.trainer.main_ppo import main
from verl.trainer.variants import trainer_class
from verl.utils.errors import DataError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = save_vision_folder(tmp_path / "model")
    tokenizer = load_tokenizer(folder)
    picture = "<|vision_start|><|image_pad|><|vision_end|>"
    tokenizer.chat_template = WITH_TOOLS.replace("PICTURE", picture)
    tokenizer.save_pretrained(folder)
    return folder


def config(folder: Path, model: Path) -> dict[str, Any]:
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows("val")[:4]))
    tools = folder / "tools.py"
    tools.write_text(TOOLS)
    rollout = "actor_rollout_ref.rollout"
    return {
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.model.path": str(model),
        "data.train_files": str(data),
        "data.train_batch_size": 4,
        "data.max_prompt_length": 200,
        "data.max_response_length": 200,
        f"{rollout}.n": 2,
        f"{rollout}.stop_token_ids": list(range(10, 100)),  # a random model has to stop somewhere
        f"{rollout}.multi_turn.enable": True,
        f"{rollout}.multi_turn.function_tool_path": str(tools),
        f"{rollout}.multi_turn.format": "hermes",
        f"{rollout}.multi_turn.max_assistant_turns": 3,
        "trainer.total_training_steps": 1,
        "trainer.default_local_dir": str(folder / "run"),
    }


# Answers of a random model differ in it.
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(map(ord, solution_str)) % 7 / 7
"""


async def calls_always(self: AgentContext, token_ids: Any, tools: Any) -> ParsedReply:
    """Take each turn for a call, since a random model makes none."""
    return ParsedReply(
        content="", calls=(ToolCall(name="draw", arguments={"seed": len(token_ids)}),)
    )


def test_rollout_and_trainer_agree_behind_pictures_of_tools(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AgentContext, "parse", calls_always)
    trainer = PPOTrainer(config(tmp_path, model))
    trainer.init_workers()
    worker: Any = trainer.actor_wg.worker
    generated = trainer.generate(next(iter(trainer.train_loader)))

    pictures = generated.non_tensor_batch["prepared_pictures"]
    assert max(len(own) for own in pictures) == 3  # that of the prompt, and of two calls
    responses = generated.batch["responses"]
    mask = generated.batch["response_mask"].bool()
    assert (responses[~mask] == IMAGE).any()

    old = worker.compute_log_prob(generated).batch["old_log_probs"]
    expected = generated.batch["rollout_log_probs"]
    assert (old - expected)[mask].abs().max() < 1e-4
    assert old[mask].std() > 0.1

    # Other pictures of as many tokens in the place of the tools' own
    swapped = generated.select()
    others = np.empty(len(pictures), dtype=object)
    for row, own in enumerate(pictures):
        others[row] = own[:1] * len(own)
    swapped.non_tensor_batch["prepared_pictures"] = others
    other = worker.compute_log_prob(swapped).batch["old_log_probs"]
    assert (old - other)[mask].abs().max() > 1e-2

    trainer.fit()
    parameters = worker.engine.hf_model.parameters()
    assert all(bool(each.isfinite().all()) for each in parameters)


def async_command(folder: Path, model: Path, *more: str) -> list[str]:
    """Return the arguments of three steps in which most episodes have images of tools."""
    folder.mkdir()
    reward = folder / "reward.py"
    reward.write_text(REWARD)
    values = config(folder, model) | {
        "custom_reward_function.path": str(reward),
        "trainer.total_training_steps": 3,
        "trainer.save_freq": 1,
    }
    keys = [f"{key}={value}" for key, value in values.items()]
    return [*keys, 'trainer.logger=["console","file"]', "trainer.val_before_train=False", *more]


@pytest.mark.slow
def test_asynchronous_episodes_with_pictures_have_the_bits_of_the_synchronous_run(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AgentContext, "parse", calls_always)
    schedules = {
        "sync": (),
        "async": ("trainer.mode=fully_async", "async_training.staleness_threshold=0"),
    }
    for name, keys in schedules.items():
        assert main(async_command(tmp_path / name, model, *keys)) == 0
    runs = [tmp_path / name / "run" for name in schedules]
    # The times of tools decide which turns share a batch, and so the last bits of a rollout.
    names = ("actor/grad_norm", "actor/pg_loss", "critic/score/mean", "response_length/mean")
    sync, ours = ([[line[name] for name in names] for line in step_lines(run)] for run in runs)
    assert len(sync) == 3
    assert max(norm for norm, *_ in sync) > 0, "something is learned"
    assert ours == sync
    assert same_bits(weights(runs[1], 3), weights(runs[0], 3))


@pytest.mark.slow
def test_episodes_that_were_played_ahead_keep_their_pictures_in_a_checkpoint(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that stay as they are: the trainer's log-probs are those of the rollout."""
    monkeypatch.setattr(AgentContext, "parse", calls_always)
    command = async_command(
        tmp_path / "killed",
        model,
        "trainer.mode=fully_async",
        "async_training.staleness_threshold=1",
        "actor_rollout_ref.actor.optim.lr=0",
        "algorithm.rollout_correction.rollout_is=token",
    )
    run_until_killed(2, lambda: main(command))
    assert main(command) == 0
    lines = step_lines(tmp_path / "killed" / "run")
    assert [line["training/global_step"] for line in lines] == [1, 2, 3]
    assert max(line["training/rollout_probs_diff_max"] for line in lines) < 1e-4


def test_rewards_see_the_images_of_tools(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AgentContext, "parse", calls_always)
    trainer = PPOTrainer(config(tmp_path, model) | {"reward_model.images": True})
    trainer.init_workers()
    generated = trainer.generate(next(iter(trainer.train_loader)))
    rows = trainer.reward_fn.columns_of(generated)
    seen = [len(row["extra_info"]["images"]) for row in rows]
    assert seen == [len(own) for own in generated.non_tensor_batch["prepared_pictures"]]
    assert max(seen) == 3


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {
                "actor_rollout_ref.rollout.multi_turn.function_tool_path": None,
                "actor_rollout_ref.rollout.agent.default_agent_loop": "environment_agent",
                "actor_rollout_ref.rollout.agent.environment.name": "number_guessing",
            },
            "row 1: the prompt has pictures, which the agent loop 'environment_agent' cannot play",
        ),
    ],
)
def test_agents_that_cannot_play_a_picture_are_named_before_the_start(
    tmp_path: Path, model: Path, keys: dict[str, Any], message: str
) -> None:
    settings = {**config(tmp_path, model), **keys}
    first, second, *_ = rows("val")
    first = {**first, "images": [], "prompt": [{"role": "user", "content": "How many?"}]}
    text = "".join(json.dumps(row) + "\n" for row in (first, second, first, first))
    Path(settings["data.train_files"]).write_text(text)
    with pytest.raises(DataError, match=f"rows.jsonl, {message}"):
        trainer_class(config_from_dict(settings))(settings)
