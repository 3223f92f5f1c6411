"""What TRL makes of the case in `test_goldens`, as the rows of its table. Needs `pip install trl`,
which tests do not.

    python -m tests.algorithms.goldens_of_trl

Its `delta` is the c of the dual clip, its `epsilon_high` for CISPO the bound itself.
"""

import os
import tempfile

os.environ.update(HF_HUB_OFFLINE="1", WANDB_MODE="disabled")

import numpy as np
import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from tests.algorithms import test_goldens as case

OPTIONS = {
    "grpo": {"loss_type": "grpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "cispo": {"loss_type": "cispo"},
    "dual_clip": {"loss_type": "grpo", "delta": 1.3},
}


def golden(name: str, coef: float, folder: str) -> tuple[float, float]:
    recipe = case.RECIPES[name]
    ids = case.tokens()
    case.model().save_pretrained(folder)
    words = {f"t{number}": number for number in range(case.VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="t0")), pad_token="t0", eos_token="t2"
    )
    config = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=6,
        num_generations=3,
        num_iterations=2,
        report_to=[],
        max_completion_length=case.WIDTH,
        beta=coef,
        epsilon=recipe.low,
        use_bias_correction_kl=False,
        temperature=1.0,
        epsilon_high=1 + recipe.high if name == "cispo" else recipe.high,
        bf16=False,
        use_cpu=True,
        model_init_kwargs={"attn_implementation": "eager", "dtype": "float32"},
        **OPTIONS[name],
    )

    trainer = GRPOTrainer(
        model=folder,
        args=config,
        reward_funcs=lambda **_: [0.0],
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": ["t3"] * 12}),
    )
    trainer.current_gradient_accumulation_steps = 1

    old, reference = case.old_and_reference(recipe)
    advantages = torch.from_numpy(case.advantages_by_hand(recipe, np.array(case.SCORES))).float()
    inputs = {
        "prompt_ids": ids[:, : case.PROMPT],
        "prompt_mask": torch.ones(len(ids), case.PROMPT, dtype=torch.long),
        "completion_ids": ids[:, case.PROMPT :],
        "completion_mask": case.MASK,
        "advantages": advantages,
        "old_per_token_logps": old,
        "ref_per_token_logps": reference,
        "num_items_in_batch": case.MASK.sum(),
    }

    trainer.model.train()  # TRL normalises as in training only there; the model has no dropout
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.item(), case.norm(trainer.model)


if __name__ == "__main__":
    print(f"# TRL {trl.__version__}")
    for name in case.RECIPES:
        with tempfile.TemporaryDirectory() as folder:
            numbers = [golden(name, coef, folder) for coef in (0.0, case.KL_COEF)]
        print(
            f'    "{name}": ({", ".join(f"({loss:.7f}, {norm:.7f})" for loss, norm in numbers)}),'
        )
