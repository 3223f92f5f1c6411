"""`verl replay CAPSULE`: execute the step of a capsule again, and compare."""

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

from verl.jobs.main_compare import add_tolerances, tolerances_of
from verl.utils.entry import exit_code
from verl.utils.errors import ConfigError
from verl.utils.json_text import parse_json
from verl.utils.logging import configure_logging


def main(argv: list[str] | None = None) -> int:
    """Replay. Return 0 if the step did the same again, 1 for a difference or an error."""
    parser = argparse.ArgumentParser(
        prog="verl replay",
        usage="verl replay [options] CAPSULE [KEY=VALUE ...]",
        description="Execute the step of a capsule again, and compare it with the record.",
        allow_abbrev=False,
    )
    parser.add_argument("capsule", metavar="CAPSULE", help="a file of verl capsule")
    parser.add_argument("keys", nargs="*", help="keys to change, such as trainer.device=cpu")
    parser.add_argument("--checkpoint", type=Path, help="place of the checkpoint, if it has moved")
    add_tolerances(parser)
    arguments = parser.parse_args(argv)
    configure_logging(logging.WARNING)
    return exit_code(lambda: _replay(arguments))


def _replay(arguments: argparse.Namespace) -> int:
    """Replay the capsule. Imports are local: --help needs no torch."""
    from verl.jobs.replay import replay

    replayed = replay(
        arguments.capsule,
        checkpoint=arguments.checkpoint,
        keys=_values(arguments.keys),
        tolerances=tolerances_of(arguments),
    )
    print(replayed)
    return 0 if replayed.is_equal else 1


def _values(keys: list[str]) -> dict[str, Any]:
    values = {}
    for text in keys:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"Expected key=value after the capsule, got {text!r}.")
        try:
            values[key] = parse_json(value)
        except ValueError:
            values[key] = value  # a plain word
    return values


if __name__ == "__main__":
    sys.exit(exit_code(main))
