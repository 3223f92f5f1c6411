"""A small tokenizer, a model folder that reads pictures, and a cache folder for one test."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from tests.data.pictured import open_reader
from tests.vision_folders import save_vision_folder
from verl.data.pictures import PictureReader
from verl.data.toy import TOY_MODEL


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TOY_MODEL)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("VERL_CACHE", str(folder))
    return folder


@pytest.fixture
def parquet(tmp_path: Path) -> Callable[..., str]:
    def write(rows: list[dict[str, Any]], name: str = "rows.parquet") -> str:
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / name)
        return str(tmp_path / name)

    return write


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_folder(tmp_path_factory.mktemp("vision"))


@pytest.fixture
def reader(folder: Path) -> PictureReader:
    return open_reader(folder)
