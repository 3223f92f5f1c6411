"""Write a file that other processes never see in part."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give a path to write to, in the same folder. It becomes `path` at the end of the block.

    The folder is made if it is missing. After an error `path` is as it was before.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Processes of several machines, which may have equal ids, can share the folder.
    temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
