"""Processes read rows ahead: batches, errors and checkpoints are those without, and all end."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.data.pictured import dataset, open_reader, row
from tests.data.rows import make_rows
from tests.vision_folders import save_vision_folder, some_image
from verl.config import DataConfig
from verl.config.sft import SFTDataConfig
from verl.data import RLDataLoader, RLDataset, SFTDataset
from verl.data.own_rows import KeptRows, read_rows
from verl.data.row_processes import Draw
from verl.models.pictures import Picture, pictures_of
from verl.protocol import DataProto
from verl.utils.children import PACKAGE_ROOT
from verl.utils.errors import ConfigError, DataError, WorkerLostError
from verl.utils.imports import load_extern_type
from verl.utils.seeding import rng_state

OWN = """
import random
from verl.data import RLDataset

class Own(RLDataset):
    def __getitem__(self, item):
        if item == getattr(self, "bad", None):
            raise ValueError(f"no {item}")
        return {**super().__getitem__(item), "drawn": random.random()}

from verl.utils.errors import DataError

class Logged(RLDataset):
    def __getitem__(self, item):
        with open(self.log, "a") as log:
            log.write(f"{item} ")
        if item in (2, 4):
            raise DataError(f"no {item}")
        return super().__getitem__(item)

class Open(RLDataset):
    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        self.log = open("/dev/null")

class Streams(RLDataset):
    def __getitem__(self, item):
        return {**super().__getitem__(item), "stream": (_ for _ in ())}
"""
# Reads two batches, then waits in the middle of an epoch.
PROGRAM = """
import sys, time
from transformers import AutoTokenizer
from verl.config import DataConfig
from verl.data import RLDataLoader, RLDataset
from verl.data.toy import TOY_MODEL, toy_files
from verl.utils.entry import exit_code

def train():
    tokenizer = AutoTokenizer.from_pretrained(TOY_MODEL)
    data = RLDataset(toy_files(), tokenizer, DataConfig())
    loader = RLDataLoader(data, 2, shuffle=True, seed=1, num_workers=2)
    for number, _ in enumerate(loader):
        if number == 1:
            print("ready", flush=True)
            time.sleep(600)

sys.exit(exit_code(train))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_folder(tmp_path_factory.mktemp("vision"))


@pytest.fixture
def loaders() -> Iterator[list[RLDataLoader]]:
    made: list[RLDataLoader] = []
    yield made
    for loader in made:
        loader.close()


@pytest.fixture
def make(folder: Path, tmp_path: Path, parquet: Any, tokenizer: Any, loaders: Any) -> Any:
    """Return a function that makes a loader of one kind of rows."""

    def loader_of(kind: str, num_workers: int) -> RLDataLoader:
        data = (
            written_rows(parquet, tokenizer) if kind == "text" else pictured_rows(folder, tmp_path)
        )
        loaders.append(RLDataLoader(data, 3, shuffle=True, seed=5, num_workers=num_workers))
        if data.pictures is not None:
            data.pictures._kept.clear()  # so that the processes' pictures are the ones compared
        return loaders[-1]

    return loader_of


def endless(loader: RLDataLoader) -> Iterator[DataProto]:
    while True:
        yield from loader


def written_rows(parquet: Any, tokenizer: Any) -> RLDataset:
    return RLDataset(parquet(make_rows(7)), tokenizer, DataConfig(max_prompt_length=64))


def pictured_rows(folder: Path, tmp_path: Path, count: int = 7) -> RLDataset:
    """Return rows with pictures; rows 0 and 4, and so on, have equal ones."""
    for number in range(count):
        some_image(number % 4, (200, 120)).save(tmp_path / f"{number}.png")
    rows = [row("<image>Hi", images=[f"{number}.png"]) for number in range(count)]
    return dataset(tmp_path, open_reader(folder), *rows)


def require_equal(batch: DataProto, expected: DataProto) -> None:
    assert batch.batch is None
    assert expected.batch is None
    assert batch.non_tensor_batch.keys() == expected.non_tensor_batch.keys()
    for name, values in expected.non_tensor_batch.items():
        if name != "prepared_pictures":
            assert batch.non_tensor_batch[name].tolist() == values.tolist(), name
    for own, others in zip(pictures_of(batch), pictures_of(expected), strict=True):
        assert [picture.key for picture in own] == [picture.key for picture in others]
        for picture, other in zip(own, others):
            assert picture.token_ids == other.token_ids
            assert picture.inputs.keys() == other.inputs.keys()
            for name, tensor in other.inputs.items():
                assert torch.equal(picture.inputs[name], tensor)


