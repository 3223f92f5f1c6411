"""Give every test its own cache folder of the package."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_CACHE", str(tmp_path / "verl_cache"))
