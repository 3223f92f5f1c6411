"""Commands whose output is not read."""

import os
import subprocess
from collections.abc import Mapping, Sequence


def run_without_reader(
    command: Sequence[str], environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command whose reader has exited, like `head -0`, but always before it writes."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return subprocess.run(
            command,
            env={**os.environ, "PYTHONUNBUFFERED": "", **(environment or {})},
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(writer)
