"""`python -m verl.trainer.main_sft [--dry-run] key=value ...`: fine-tune on answers or dialogues,
or plan it."""

import sys

from verl.trainer.main_ppo import DRY_RUN
from verl.trainer.main_ppo import main as run_job
from verl.utils.errors import restated
from verl.utils.garbage import loading_packages


def main(argv: list[str] | None = None) -> int:
    """Train and return the exit code; user errors print one line, without a traceback."""
    given = sys.argv[1:] if argv is None else argv
    if DRY_RUN in given:
        from verl.diagnostics import plan

        keys = [argument for argument in given if argument != DRY_RUN]
        return plan.main(["--sft", *keys])
    return run_job(given, job)


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
