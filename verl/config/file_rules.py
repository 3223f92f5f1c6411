"""Contradictions between the files that a job reads and writes."""

from pathlib import Path
from typing import Any

from verl.config.rule_table import Messages


def output_is_no_input(config: Any) -> Messages:
    """Compare `data.output_path` with the files of `data.path`, however they are written."""
    output = config.data.output_path
    if output is None:
        return
    for path in config.data.path or ():
        if Path(path).resolve() == Path(output).resolve():
            yield (
                f"data.output_path='{output}' is also read as data.path. Give the output a name of "
                "its own."
            )
