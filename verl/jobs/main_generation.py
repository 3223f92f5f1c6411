"""`python -m verl.trainer.main_generation key=value ...`: generate responses to prompts."""

import sys

from verl.trainer.main_ppo import main as run_job
from verl.utils.errors import restated
from verl.utils.garbage import loading_packages


def main(argv: list[str] | None = None) -> int:
    """Generate and return the exit code; user errors print one line, without a traceback."""
    return run_job(argv, job)


def job(argv: list[str]) -> None:
    """Run the whole job.

    Imports are local: a typo in a key is reported before torch loads.
    """
    from verl.config.generation import SHARED
    from verl.config.load import load_config

    config = load_config(argv, root="generation")
    with loading_packages():
        from verl.jobs.generation import generate

    with restated(SHARED.names_here):
        generate(config)


if __name__ == "__main__":
    sys.exit(main())
