"""The packaged tasks: prompts that `data.dataset_name` knows by name, each with a tiny model.

`toy`: ten sums with one right answer each, and a model that gives it a third of the time.
`calculator`: products of two three-digit numbers, which need the packaged tool; with five demos
for a supervised start. `shapes`: pictures with a question, see `verl.data.shapes`. `examples/toy`
has the scripts that made them.
"""

from pathlib import Path

from verl.data.shapes import SHAPES, shapes_file

_FOLDER = Path(__file__).parent

TOY = "toy"  # what `data.dataset_name` and a model path say for the packaged ones
TOY_MODEL = _FOLDER / "toy_model"
CALCULATOR = "calculator"
CALCULATOR_MODEL = _FOLDER / "calculator" / "model"

_FILES = {
    (TOY, "train"): _FOLDER / "toy_prompts.jsonl",
    (TOY, "val"): _FOLDER / "toy_prompts.jsonl",
    (CALCULATOR, "train"): _FOLDER / "calculator" / "train.jsonl",
    (CALCULATOR, "val"): _FOLDER / "calculator" / "test.jsonl",
}
PACKAGED = (*dict.fromkeys(name for name, _ in _FILES), SHAPES)


def packaged_files(name: str, split: str) -> list[str]:
    """Return the files of a packaged set, as `RLDataset` takes them.

    Args:
        name: "toy", "calculator" or "shapes".
        split: "train" or "val". The toy set validates on itself.
    """
    if name == SHAPES:
        return [shapes_file(split)]
    return [str(_FILES[name, split])]


def toy_files() -> list[str]:
    """Return the files of the toy set."""
    return packaged_files(TOY, "train")


def calculator_demos() -> str:
    """Return the file of five demos of the calculator task, for `data.train_files` of `main_sft`
    with `data.multiturn.enable=True`."""
    return str(_FOLDER / "calculator" / "demos.jsonl")
