"""Commands that the log suggests to type."""

import os
import shlex
import shutil
import sys
from contextlib import suppress
from pathlib import Path


def verl_command(*words: object) -> str:
    """Return a command of `verl` as the user's shell finds it.

    In an environment that is not activated (`make quickstart`) the program needs its path.
    """
    program = Path(sys.executable).with_name("verl")
    on_path = shutil.which("verl")
    is_found = on_path is not None and Path(on_path).parent == program.parent
    if is_found or not program.is_file():
        return shlex.join(["verl", *map(str, words)])

    shortest = str(program)
    with suppress(FileNotFoundError):  # the working directory was removed
        relative = os.path.relpath(program)
        if not relative.startswith(os.pardir):
            shortest = relative
    return shlex.join([shortest, *map(str, words)])
