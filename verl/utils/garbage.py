"""Pause Python's garbage collector, and act when it collects an object."""

import atexit
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def finalize(thing: object, action: Callable[..., object], *arguments: Any) -> weakref.finalize:
    """Call `action` when `thing` is collected, or else when this process exits.

    Python 3.13 skips `weakref.finalize` at the exit of a child of multiprocessing.
    """
    finalizer = weakref.finalize(thing, action, *arguments)
    atexit.register(finalizer)
    return finalizer


def free_memory() -> None:
    """Collect objects that refer to each other, and return unused device memory to the system."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


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
