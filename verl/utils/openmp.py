"""How OpenMP threads wait. Torch-free: it has to be settled before torch is loaded."""

import os
import sys


def wait_passively() -> None:
    """Let idle OpenMP threads sleep instead of spin, unless the user has set OMP_WAIT_POLICY.

    By default they spin at every barrier. With one other process on two cores, ten steps of the toy task took 24 s
    spinning and 3 s sleeping. Called by entry points, before torch.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
