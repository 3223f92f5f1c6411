"""GSM8K for several turns with a tool that scores the model's answer, and for a simulated user.

    python examples/data_preprocess/gsm8k_multiturn_w_tool.py --local_save_dir ~/data/gsm8k_multiturn

Rows are those of gsm8k.py with a system prompt that names the tool `calc_gsm8k_reward`, and in
`extra_info`: `tools_kwargs` (arguments of the tool for each row), `interaction_kwargs` (name and
arguments of the interaction that answers) and `need_tools_kwargs`. `agent_name` picks the agent
loop.
"""

import sys
from typing import Any

import gsm8k  # the script of this folder, which makes the plain rows

from verl.utils.entry import exit_code

TOOL = "calc_gsm8k_reward"
INTERACTION = "gsm8k"
AGENT = "tool_agent"
SYSTEM = (
    "You are a math expert. You are given a question and you need to solve it step by step. Reason "
    f"step by step before any tool call. You should use the `{TOOL}` tool after solving the "
    "question, before you give the final answer, at least once, and correct your answer if needed. "
    "Put the final answer behind `#### `."
)


def make_row(raw: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    """Return a row as the trainer reads it. DataError for an answer without its number."""
    row = gsm8k.make_row(raw, split, index)
    truth = row["reward_model"]["ground_truth"]
    row["prompt"] = [{"role": "system", "content": SYSTEM}, *row["prompt"]]
    row["agent_name"] = AGENT
    row["extra_info"] |= {
        "need_tools_kwargs": True,
        "tools_kwargs": {TOOL: {"create_kwargs": {"ground_truth": truth}}},
        "interaction_kwargs": {
            "name": INTERACTION,
            "query": raw["question"],
            "ground_truth": truth,
        },
    }
    return row


def main(arguments: list[str] | None = None) -> None:
    gsm8k.write_splits(make_row, arguments, description=__doc__, folder="~/data/gsm8k_multiturn")


if __name__ == "__main__":
    sys.exit(exit_code(main))
