"""The packaged toy: ten sums, and a tiny model that is right a third of the time.

`examples/toy/make_toy_model.py` made both.
"""

from pathlib import Path

TOY = "toy"  # the value of `data.dataset_name` and of a model path that selects the toy
TOY_MODEL = Path(__file__).parent / "toy_model"
_TOY_PROMPTS = Path(__file__).parent / "toy_prompts.jsonl"


def toy_files() -> list[str]:
    """Return the files of the toy set, as `RLDataset` takes them."""
    return [str(_TOY_PROMPTS)]
