"""Pause Python's garbage collector."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def not_collecting() -> Iterator[None]:
    """Disable the garbage collector within this context."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def loading_packages() -> Iterator[None]:
    """Exempt the objects of an entry point's imports from garbage collection.

    Modules live until the process exits. The collector would scan them repeatedly and free nothing,
    which costs a fifth of the time of a run of one toy step. Do not call this from a library: it
    exempts all other existing objects as well.
    """
    with not_collecting():
        yield
        gc.freeze()
