"""Small runs of programs, which use `RLTrainer`."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from verl.data.chat import apply_chat_template
from verl.data.toy import TOY_MODEL
from verl.models.load import load_tokenizer
from verl.trainer import RLTrainer

ASKED = ["3 + 11 = ?", "2 + 5 = ?", "6 + 6 = ?"]
CHATS = [[{"role": "user", "content": text}] for text in ASKED]
# The runs of tests.trainer.runs, as keyword arguments.
TOY: dict[str, Any] = {
    "data": {"dataset_name": "toy", "train_batch_size": 4},
    "max_new_tokens": 8,
    "rollout_config": {"n": 4, "backend": "local"},
    "actor_config": {"use_kl_loss": False, "lr": 1e-3},
    "trainer": {"val_before_train": False, "max_steps": 2, "save_freq": 2},
}
PPO: dict[str, Any] = {"algorithm": {"adv_estimator": "gae"}, "critic_config": {"lr": 1e-3}}


def facade(folder: Path, **keywords: Any) -> RLTrainer:
    where = {"trainer.default_local_dir": str(folder), "trainer.logger": ["console", "file"]}
    return RLTrainer({**TOY, **where}, **keywords)


def by_transformers(state: dict[str, torch.Tensor] | None = None) -> list[str]:
    """Generate greedy answers to ASKED with transformers, one at a time."""
    model = AutoModelForCausalLM.from_pretrained(TOY_MODEL)
    tokenizer = load_tokenizer(TOY_MODEL)
    if state is not None:
        model.load_state_dict(state)
    texts = []
    for chat in CHATS:
        ids = torch.tensor([apply_chat_template(tokenizer, chat)])
        said = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False
        )
        texts.append(tokenizer.decode(said[0, ids.shape[1] :], skip_special_tokens=True))
    return texts
