"""The location of data and models next to the repository, and the mark of tests that need them."""

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"


def needs_shared(relative: str) -> pytest.MarkDecorator:
    """Skip by name if a clone has no such folder or file next to it."""
    return pytest.mark.skipif(
        not (SHARED / relative).exists(), reason=f"needs {relative} in the shared folder"
    )
