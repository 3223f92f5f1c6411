"""`python -m verl.trainer.schedules.main_one_step_off key=value ...`: `main_ppo` with
`trainer.mode=one_step_off`."""

import sys

from verl.trainer import main_ppo


def main(argv: list[str] | None = None) -> int:
    """Train with the schedule, and return the exit code; see `main_ppo.main`."""
    given = sys.argv[1:] if argv is None else argv
    return main_ppo.main(["trainer.mode=one_step_off", *given])


if __name__ == "__main__":
    sys.exit(main())
