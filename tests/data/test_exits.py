"""`sys.exit()` in a sampler or a data set of the user is an error with its name, file and line."""

import re
import sys
from typing import Any

import pytest

from tests.data.rows import make_rows
from verl.config import DataConfig, TrainConfig
from verl.data import RLDataLoader, RLDataset, build_dataset, build_sampler
from verl.trainer.given_parts import check_dataset
from verl.utils.errors import DataError


class Rows:
    """Four rows; the method that `leaves` names calls `sys.exit()`."""

    leaves = ""

    def __len__(self) -> int:
        self._leave("__len__")
        return 4

    def __getitem__(self, item: int) -> dict[str, Any]:
        self._leave("__getitem__")
        return {"raw_prompt_ids": [item + 1], "index": item}

    @property
    def fingerprint(self) -> str:
        self._leave("fingerprint")
        return "rows"

    def _leave(self, method: str) -> None:
        if method == self.leaves:
            sys.exit(0)


class Together(Rows):
    """Gives the rows of a batch together."""

    def __getitems__(self, items: list[int]) -> list[dict[str, Any]]:
        self._leave("__getitems__")
        return [self[item] for item in items]


class Order(Rows):
    """A sampler with all methods."""

    def __iter__(self) -> Any:
        self._leave("__iter__")
        yield from range(4)

    def set_epoch(self, epoch: int) -> None:
        self._leave("set_epoch")

    def update(self, batch: Any) -> None:
        self._leave("update")

    def state_dict(self) -> dict[str, Any]:
        self._leave("state_dict")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._leave("load_state_dict")


def use(loader: RLDataLoader, leaving: Rows, method: str) -> None:
    """Call every method, of which the last steps are those of a resumed run."""
    leaving.leaves = method
    for batch in loader:
        loader.update_sampler(batch)
    loader.load_state_dict(loader.state_dict())
    assert len(loader) == 2


def exits(call: str) -> str:
    line = Rows._leave.__code__.co_firstlineno + 2
    fact = f"({__file__}) called sys.exit(0) in line {line}. Raise an error instead."
    return re.escape(f"{call} {fact}")


@pytest.mark.parametrize(
    "method", ["__len__", "__iter__", "set_epoch", "update", "state_dict", "load_state_dict"]
)
def test_an_exit_of_a_sampler_is_its_error(method):
    sampler = Order()
    loader = RLDataLoader(Rows(), 2, shuffle=False, seed=1, sampler=sampler)
    with pytest.raises(DataError, match=exits(f"The method {method} of the sampler 'Order'")):
        use(loader, sampler, method)


@pytest.mark.parametrize(
    ("kind", "method", "call"),
    [
        (Rows, "__getitem__", "call for row 0"),
        (Together, "__getitem__", "call for row 0"),
        (Together, "__getitems__", "call for 2 rows"),
        (Rows, "fingerprint", "method fingerprint"),
    ],
)
def test_an_exit_of_a_data_set_is_its_error(kind, method, call):
    rows = kind()
    loader = RLDataLoader(rows, 2, shuffle=False, seed=1)
    with pytest.raises(DataError, match=exits(f"The {call} of the data set '{kind.__name__}'")):
        use(loader, rows, method)


def test_an_exit_of_the_length_of_a_given_data_set_is_its_error():
    rows = Rows()
    rows.leaves = "__len__"
    with pytest.raises(DataError, match=exits("The method __len__ of the data set 'Rows'")):
        check_dataset(rows, "train_dataset")


class Leaving(RLDataset):
    """Ends the program at its second row."""

    def __getitem__(self, item: int) -> dict[str, Any]:
        if item == 1:
            sys.exit()
        return super().__getitem__(item)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_exit_of_a_subclass_is_its_error_in_processes_too(parquet, tokenizer, num_workers):
    rows = Leaving(parquet(make_rows(4)), tokenizer, DataConfig(max_prompt_length=64))
    loader = RLDataLoader(rows, 2, shuffle=False, seed=1, num_workers=num_workers)
    with pytest.raises(DataError, match="row 1 of the data set 'Leaving' .* called sys.exit"):
        next(iter(loader))


def test_an_exit_of_a_constructor_is_its_error(parquet, tokenizer, tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "import sys\n\n\nclass Own:\n    def __init__(self, **given):\n        sys.exit(0)\n"
    )
    fact = re.escape(f"'Own' ({file}) called sys.exit(0) in line 6. Raise an error instead.")

    config = TrainConfig()
    config.data.train_files = [parquet(make_rows(2))]
    config.data.custom_cls.path = str(file)
    config.data.custom_cls.name = "Own"
    with pytest.raises(DataError, match=f"^The data set {fact}"):
        build_dataset(config, tokenizer, split="train")

    config.data.sampler.class_path = str(file)
    config.data.sampler.class_name = "Own"
    with pytest.raises(DataError, match=f"^The sampler {fact}"):
        build_sampler(config.data, Rows())


def test_another_error_of_a_sampler_is_named_and_a_state_that_does_not_fit_stays_as_it_is():
    class Faulty(Order):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyError("left")

        def update(self, batch: Any) -> None:
            raise ValueError("no scores")

    loader = RLDataLoader(Rows(), 2, shuffle=False, seed=1, sampler=Faulty())
    batch = next(iter(loader))
    with pytest.raises(DataError, match=r"'Faulty' .* raised ValueError in line \d+: no scores"):
        loader.update_sampler(batch)
    with pytest.raises(KeyError, match="left"):
        loader.load_state_dict(loader.state_dict())
