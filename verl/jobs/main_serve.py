"""`verl serve MODEL key=value ...`: a model behind OpenAI's API."""

import sys

from verl.config.command_line import names_a_file
from verl.trainer.main_ppo import main as run_job
from verl.utils.errors import restated
from verl.utils.garbage import loading_packages


def main(argv: list[str] | None = None) -> int:
    """Serve until Ctrl-C and return the exit code; user errors print one line."""
    return run_job(argv, job)


def job(argv: list[str]) -> None:
    """Run the whole job.

    Imports are local: a typo in a key, or a missing package, is reported before torch loads.
    """
    from verl.agents.gateway import require_aiohttp
    from verl.config.load import load_config
    from verl.config.serve import SHARED

    config = load_config(with_model_key(argv), root="serve")
    require_aiohttp("`verl serve`")
    with loading_packages():
        from verl.jobs.serve import serve

    with restated(SHARED.names_here):
        serve(config)


def with_model_key(argv: list[str]) -> list[str]:
    """Give a model that stands first its key, `model.path`."""
    if not argv or argv[0].startswith(("-", "+", "~model")) or "=" in argv[0]:
        return argv
    if names_a_file(argv[0]):
        return argv
    quoted = argv[0].replace("'", "\\'")
    return [f"model.path='{quoted}'", *argv[1:]]


if __name__ == "__main__":
    sys.exit(main())
