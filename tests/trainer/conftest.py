"""Give every test its own cache folder of the package, or one of few shapes."""

from pathlib import Path

import pytest

from verl.data import shapes


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_CACHE", str(tmp_path / "verl_cache"))


@pytest.fixture
def few_shapes(
    _alone: None, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut the data set off before its pictures are drawn: every run prepares all of its rows."""
    monkeypatch.setenv("VERL_CACHE", str(tmp_path_factory.getbasetemp() / "cache-of-few-shapes"))
    monkeypatch.setattr(shapes, "SIZES", {"train": 12, "val": 4})
