"""`python -m verl.trainer.main_sft key=value ...`: fine-tune on answers or dialogues."""

import sys

from verl.trainer.main_ppo import main as run_job
from verl.utils.errors import restated
from verl.utils.garbage import loading_packages


def main(argv: list[str] | None = None) -> int:
    """Train and return the exit code; user errors print one line, without a traceback."""
    return run_job(argv, job)


def job(argv: list[str]) -> None:
    """Run the whole job.

    Imports are local: a typo in a key is reported before torch loads.
    """
    from verl.config.load import load_config
    from verl.config.sft import SHARED

    config = load_config(argv, root="sft_trainer")
    with loading_packages():
        from verl.jobs.sft_trainer import SFTTrainer

    with restated(SHARED.names_here):
        trainer = SFTTrainer(config)
        trainer.init_workers()
        trainer.fit()


if __name__ == "__main__":
    sys.exit(main())
