"""Batches cover each epoch once, ordered by seed and epoch; a resumed loader continues them."""

import json
import random
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.rows import make_rows
from verl.config import DataConfig
from verl.data import RLDataLoader, RLDataset
from verl.utils.errors import DataError


class Numbers:
    """A dataset with items that contain their row number."""

    def __init__(self, count: int, fingerprint: str = "numbers") -> None:
        self.count = count
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, item: int) -> dict:
        return {"raw_prompt_ids": [item + 1], "index": item}


class EasyFirst:
    """A sampler with a fixed order for each epoch."""

    def __init__(self, data_source, data_config=None) -> None:
        self.count = len(data_source)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.count

    def __iter__(self):
        return iter(range(self.count) if self.epoch % 2 == 0 else range(self.count - 1, -1, -1))


class Drawn(EasyFirst):
    """A sampler with a new order at each iteration."""

    def __iter__(self):
        return iter(random.sample(range(self.count), self.count))


class Stateful(Drawn):
    """A random sampler with a saved state."""

    def __init__(self, data_source, data_config=None) -> None:
        super().__init__(data_source)
        self.left: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.left = []

    def __iter__(self):
        self.left = self.left or random.sample(range(self.count), self.count)
        while self.left:
            yield self.left.pop()

    def state_dict(self) -> dict:
        return {"left": list(self.left)}

    def load_state_dict(self, state: dict) -> None:
        self.left = list(state["left"])


def stream(loader, batches: int) -> list[list[int]]:
    """Return the rows of the next batches, over as many epochs as needed."""
    endless = (batch for _ in range(10**6) for batch in loader)
    return [batch.non_tensor_batch["index"].tolist() for batch in islice(endless, batches)]


loaders = st.builds(
    lambda count, share, shuffle, drop_last, seed: (
        lambda: RLDataLoader(
            Numbers(count),
            max(1, int(share * count)),
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )
    ),
    st.integers(1, 23),
    st.floats(0, 1),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**40),
)


@given(make=loaders, before=st.integers(0, 12))
def test_resumed_loader_gives_the_remaining_batches(make, before):
    undisturbed = stream(make(), before + 12)
    killed = make()
    assert stream(killed, before) == undisturbed[:before]
    state = json.loads(json.dumps(killed.state_dict()))
    resumed = make()
    stream(resumed, 1)  # earlier batches must not matter
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert stream(resumed, 12) == undisturbed[before:]
    assert stream(killed, 12) == undisturbed[before:]


def test_a_dataset_may_give_the_rows_of_a_batch_together():
    class Together(Numbers):
        def __getitems__(self, items: list[int]) -> list[dict]:
            asked.append(items)
            return [self[item] for item in items]

    asked: list[list[int]] = []
    batch = next(iter(RLDataLoader(Together(6), 3, shuffle=True, seed=4)))
    assert asked == [batch.non_tensor_batch["index"].tolist()]
    apart = next(iter(RLDataLoader(Numbers(6), 3, shuffle=True, seed=4)))
    assert asked == [apart.non_tensor_batch["index"].tolist()]


@given(make=loaders)
def test_epoch_covers_every_row_once(make):
    loader = make()
    for _ in range(3):
        epoch = [batch.non_tensor_batch["index"].tolist() for batch in loader]
        rows = [row for batch in epoch for row in batch]
        assert len(epoch) == len(loader)
        assert len(set(rows)) == len(rows)
        if loader.drop_last:
            assert all(len(batch) == loader.batch_size for batch in epoch)
        else:
            assert sorted(rows) == list(range(len(loader.dataset)))


def test_state_inside_the_loop_counts_the_current_batch():
    expected = stream(RLDataLoader(Numbers(6), 2, shuffle=True, seed=1), 6)
    for stop in range(1, 4):
        loader = RLDataLoader(Numbers(6), 2, shuffle=True, seed=1)
        for number, _ in enumerate(loader, start=1):
            if number == stop:
                state = loader.state_dict()
                break
        resumed = RLDataLoader(Numbers(6), 2, shuffle=True, seed=1)
        resumed.load_state_dict(state)
        assert stream(resumed, 3) == expected[stop : stop + 3]