def generators() -> list[Any]:
    """Return the states of the random generators."""
    state = rng_state()
    return [state["python"], state["numpy"][1].tolist(), state["torch"].tolist()]


@pytest.mark.parametrize("kind", [pytest.param("text", marks=pytest.mark.slow), "pictures"])
def test_batches_and_positions_are_those_without_processes(kind: str, make: Any) -> None:
    alone, ahead = make(kind, 0), make(kind, 2)
    before = generators()
    seen: dict[str, Picture] = {}
    for batch, other in islice(zip(endless(ahead), endless(alone)), 5):
        require_equal(batch, other)
        assert ahead.state_dict() == alone.state_dict(), "the batch ahead does not count"
        for picture in chain.from_iterable(pictures_of(batch)):
            assert seen.setdefault(picture.key, picture) is picture, "equal images are one object"

    assert len(seen) == (4 if kind == "pictures" else 0)
    assert generators() == before, "the random numbers of the driver are not touched"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "pictures"])
def test_a_resumed_run_reads_the_batches_that_were_to_come(kind: str, make: Any) -> None:
    alone, ahead, resumed = make(kind, 0), make(kind, 2), make(kind, 2)
    saved = []
    expected = []
    for batch in islice(endless(ahead), 5):
        expected.append(batch)
        saved.append(json.dumps(ahead.state_dict()))

    resumed.load_state_dict(json.loads(saved[2]))  # a batch before the end of an epoch
    for batch, other in zip(endless(resumed), expected[3:]):
        require_equal(batch, other)
    resumed.load_state_dict(json.loads(saved[0]))  # the processes were asked for another batch
    require_equal(next(iter(resumed)), expected[1])
    alone.load_state_dict(json.loads(saved[1]))  # with processes or without
    require_equal(next(iter(alone)), expected[2])


