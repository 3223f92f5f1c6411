"""Calls of the C library that Python does not offer, with their errors as OSError."""

import ctypes
import errno
import os

libc = ctypes.CDLL(None, use_errno=True)


def check(status: int, call: str) -> None:
    """Raise OSError, which names the call, if a call of the C library has failed."""
    if status < 0:
        number = ctypes.get_errno() or errno.EINVAL
        raise OSError(number, f"{call}: {os.strerror(number)}")
