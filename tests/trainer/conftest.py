"""Every test has the package's cache folder for itself."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_CACHE", str(tmp_path / "verl_cache"))
