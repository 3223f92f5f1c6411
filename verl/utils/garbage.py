"""When Python's garbage collector waits."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def not_collecting() -> Iterator[None]:
    """A context in which nothing is collected."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def loading_packages() -> Iterator[None]:
    """A context for the imports of an entry point, which later collections pass over.

    What packages are made of stays to the end. The collector would walk through all of it again and
    again, while they load, later and at the exit, and free nothing: a fifth of a run of one toy
    step. Not for a library: it passes over what else is there too.
    """
    with not_collecting():
        yield
        gc.freeze()
