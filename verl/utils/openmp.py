"""How OpenMP threads wait. Torch-free: it has to be settled before torch is loaded."""

import os
import sys


def limit_spinning() -> None:
    """Let idle OpenMP threads go to sleep after a short spin, unless the user has said how they
    wait.

    They spin for long by default, which starves whatever they wait for as soon as another process
    wants a core: on two cores, ten steps of a small model took 24 s with the default, 11 s with
    this, and 3 s if they never spin; alone on the machine 2.1 s, 2.1 s and 3.4 s. Called by entry
    points, before torch is loaded.
    """
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "30000")
