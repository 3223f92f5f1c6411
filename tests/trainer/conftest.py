"""Every test has the package's log and its cache folder for itself."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from verl.utils.logging import logger, say_once


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The log's handler would keep the output stream of the test that ran first."""
    monkeypatch.setenv("VERL_CACHE", str(tmp_path / "verl_cache"))
    say_once.cache_clear()
    yield
    logger.handlers.clear()
    logger.propagate = True
