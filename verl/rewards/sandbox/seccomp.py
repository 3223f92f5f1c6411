"""Filter the system calls of this process for good (seccomp(2)).

This works without root and inside most containers. The filter is an allow-list (`syscalls`): any
other call fails, so new calls of a kernel are denied too. Some calls are allowed only with harmless
arguments; `_rules` lists them.
"""

import ctypes
import errno
import fcntl
import functools
import os
import platform
import struct
from typing import NamedTuple

from verl.rewards.sandbox import syscalls
from verl.rewards.sandbox.kernel import check, libc

# Arguments of prctl(2) and seccomp(2), constants of linux/{seccomp,filter,audit}.h
_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_MODE_FILTER = 2
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_SET_MODE_FILTER = 1
_NEW_LISTENER = 8
_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_NOTIFY = 0x7FC00000
_LOAD = 0x20
_AND = 0x54
_EQUAL = 0x15
_AT_LEAST = 0x35
_RETURN = 0x06
# offsets in struct seccomp_data
_NR = 0
_ARCH = 4
_ARGUMENTS = 16
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# A program sees no newer calls than this one, and falls back to older ones.
_LAST_KNOWN = 450
_ALL_BITS = 0xFFFFFFFF

_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_CLONE_THREAD = 0x10000
# The flags of clone in pthread_create of glibc and of musl: no new process, no new namespace.
_THREAD_FLAGS = (0x3D0F00, 0x7D0F00)
_MAP_HUGETLB = 0x40000
_AF_UNIX = 1
_SOCK_STREAM = 1
_SOCK_FLAGS = os.O_CLOEXEC | os.O_NONBLOCK
_O_ASYNC = 0x2000
_F_DUPFD_CLOEXEC = 1030
_F_GETPIPE_SZ = 1032
_F_OFD_GETLK = 36
_F_OFD_SETLK = 37
_F_OFD_SETLKW = 38
_FCNTL_HARMLESS = (
    fcntl.F_DUPFD,
    fcntl.F_GETFD,
    fcntl.F_SETFD,
    fcntl.F_GETFL,
    fcntl.F_GETLK,
    _F_OFD_GETLK,
    _F_DUPFD_CLOEXEC,
    _F_GETPIPE_SZ,
)
_FCNTL_LOCKS = (fcntl.F_SETLK, fcntl.F_SETLKW, _F_OFD_SETLK, _F_OFD_SETLKW)
# TCGETS (isatty), TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
_IOCTL_HARMLESS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# PR_GET_DUMPABLE, PR_SET_NAME, PR_GET_NAME, PR_CAPBSET_READ, PR_SET_VMA
_PRCTL_HARMLESS = (3, 15, 16, 23, 0x53564D41)


class _Test(NamedTuple):
    """A test that an argument's masked lower (`high`: upper) 32 bits are among `values`."""

    argument: int
    values: tuple[int, ...]
    mask: int = _ALL_BITS
    high: bool = False


class _Rule(NamedTuple):
    """The action for a call with these arguments. The first rule with all tests true decides."""

    call: str  # of `syscalls.RESTRICTED`
    tests: tuple[_Test, ...]
    action: int = _ALLOW


def is_supported() -> bool:
    """Return whether the filter exists for this machine. `install` raises if the kernel refuses."""
    return platform.system() == "Linux" and platform.machine() in _AUDIT_ARCH


def install(*, deny_writes: bool) -> None:
    """Filter the calls of this process from now on. Call this before a second thread starts.

    Args:
        deny_writes: refuse to open a file for writing, and to create, rename or delete one. Open
            files stay writable.

    Raises:
        OSError: the kernel refuses the filter.
    """
    forbid_new_privileges()
    machine = platform.machine()
    code = _own_process(machine, os.getpid()) + prepare(machine, deny_writes)
    program = _filter_program(code)
    check(libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, program, 0, 0), "prctl(PR_SET_SECCOMP)")


def listen_for_threads() -> int:
    """Make each start of a thread, here and in forks of this process, wait for permission.

    Returns:
        The file descriptor on which `threads` answers.

    Raises:
        OSError: the kernel does not support it (before Linux 5.5), or another supervisor listens.
    """
    forbid_new_privileges()
    machine = platform.machine()
    is_thread = _Test(0, (_CLONE_THREAD,), mask=_CLONE_THREAD)
    code = [
        *_machine_check(machine),
        *_steps(machine, [_Rule("clone", (is_thread,), _NOTIFY)]),
        _step(_RETURN, _ALLOW),
    ]
    program = _filter_program(b"".join(code))
    listener = libc.syscall(_SECCOMP[machine], _SET_MODE_FILTER, _NEW_LISTENER, program)
    check(listener, "seccomp(NEW_LISTENER)")
    return listener


def forbid_new_privileges() -> None:
    """Set no_new_privs, without which an unprivileged process may not restrict itself."""
    check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")


def _filter_program(code: bytes) -> ctypes.Array[ctypes.c_char]:
    """Return a struct sock_fprog, which keeps its code alive."""
    instructions = ctypes.create_string_buffer(code)
    program = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(instructions))
    )
    program.instructions = instructions  # pyright: ignore[reportAttributeAccessIssue]
    return program


