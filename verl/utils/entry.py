"""How an entry point ends."""

import os
import sys
from collections.abc import Callable

from verl.utils.errors import MissingDependencyError, VerlError
from verl.utils.imports import missing_package


def exit_code(job: Callable[[], int | None]) -> int:
    """What `job` gives, None being 0. What a user can cause is 1 and a line on stderr; VERL_TRACEBACK=1 raises it."""
    try:
        return job() or 0
    except VerlError as error:
        # What a rank raised comes with its place and traceback; where it is a user's to mend, the one line will do.
        told = error.__cause__ if isinstance(error.__cause__, VerlError) else error
    except ModuleNotFoundError as error:
        missing = missing_package(error)
        if missing is None:
            raise
        told = MissingDependencyError(missing)
    print(f"{type(told).__name__}: {told}", file=sys.stderr, flush=True)
    if os.environ.get("VERL_TRACEBACK"):
        raise told
    return 1
