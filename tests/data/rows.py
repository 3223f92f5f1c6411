"""Small rows in the format of every data set."""

from typing import Any


def make_row(number: int, text: str | None = None) -> dict[str, Any]:
    return {
        "data_source": "toy",
        "prompt": [{"role": "user", "content": f"{number} + 1 = ?" if text is None else text}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
        "extra_info": {"split": "train", "index": number, "tags": ["a", "b"]},
    }


def make_rows(count: int) -> list[dict[str, Any]]:
    return [make_row(number) for number in range(count)]
