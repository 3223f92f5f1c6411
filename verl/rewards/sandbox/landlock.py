"""Confine a process to some folders, without root (landlock(7), Linux 5.13 and later).

Without a file system of its own, a program could read the user's files, and the memory and the
environment of the user's processes under /proc. Landlock prevents that.
"""

import ctypes
import os
import struct

from verl.rewards.sandbox import seccomp
from verl.rewards.sandbox.kernel import check, libc

# linux/landlock.h; the same numbers on all machines
_CREATE_RULESET = 444
_ADD_RULE = 445
_RESTRICT_SELF = 446
_GET_VERSION = 1
_RULE_PATH_BENEATH = 1
_READ_FILE = 1 << 2
_READ_DIR = 1 << 3
# Numbers of the file accesses that each version of the interface can deny, and the versions that
# added the network and the scopes (abstract sockets, signals).
_FILE_ACCESSES = {1: 13, 2: 14, 3: 15, 5: 16}
_NETWORK_SINCE = 4
_BIND_AND_CONNECT = 3
_SCOPES_SINCE = 6
_SOCKETS_AND_SIGNALS = 3


def version() -> int:
    """Return the version of Landlock that this kernel offers; 0 if it has none."""
    return max(libc.syscall(_CREATE_RULESET, None, 0, _GET_VERSION), 0)


def readable(paths: list[str]) -> int | None:
    """Prepare a confinement in which only these folders and files can be read, and none written.

    Returns:
        A file descriptor for `confine`, or None if the kernel has no Landlock.

    Raises:
        OSError: the kernel has Landlock and refuses the rules.
    """
    kernel = version()
    if kernel == 0:
        return None
    bits = max(count for since, count in _FILE_ACCESSES.items() if since <= kernel)
    files = (1 << bits) - 1
    network = _BIND_AND_CONNECT if kernel >= _NETWORK_SINCE else 0
    scopes = _SOCKETS_AND_SIGNALS if kernel >= _SCOPES_SINCE else 0

    attributes = struct.pack("QQQ", files, network, scopes)
    if kernel < _SCOPES_SINCE:
        attributes = attributes[: 16 if kernel >= _NETWORK_SINCE else 8]
    ruleset = libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    check(ruleset, "landlock_create_ruleset")
    for path in paths:
        _allow(ruleset, path)
    return ruleset


def confine(ruleset: int) -> None:
    """Confine this process and its children for good."""
    seccomp.forbid_new_privileges()
    check(libc.syscall(_RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")


def _allow(ruleset: int, path: str) -> None:
    try:
        target = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):
        return  # the program could not read it either
    access = _READ_FILE | _READ_DIR if os.path.isdir(path) else _READ_FILE
    rule = struct.pack("=Qi", access, target)
    try:
        check(
            libc.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, 0), f"landlock rule {path}"
        )
    finally:
        os.close(target)