def test_the_epoch_of_the_newest_batch():
    loader = RLDataLoader(Numbers(5), 2, shuffle=True, seed=1)
    assert loader.drawn_epoch == 0, "nothing is drawn yet"

    epochs = []
    for _ in range(2):
        for _ in loader:
            epochs.append(loader.drawn_epoch)
    assert epochs == [0, 0, 1, 1]

    resumed = RLDataLoader(Numbers(5), 2, shuffle=True, seed=1)
    resumed.load_state_dict(loader.state_dict())
    assert resumed.drawn_epoch == 1


@pytest.mark.parametrize("sampler", [None, Stateful])
def test_resumed_run_may_change_the_batch_size(sampler):
    def make(batch_size: int) -> RLDataLoader:
        own = sampler(Numbers(10)) if sampler else None
        return RLDataLoader(Numbers(10), batch_size, shuffle=True, seed=1, sampler=own)

    loader = make(3)
    done = stream(loader, 2)
    resumed = make(2)
    resumed.load_state_dict(loader.state_dict())
    assert sorted(row for batch in done + stream(resumed, 2) for row in batch) == list(range(10))
    resumed = make(5)
    resumed.load_state_dict(loader.state_dict())  # 4 rows are left, too few for a batch
    assert len(stream(resumed, 1)[0]) == 5
    assert resumed.state_dict()["epoch"] == 1


def test_order_depends_on_seed_and_epoch():
    def epochs(seed: int, shuffle: bool = True) -> list[list[int]]:
        loader = RLDataLoader(Numbers(20), 20, shuffle=shuffle, seed=seed)
        return [rows for _ in range(2) for rows in stream(loader, 1)]

    assert epochs(1) == epochs(1)
    assert len({tuple(rows) for seed in (1, 2) for rows in epochs(seed)}) == 4
    assert epochs(1, shuffle=False) == [list(range(20))] * 2


def test_state_is_small_for_a_large_dataset():
    loader = RLDataLoader(Numbers(10_000), 6_000, shuffle=True, seed=1)
    stream(loader, 1)
    assert len(json.dumps(loader.state_dict())) < 300


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            lambda: RLDataLoader(Numbers(9), 2, shuffle=True, seed=1),
            "another data set: 8 rows .* this one has 9",
        ),
        (
            lambda: RLDataLoader(Numbers(8, "else"), 2, shuffle=True, seed=1),
            "fingerprint numbers.*else",
        ),
        (
            lambda: RLDataLoader(Numbers(8), 2, shuffle=True, seed=2),
            "in another order than in the checkpoint",
        ),
        (
            lambda: RLDataLoader(Numbers(8), 2, shuffle=False, seed=1),
            "in another order than in the checkpoint",
        ),
    ],
)
def test_different_dataset_or_order_is_an_error(other, message):
    loader = RLDataLoader(Numbers(8), 2, shuffle=True, seed=1)
    stream(loader, 2)
    with pytest.raises(DataError, match=message):
        other().load_state_dict(loader.state_dict())


def test_batch_larger_than_the_dataset_is_an_error():
    with pytest.raises(
        DataError, match=r"A batch of 16 rows does not fit a dataset of 10\. Lower .* at most 10"
    ):
        RLDataLoader(Numbers(10), 16, shuffle=True, seed=1)
    with pytest.raises(DataError, match="no rows"):
        RLDataLoader(Numbers(0), 1, shuffle=False, seed=1, drop_last=False)
    with pytest.raises(DataError, match=r"the sampler, has no rows"):
        RLDataLoader(Numbers(3), 1, shuffle=False, seed=1, sampler=EasyFirst([]))
    with pytest.raises(DataError, match="at least 1 row"):
        RLDataLoader(Numbers(3), 0, shuffle=False, seed=1)
    assert stream(RLDataLoader(Numbers(3), 16, shuffle=False, seed=1, drop_last=False), 1) == [
        [0, 1, 2]
    ]


