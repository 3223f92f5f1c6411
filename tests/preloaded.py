"""Import the modules of all programs, for a process that forks."""

import importlib

from tests.launches import PROGRAMS
from verl.utils.garbage import loading_packages

# Forks share these objects: no collector of theirs scans and so copies them.
with loading_packages():
    for module in PROGRAMS:
        importlib.import_module(module)
