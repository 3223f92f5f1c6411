"""Tools return images in training: rollout and trainer compute the same log-probs behind them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.agents.test_tool_pictures import TOOLS, WITH_TOOLS
from tests.tiny_vision_models import IMAGE
from tests.vision_folders import save_vision_folder
from verl.agents.formats import ParsedReply, ToolCall
from verl.agents.loops.base import AgentContext
from verl.config import config_from_dict
from verl.data.shapes import rows
from verl.models.load import load_tokenizer
from verl.trainer import PPOTrainer
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
            {"trainer.mode": "fully_async"},
            "row 1: the prompt has pictures, which agents of trainer.mode=fully_async cannot play",
        ),
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
