"""`python -m verl.trainer.main_eval key=value ...`: score responses that main_generation wrote."""

import sys

from verl.trainer.main_ppo import main as run_job
from verl.utils.errors import restated
from verl.utils.garbage import loading_packages


def main(argv: list[str] | None = None) -> int:
    """Evaluate and return the exit code; user errors print one line, without a traceback."""
    return run_job(argv, job)


def job(argv: list[str]) -> None:
    """Run the whole job.

    Imports are local: a typo in a key is reported before torch loads.
    """
    from verl.config.evaluation import SHARED
    from verl.config.load import load_config

    config = load_config(argv, root="evaluation")
    with loading_packages():
        from verl.jobs.evaluation import evaluate

    with restated(SHARED.names_here):
        evaluate(config)


if __name__ == "__main__":
    sys.exit(main())