def _own_process(machine: str, pid: int) -> bytes:
    """Return the first part of the filter: allow signals to, and limits of, this process only."""
    rules = [
        _Rule("prlimit64", (_Test(0, (0, pid)),)),
        _Rule("kill", (_Test(0, (pid,)),)),
        _Rule("tgkill", (_Test(0, (pid,)),)),
    ]
    return b"".join(_machine_check(machine) + _steps(machine, rules))


@functools.cache
def prepare(machine: str, deny_writes: bool) -> bytes:
    """Return the second part of the filter, the same for every process.

    The first call takes a millisecond.
    """
    allowed = {numbers.get(machine) for numbers in syscalls.ALLOWED.values()}
    writes = {numbers.get(machine) for numbers in syscalls.ALLOWED_WRITES.values()}
    actions = []
    for number in range(_LAST_KNOWN + 1):
        if number in allowed or (number in writes and not deny_writes):
            actions.append(_ALLOW)
        else:
            reason = errno.EACCES if number in writes else errno.EPERM
            actions.append(_error(reason))

    code = _steps(machine, _rules(deny_writes))
    # Neighboring numbers with one action share a step, because every call passes through here.
    for number in range(1, _LAST_KNOWN + 1):
        if actions[number] != actions[number - 1]:
            code += [_step(_AT_LEAST, number, 1, 0), _step(_RETURN, actions[number - 1])]
    code += [_step(_AT_LEAST, _LAST_KNOWN + 1, 1, 0), _step(_RETURN, actions[_LAST_KNOWN])]
    code.append(_step(_RETURN, _error(errno.ENOSYS)))
    return b"".join(code)


def _rules(deny_writes: bool) -> list[_Rule]:
    opening = (_Test(1, (0,), mask=_WRITE_FLAGS),) if deny_writes else ()
    opening_at = (_Test(2, (0,), mask=_WRITE_FLAGS),) if deny_writes else ()
    opening_error = _error(errno.EACCES)

    return [
        _Rule("openat", opening_at),
        _Rule("openat", (), opening_error),
        _Rule("open", opening),
        _Rule("open", (), opening_error),
        # The arguments are in memory, which a filter cannot read; libc falls back to older calls.
        _Rule("openat2", (), _error(errno.ENOSYS)),
        _Rule("clone3", (), _error(errno.ENOSYS)),
        _Rule("clone", (_Test(0, _THREAD_FLAGS),)),
        _Rule("clone", (), _error(errno.EAGAIN)),
        # Huge pages come from a pool of the whole machine.
        _Rule("mmap", (_Test(3, (0,), mask=_MAP_HUGETLB),)),
        # Owners, signals and leases of a file affect other processes.
        _Rule("fcntl", (_Test(1, _FCNTL_HARMLESS),)),
        _Rule("fcntl", (_Test(1, (fcntl.F_SETFL,)), _Test(2, (0,), mask=_O_ASYNC))),
        # A lock could block a user's file. No other process uses the program's own files, so every
        # lock reports success, and none is taken.
        _Rule("fcntl", (_Test(1, _FCNTL_LOCKS),), _error(0)),
        _Rule("flock", (), _error(0)),
        _Rule("ioctl", (_Test(1, _IOCTL_HARMLESS),)),
        _Rule("prctl", (_Test(0, _PRCTL_HARMLESS),)),
        # asyncio wakes its loop by a connected pair. A datagram socket could send to any address.
        _Rule(
            "socketpair",
            (_Test(0, (_AF_UNIX,)), _Test(1, (_SOCK_STREAM,), mask=_ALL_BITS & ~_SOCK_FLAGS)),
        ),
        _Rule("sendto", (_Test(4, (0,)), _Test(4, (0,), high=True))),
    ]


def _steps(machine: str, rules: list[_Rule]) -> list[bytes]:
    code = []
    for rule in rules:
        number = syscalls.RESTRICTED[rule.call].get(machine)
        if number is not None:
            code += _rule(number, rule)
    return code


def _machine_check(machine: str) -> list[bytes]:
    """Deny calls in another machine's numbering (32 bit), then load the number of the call."""
    return [
        _step(_LOAD, _ARCH),
        _step(_EQUAL, _AUDIT_ARCH[machine], 1, 0),
        _step(_RETURN, _error(errno.EPERM)),
        _step(_LOAD, _NR),
    ]


def _rule(number: int, rule: _Rule) -> list[bytes]:
    """Return the steps of one rule. If it does not apply, they leave the call's number loaded."""
    sizes = [2 + len(test.values) for test in rule.tests]
    length = sum(sizes) + 2  # with the action, and the number loaded again
    code = [_step(_EQUAL, number, 0, length)]

    for test in rule.tests:
        half = 4 if test.high else 0
        code.append(_step(_LOAD, _ARGUMENTS + 8 * test.argument + half))
        code.append(_step(_AND, test.mask))
        for left, value in zip(range(len(test.values) - 1, -1, -1), test.values):
            rest = length - len(code)  # steps from this one to the one that loads the number
            otherwise = 0 if left else rest - 1
            code.append(_step(_EQUAL, value, left, otherwise))

    code.append(_step(_RETURN, rule.action))
    code.append(_step(_LOAD, _NR))
    return code


def _step(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", operation, if_true, if_false, value)


def _error(number: int) -> int:
    return _ERRNO | number