def test_a_loader_takes_another_order():
    loader = RLDataLoader(Numbers(4), 2, shuffle=True, seed=1)
    next(iter(loader))
    loader.order_by(EasyFirst(range(4)))
    assert stream(loader, 4) == [[0, 1], [2, 3], [3, 2], [1, 0]]
    with pytest.raises(DataError, match="2 rows does not fit a dataset of 1"):
        loader.order_by(EasyFirst(range(1)))


@pytest.mark.parametrize("kind", [EasyFirst, Stateful])
@pytest.mark.parametrize("before", [1, 3, 4])
def test_user_sampler_resumes(kind, before):
    loader = RLDataLoader(Numbers(7), 2, shuffle=True, seed=1, sampler=kind(Numbers(7)))
    stream(loader, before)
    state = loader.state_dict()
    random.seed(before)  # a resumed run restores the global generators
    rest = stream(loader, 5)
    resumed = RLDataLoader(Numbers(7), 2, shuffle=True, seed=1, sampler=kind(Numbers(7)))
    resumed.load_state_dict(state)
    random.seed(before)
    assert stream(resumed, 5) == rest


def test_unrepeatable_sampler_is_an_error():
    random.seed(0)
    loader = RLDataLoader(Numbers(20), 10, shuffle=True, seed=1, sampler=Drawn(Numbers(20)))
    stream(loader, 1)
    resumed = RLDataLoader(Numbers(20), 10, shuffle=True, seed=1, sampler=Drawn(Numbers(20)))
    with pytest.raises(DataError, match="needs a fixed order per epoch, or state_dict"):
        resumed.load_state_dict(loader.state_dict())


def test_sampler_may_adapt_during_training():
    class Adaptive(EasyFirst):
        hint = 0

        def __iter__(self):
            for _ in range(self.count):
                yield self.hint

    sampler = Adaptive(Numbers(5))
    seen = []
    for batch in RLDataLoader(Numbers(5), 1, shuffle=True, seed=1, sampler=sampler):
        seen += batch.non_tensor_batch["index"].tolist()
        sampler.hint = len(seen) % 5
    assert seen == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("count", "rows", "message"),
    [
        (3, [0, 1], "len.. 3 but gave 2"),
        (2, [0, 9], "gave row 9 of a dataset of 5"),
        (2, [0, 0.5], "the row 0.5, which is not an integer. It must give .* from 0 to 4"),
    ],
)
def test_inconsistent_sampler_is_an_error(count, rows, message):
    class Lying(EasyFirst):
        def __len__(self) -> int:
            return count

        def __iter__(self):
            return iter(rows)

    with pytest.raises(DataError, match=message):
        stream(RLDataLoader(Numbers(5), count, shuffle=True, seed=1, sampler=Lying(Numbers(5))), 1)


def test_batch_of_the_real_dataset(parquet, tokenizer):
    dataset = RLDataset(parquet(make_rows(4)), tokenizer, DataConfig(max_prompt_length=64))
    (batch,) = RLDataLoader(dataset, 4, shuffle=False, seed=1)
    assert batch.batch is None
    assert len(batch) == 4
    assert batch.non_tensor_batch["reward_model"][3] == {"style": "rule", "ground_truth": "4"}
    assert all(
        column.dtype == object and column.shape == (4,)
        for column in batch.non_tensor_batch.values()
    )


def test_curriculum_sampler_receives_trained_batches():
    class Curriculum:
        def __init__(self) -> None:
            self.seen: list = []

        def __iter__(self):
            return iter(range(4)) if not self.seen else iter(range(3, -1, -1))

        def __len__(self) -> int:
            return 4

        def update(self, batch) -> None:
            self.seen.append(batch)

    sampler = Curriculum()
    loader = RLDataLoader(Numbers(4), 2, shuffle=True, seed=1, sampler=sampler)
    for batch in loader:
        loader.update_sampler(batch)
    assert len(sampler.seen) == 2
    assert next(iter(loader)).non_tensor_batch["index"].tolist() == [3, 2], (
        "the second epoch depends on the first"
    )
    # A loader without such a sampler ignores the call.
    RLDataLoader(Numbers(4), 2, shuffle=False, seed=1).update_sampler(batch)
