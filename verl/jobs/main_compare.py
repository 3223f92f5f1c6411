"""`verl compare A B`: the first difference of two recorded runs."""

import argparse
import sys
from typing import Any

from verl.utils.entry import exit_code
from verl.utils.errors import ConfigError


def main(argv: list[str] | None = None) -> int:
    """Print the first difference. Return 0 if there is none, 1 for a difference or an error."""
    parser = argparse.ArgumentParser(
        prog="verl compare",
        description="Compare two recorded runs step by step: data, samples, rewards, log-probs, "
        "advantages, metrics and the weights after each step.",
        allow_abbrev=False,
    )
    parser.add_argument("one", metavar="A", help="folder of a run (trainer.default_local_dir)")
    parser.add_argument("other", metavar="B", help="folder of another run")
    add_tolerances(parser)
    arguments = parser.parse_args(argv)
    return exit_code(lambda: compare(arguments))


def compare(arguments: argparse.Namespace) -> int:
    """Compare the runs. Imports are local: --help needs no torch."""
    from verl.jobs.compare import compare_runs
    from verl.tracking.records import load_run

    tolerances = tolerances_of(arguments)
    found = compare_runs(load_run(arguments.one), load_run(arguments.other), tolerances)
    print(found)
    return 1 if found.differences else 0


def add_tolerances(parser: argparse.ArgumentParser) -> None:
    """Add the options that `tolerances_of` reads."""
    parser.add_argument("--atol", type=float, default=0.0, help="absolute tolerance of floats")
    parser.add_argument("--rtol", type=float, default=0.0, help="relative tolerance of floats")
    parser.add_argument(
        "--tolerance",
        action="append",
        default=[],
        metavar="NAME=ATOL",
        help="absolute tolerance of a column, metric or weight, such as rollout_log_probs=1e-3",
    )


def tolerances_of(arguments: argparse.Namespace) -> Any:
    """Return the `Tolerances` that the arguments ask for."""
    from verl.jobs.compare import Tolerances

    by_name = {}
    for text in arguments.tolerance:
        name, _, value = text.partition("=")
        try:
            by_name[name] = float(value)
        except ValueError as error:
            raise ConfigError(f"--tolerance takes NAME=NUMBER, got {text!r}.") from error
    return Tolerances(arguments.atol, arguments.rtol, by_name)


if __name__ == "__main__":
    sys.exit(exit_code(main))
