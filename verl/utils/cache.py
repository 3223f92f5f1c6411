"""The folder of files that a later run reads again."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return `VERL_CACHE`, or `~/.cache/verl`."""
    return Path(os.environ.get("VERL_CACHE") or Path.home() / ".cache" / "verl")