@pytest.mark.slow
def test_a_bad_row_is_the_error_of_its_own_batch(
    folder: Path, tmp_path: Path, loaders: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    data = pictured_rows(folder, tmp_path, 8)
    whole = (tmp_path / "7.png").read_bytes()
    assert data.pictures is not None
    data.pictures._kept.clear()
    (tmp_path / "7.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError) as alone:
        data[7]

    loader = RLDataLoader(data, 2, shuffle=False, seed=1, num_workers=2)
    loaders.append(loader)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    time.sleep(0.5)  # the error of the last batch is on its way
    with pytest.raises(DataError) as error:
        next(batches)
    assert str(error.value) == str(alone.value)
    assert str(error.value).startswith(f"{tmp_path}/rows.jsonl, row 7: image 0 of the row: ")
    assert repr(error.value.__cause__) == repr(alone.value.__cause__)
    assert capfd.readouterr().err == ""


def test_the_error_is_that_of_the_first_bad_row_which_is_read_once(
    tmp_path: Path, parquet: Any, tokenizer: Any, loaders: Any
) -> None:
    """The first process reads rows 0, 1 and 2, and the second one rows 3, 4 and 5."""
    (tmp_path / "own.py").write_text(OWN)
    kind = load_extern_type(str(tmp_path / "own.py"), "Logged")
    data = kind(parquet(make_rows(6)), tokenizer, DataConfig(max_prompt_length=64))
    data.log = str(tmp_path / "log")

    loader = RLDataLoader(data, 6, shuffle=False, seed=1, num_workers=2)
    loaders.append(loader)
    with pytest.raises(DataError, match="no 2"):
        next(iter(loader))
    read = (tmp_path / "log").read_text().split()
    assert [number for number in read if number in ("0", "1", "2")] == ["0", "1", "2"]


@pytest.mark.slow
def test_a_dataset_of_a_users_file_is_read_in_processes(
    tmp_path: Path, parquet: Any, tokenizer: Any, loaders: Any
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    kind = load_extern_type(str(tmp_path / "own.py"), "Own")
    data = kind(parquet(make_rows(6)), tokenizer, DataConfig(max_prompt_length=64))
    data.bad = 5

    def make() -> RLDataLoader:
        loaders.append(RLDataLoader(data, 2, shuffle=False, seed=3, num_workers=2))
        return loaders[-1]

    batches = iter(make())
    drawn = [next(batches).non_tensor_batch["drawn"].tolist() for _ in range(2)]
    assert len({*drawn[0], *drawn[1]}) == 4
    message = (
        r"The call for row 5 of the data set 'Own' \(.*own\.py\) raised ValueError in line 8: no"
    )
    with pytest.raises(DataError, match=message) as error:
        next(batches)
    users = error.value.__cause__
    assert repr(users) == "ValueError('no 5')"
    assert "own.py" in str(users.__cause__), "the traceback of the process is its cause"
    assert next(iter(make())).non_tensor_batch["drawn"].tolist() == drawn[0], "can be repeated"


def test_kept_rows_of_a_users_file_are_read_in_processes(
    tmp_path: Path, parquet: Any, tokenizer: Any, loaders: Any
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    kind = load_extern_type(str(tmp_path / "own.py"), "Own")
    data = kind(parquet(make_rows(6)), tokenizer, DataConfig(max_prompt_length=64))
    kept = KeptRows(data, [1, 2, 4, 5])

    loaders.append(RLDataLoader(kept, 2, shuffle=False, seed=3, num_workers=2))  # pyright: ignore
    drawn = [batch.non_tensor_batch["index"].tolist() for batch in loaders[-1]]
    assert drawn == [[1, 2], [4, 5]]


@pytest.mark.parametrize("base", ["RLDataset", "object"])
def test_an_error_of_a_users_dataset_names_row_and_class(
    tmp_path: Path, parquet: Any, tokenizer: Any, base: str
) -> None:
    """With the `__getitems__` of RLDataset, and without."""
    (tmp_path / "own.py").write_text(OWN.replace("Own(RLDataset)", f"Own({base})"))
    kind = load_extern_type(str(tmp_path / "own.py"), "Own")
    if base == "RLDataset":
        data = kind(parquet(make_rows(6)), tokenizer, DataConfig(max_prompt_length=64))
    else:
        data = kind()
    data.bad = 5

    message = r"^The call for row 5 of the data set 'Own' \(.*own\.py\) raised ValueError in line 8"
    with pytest.raises(DataError, match=message) as error:
        read_rows(data, [5, 1] if base == "object" else [1, 5])
    assert repr(error.value.__cause__) == "ValueError('no 5')"


def test_a_dataset_that_reads_no_batch_is_named() -> None:
    class Batched:
        def __getitem__(self, item: int) -> dict[str, Any]:
            return {"row": item}

        def __getitems__(self, items: list[int]) -> list[dict[str, Any]]:
            raise KeyError("text")

    message = "The call for 2 rows of the data set 'Batched' .* raised KeyError in line .*'text'"
    with pytest.raises(DataError, match=message) as error:
        read_rows(Batched(), [1, 5])
    assert isinstance(error.value.__cause__, KeyError)


def test_a_dataset_that_gives_another_number_of_items_is_named() -> None:
    class Batched:
        def __getitems__(self, items: list[int]) -> list[dict[str, Any]]:
            return [{"row": items[0]}]

    message = "'Batched' must return an item for each row, got 1 for 2 rows"
    with pytest.raises(DataError, match=message):
        read_rows(Batched(), [1, 5])


def test_a_dataset_that_cannot_be_sent_is_an_error_with_the_key(
    tmp_path: Path, parquet: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    file = parquet(make_rows(4))
    config = DataConfig(max_prompt_length=64)

    def load(name: str) -> Any:
        return load_extern_type(str(tmp_path / "own.py"), name)(file, tokenizer, config)

    message = r"data.dataloader_num_workers=2 reads rows in processes, to which the data set "
    with pytest.raises(ConfigError, match=rf"{message}Open cannot be sent .*TextIOWrapper"):
        RLDataLoader(load("Open"), 2, shuffle=False, seed=1, num_workers=2)

    own = load("Own")
    monkeypatch.setattr(type(own), "__module__", "__main__")
    with pytest.raises(ConfigError, match=rf"{message}Own .*in the script that was started"):
        RLDataLoader(own, 2, shuffle=False, seed=1, num_workers=2)


@pytest.mark.slow
def test_an_item_that_cannot_be_sent_is_an_error_with_the_key(
    tmp_path: Path, parquet: Any, tokenizer: Any
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    kind = load_extern_type(str(tmp_path / "own.py"), "Streams")
    data = kind(parquet(make_rows(4)), tokenizer, DataConfig(max_prompt_length=64))
    streams = RLDataLoader(
        data, 2, shuffle=False, seed=1, num_workers=1, workers_key="data.num_workers"
    )
    with pytest.raises(DataError, match=r"^data.num_workers=1 .* an item of .*generator"):
        next(iter(streams))


def test_a_users_sampler_is_asked_for_no_row_ahead(
    parquet: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ReadsHere:
        def __init__(self, dataset: Any, count: int, **keywords: Any) -> None:
            self.dataset = dataset

        def items(self, draw: Draw, ahead: Draw | None) -> Any:
            assert ahead is None
            return read_rows(self.dataset, draw.rows)

    class Watched:
        given = 0

        def __len__(self) -> int:
            return 6

        def __iter__(self) -> Iterator[int]:
            for number in range(6):
                self.given += 1
                yield 5 - number

    monkeypatch.setattr("verl.data.loader.RowProcesses", ReadsHere)
    sampler = Watched()
    data = written_rows(parquet, tokenizer)
    loader = RLDataLoader(data, 2, shuffle=False, seed=1, sampler=sampler, num_workers=1)
    for number, batch in enumerate(loader):
        assert batch.non_tensor_batch["index"].tolist() == [5 - 2 * number, 4 - 2 * number]
        assert sampler.given == 2 * number + 2


@pytest.mark.slow
def test_fine_tuning_reads_pictures_in_processes(
    folder: Path, tmp_path: Path, loaders: Any
) -> None:
    some_image(0).save(tmp_path / "0.png")
    file = tmp_path / "rows.jsonl"
    file.write_text(
        json.dumps({"question": "<image>What?", "images": ["0.png"], "answer": "It is 4."}) + "\n"
    )
    reader = open_reader(folder)
    config = SFTDataConfig(prompt_key="question", response_key="answer", max_length=512)
    data = SFTDataset(str(file), reader.tokenizer, config, pictures=reader)
    reader._kept.clear()
    made = [RLDataLoader(data, 1, shuffle=False, seed=1, num_workers=n) for n in (0, 1)]
    loaders += made
    alone, ahead = map(next, map(iter, made))
    require_equal(ahead, alone)


@pytest.mark.slow
def test_a_killed_process_is_reported(parquet: Any, tokenizer: Any, loaders: Any) -> None:
    data = written_rows(parquet, tokenizer)
    loader = RLDataLoader(data, 1, shuffle=False, seed=1, num_workers=1)
    loaders.append(loader)
    next(iter(loader))
    (reader,) = readers_of(psutil.Process())
    reader.kill()
    with pytest.raises(WorkerLostError, match=r"num_workers=1: a process .* killed \(SIGKILL\)"):
        for _ in range(3):  # the batch ahead may be there already
            next(iter(loader))
    assert len(next(iter(loader))) == 1
    loader.close()
    assert not readers_of(psutil.Process())


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_processes_end_with_the_driver(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))  # without a guard of __main__
    driver = subprocess.Popen(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": PACKAGE_ROOT, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "ready\n"
        readers = readers_of(psutil.Process(driver.pid))
        assert len(readers) == 2
        for each in readers:
            assert each.num_threads() == 2, "the reader, and the thread that ends it"

        os.killpg(driver.pid, number)  # as a terminal sends Ctrl-C
        _, errors = driver.communicate(timeout=30)
        _, alive = psutil.wait_procs(readers, timeout=10)
        assert not alive
    finally:
        driver.kill()
    says = {signal.SIGINT: "Interrupted.\n", signal.SIGTERM: "Ended by SIGTERM.\n"}
    assert errors == says.get(number, "")


def readers_of(driver: psutil.Process) -> list[psutil.Process]:
    """Return the processes that read rows, without the one that they were forked from."""
    leaders = [each for each in driver.children() if "row_processes" in " ".join(each.cmdline())]
    return [each for leader in leaders for each in leader.children()]
