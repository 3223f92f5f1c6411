"""Where the data and models that lie beside the repository are, and how a test says that it needs
them."""

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"


def needs_shared(relative: str) -> pytest.MarkDecorator:
    """Skip by name where a clone has no such folder or file beside it."""
    return pytest.mark.skipif(
        not (SHARED / relative).exists(), reason=f"needs {relative} in the shared folder"
    )
