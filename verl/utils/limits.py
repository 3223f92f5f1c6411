"""What the system lets this process have."""

import math
import resource


def largest_file() -> float:
    """The bytes that no file may grow beyond (`ulimit -f`); infinity without such a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return math.inf if limit == resource.RLIM_INFINITY else limit
