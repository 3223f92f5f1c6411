"""GSM8K for several turns with a simulated user, who says whether an answer is right.

    python examples/data_preprocess/gsm8k_multiturn_w_interaction.py --local_save_dir ~/data/gsm8k_interaction

Rows are those of gsm8k.py with a system prompt, and in `extra_info` the `interaction_kwargs`: the
name of the interaction that answers, and the right answer that it starts with.
"""

import sys
from typing import Any

import gsm8k  # the script of this folder, which makes the plain rows

from verl.utils.entry import exit_code

INTERACTION = "gsm8k"
AGENT = "tool_agent"
SYSTEM = (
    "You are a math expert. You are given a question and you need to solve it step by step. If the "
    "user says that your answer is wrong, find the mistake and answer again. Put each answer "
    "behind `#### `."
)


def make_row(raw: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    """Return a row as the trainer reads it. DataError for an answer without its number."""
    row = gsm8k.make_row(raw, split, index)
    row["prompt"] = [{"role": "system", "content": SYSTEM}, *row["prompt"]]
    row["agent_name"] = AGENT
    row["extra_info"]["interaction_kwargs"] = {
        "name": INTERACTION,
        "query": raw["question"],
        "ground_truth": row["reward_model"]["ground_truth"],
    }
    return row


def main(arguments: list[str] | None = None) -> None:
    gsm8k.write_splits(make_row, arguments, description=__doc__, folder="~/data/gsm8k_interaction")


if __name__ == "__main__":
    sys.exit(exit_code(main))
