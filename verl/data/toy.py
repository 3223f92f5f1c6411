"""The packaged toy: ten sums with one right answer each, and a tiny model that gives it a third of
the time.

`examples/toy/make_toy_model.py` made both.
"""

from pathlib import Path

TOY = "toy"  # what `data.dataset_name` and a model path say for the packaged ones
TOY_MODEL = Path(__file__).parent / "toy_model"
_TOY_PROMPTS = Path(__file__).parent / "toy_prompts.jsonl"


def toy_files() -> list[str]:
    """Files of the toy set, as `RLDataset` takes them."""
    return [str(_TOY_PROMPTS)]
