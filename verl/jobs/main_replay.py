"""`verl replay CAPSULE`: execute the step of a capsule again, and compare."""

import argparse
import logging
import sys
from pathlib import Path

from verl.jobs.main_compare import add_tolerances, tolerances_of
from verl.utils.entry import exit_code
from verl.utils.logging import configure_logging


def main(argv: list[str] | None = None) -> int:
    """Replay. Return 0 if the step did the same again, 1 for a difference or an error."""
    parser = argparse.ArgumentParser(
        prog="verl replay",
        usage="verl replay [options] CAPSULE [KEY=VALUE ...]",
        description="Execute the step of a capsule again, and compare it with the record.",
        epilog="KEY=VALUE changes a key of the run, such as trainer.device=cpu.",
        allow_abbrev=False,
    )
    parser.add_argument("capsule", metavar="CAPSULE", help="a file of verl capsule")
    parser.add_argument("--checkpoint", type=Path, help="place of the checkpoint, if it has moved")
    add_tolerances(parser)
    arguments, words = parser.parse_known_args(argv)
    configure_logging(logging.WARNING)
    return exit_code(lambda: _replay(arguments, words))


def _replay(arguments: argparse.Namespace, words: list[str]) -> int:
    """Replay the capsule. Imports are local: --help needs no torch."""
    from verl.config.load import read_overrides

    keys = read_overrides(words)  # a mistake is reported before torch loads

    from verl.jobs.replay import replay

    replayed = replay(
        arguments.capsule,
        checkpoint=arguments.checkpoint,
        keys=keys,
        tolerances=tolerances_of(arguments),
    )
    print(replayed)
    return 0 if replayed.is_equal else 1


if __name__ == "__main__":
    sys.exit(exit_code(main))
