"""A prompt that is too long in rows of a program is an error, dropped or cut, as in files."""

import pickle
import random
from typing import Any

import pytest

from verl.config import DataConfig
from verl.data import RLDataLoader, own_rows
from verl.data.own_rows import KeptRows, PromptLimit
from verl.utils.errors import DataError

LENGTHS = [3, 9, 4, 12, 5]
PICTURES = ("a picture",)


def encode(prompt: Any) -> list[int]:
    return list(range(1, 1 + len(prompt[0]["content"])))


def rows_of(lengths: list[int]) -> list[dict[str, Any]]:
    """Return rows with messages or token ids, in turn."""
    rows: list[dict[str, Any]] = []
    for number, length in enumerate(lengths):
        row: dict[str, Any] = {"raw_prompt": [{"role": "user", "content": "x" * length}]}
        if number % 2:
            row["raw_prompt_ids"] = list(range(1, 1 + length))
        rows.append({**row, "index": number})
    return rows


def limit(*, reads_pictures: bool = False, **settings: Any) -> PromptLimit:
    data = DataConfig(**{"max_prompt_length": 8, **settings})
    return PromptLimit("train_dataset", data, encode, reads_pictures=reads_pictures)


def drawn(rows: Any, of: PromptLimit) -> list[list[int]]:
    """Return the prompts of batches of two."""
    loader = RLDataLoader(rows, 2, shuffle=False, seed=1, drop_last=False, encode=encode, limit=of)
    prompts = []
    for batch in loader:
        prompts += batch.non_tensor_batch["raw_prompt_ids"].tolist()
    return prompts


def test_a_row_that_is_too_long_is_named_at_start():
    message = (
        r"^train_dataset, row 1: the prompt has 9 tokens, data\.max_prompt_length allows 8 "
        r"\(2 of the rows are too long\)\. Raise it, .*filter_overlong_prompts=true.*truncation="
    )
    with pytest.raises(DataError, match=message):
        limit().keep(rows_of(LENGTHS))

    fitting = rows_of([8, 1])
    assert limit().keep(fitting) is fitting


def test_a_row_without_a_prompt_is_named_at_start():
    with pytest.raises(DataError, match=r"^train_dataset, row 1: An item needs raw_prompt_ids"):
        limit().keep([*rows_of([3]), {"index": 1}])


def test_the_filter_drops_rows_that_are_too_long(caplog):
    caplog.set_level("INFO", logger="verl")
    kept = limit(filter_overlong_prompts=True).keep(rows_of(LENGTHS))
    assert [row["index"] for row in kept] == [0, 2, 4]
    assert [row["index"] for row in kept.__getitems__([2, 0])] == [4, 0]
    assert "Kept 3 of 5 rows of train_dataset; 2 are longer than" in caplog.text
    with pytest.raises(DataError, match="All prompts of train_dataset are longer than .*=2"):
        limit(filter_overlong_prompts=True, max_prompt_length=2).keep(rows_of(LENGTHS))


@pytest.mark.parametrize(("side", "cut"), [("left", [5, 12]), ("right", [1, 8])])
def test_truncation_cuts_drawn_prompts(side, cut):
    cuts = limit(truncation=side)
    rows = rows_of(LENGTHS)
    prompts = drawn(cuts.keep(rows), cuts)
    assert list(map(len, prompts)) == [3, 8, 4, 8, 5]
    assert [prompts[3][0], prompts[3][-1]] == cut


def test_a_prompt_with_pictures_is_never_cut():
    rows = rows_of([12, 12])
    rows[1]["prepared_pictures"] = PICTURES
    with pytest.raises(DataError, match="row 1: .* prompts with pictures are never cut"):
        limit(truncation="left", reads_pictures=True).keep(rows)


class Growing:
    """Its second row has a longer prompt each time."""

    def __init__(self) -> None:
        self.length = 7

    def __len__(self) -> int:
        return 2

    def __getitem__(self, item: int) -> dict[str, Any]:
        self.length += item
        return {"raw_prompt_ids": [1] * self.length}


@pytest.mark.parametrize(
    ("drops", "way"), [(False, "Raise it, or set"), (True, "was shorter when .* measured it")]
)
def test_a_prompt_that_is_too_long_when_it_is_drawn_is_named(drops, way):
    grows = limit(filter_overlong_prompts=drops)
    rows = grows.keep(Growing())
    with pytest.raises(DataError, match=f"^train_dataset, row 1: the prompt has 9 tokens.* {way}"):
        drawn(rows, grows)


def test_the_first_rows_alone_are_measured_where_none_is_dropped(monkeypatch):
    monkeypatch.setattr(own_rows, "MEASURED_S", 0.0)
    monkeypatch.setattr(own_rows, "CHUNK", 3)
    rows = rows_of([3, 4, 5, 12])
    assert limit().keep(rows) is rows
    with pytest.raises(DataError, match="^train_dataset, row 3: "):
        drawn(rows, limit())
    assert len(limit(filter_overlong_prompts=True).keep(rows)) == 3


def test_measuring_leaves_the_random_numbers_of_a_data_set_as_they_were():
    class Random(Growing):
        def __getitem__(self, item: int) -> dict[str, Any]:
            return {"raw_prompt_ids": [random.randrange(100)]}

    random.seed(3)
    first = random.random()
    random.seed(3)
    limit().keep(Random())
    assert random.random() == first


def test_kept_rows_are_pickled_and_their_choice_is_in_the_fingerprint():
    rows = rows_of(LENGTHS)
    kept = KeptRows(rows, [0, 2])
    assert [row["index"] for row in pickle.loads(pickle.dumps(kept))] == [0, 2]
    assert kept.fingerprint == KeptRows(rows_of(LENGTHS), [0, 2]).fingerprint
    assert kept.fingerprint != KeptRows(rows, [0, 3]).fingerprint
