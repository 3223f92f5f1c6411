"""A filter of system calls for this process, for good (seccomp(2)). Works without root and inside
most containers.

Denied are those that reach beyond the process and need no privilege: sockets, new processes and
programs, signals and limits of others, objects that outlive it, and parts of the kernel that
untrusted code has no business with. Everything that needs a capability fails already, because a run
has none.
"""

import ctypes
import errno
import os
import platform
import struct

# Arguments of prctl(2) and constants of linux/{seccomp,filter,audit}.h
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _MODE_FILTER = 22, 38, 2
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_LOAD, _EQUAL, _GREATER, _ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_NR, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Newer calls than this are unknown to the table below; a program falls back on older ones when they
# do not exist.
_LAST_KNOWN = 450
_CLONE_THREAD = 0x10000
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

# Number on (x86_64, aarch64); None where the machine has no such call.
_DENIED = {
    # network, and the ring through which it could be asked for
    "socket": (41, 198),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    # processes and programs; threads come by clone
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "unshare": (272, 97),
    "setns": (308, 268),
    # other processes
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "kcmp": (312, 272),
    "setpriority": (141, 140),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "ioprio_set": (251, 30),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # objects that outlive the process, or that others have made, and memory that no limit counts
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "semget": (64, 190),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "semctl": (66, 191),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    # parts of the kernel with a record of holes
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "fanotify_init": (300, 262),
    "personality": (135, 92),
}
_DENIED_WRITES = {
    "creat": (85, None),
    "truncate": (76, 45),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "rmdir": (84, None),
    "link": (86, None),
    "linkat": (265, 37),
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "chown": (92, None),
    "lchown": (94, None),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "utimensat": (280, 88),
    "futimesat": (261, None),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
}
_CLONE, _CLONE3 = (56, 220), (435, 435)
_KILL, _TGKILL, _PRLIMIT = (62, 129), (234, 131), (302, 261)
_OPEN, _OPENAT, _OPENAT2 = (2, None), (257, 56), (437, 437)


def is_supported() -> bool:
    """Whether this machine has a table here. Whether its kernel takes the filter, `install` finds
    out."""
    return platform.system() == "Linux" and platform.machine() in _AUDIT_ARCH


def install(*, deny_writes: bool) -> None:
    """Filter the calls of this process from now on. Only before a second thread starts.

    Args:
        deny_writes: refuse to open any file for writing, to make, rename or delete one; what is
            open stays writable.

    Raises:
        OSError: the kernel does not take it.
    """
    program = _program(platform.machine(), os.getpid(), deny_writes)
    code = ctypes.create_string_buffer(program)
    prog = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    )
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        _PR_SET_SECCOMP, _MODE_FILTER, prog, 0, 0
    ):
        raise OSError(
            ctypes.get_errno(), f"prctl(PR_SET_SECCOMP): {os.strerror(ctypes.get_errno())}"
        )


def _program(machine: str, pid: int, deny_writes: bool) -> bytes:
    column = list(_AUDIT_ARCH).index(machine)
    code = [
        # A call by another machine's numbers (32 bit) would mean something else.
        _step(_LOAD, _ARCH),
        _step(_EQUAL, _AUDIT_ARCH[machine], 1, 0),
        _deny(errno.EPERM),
        _step(_LOAD, _NR),
        _step(_GREATER, _LAST_KNOWN, 0, 1),
        _deny(errno.ENOSYS),
    ]

    def always(numbers: tuple[int | None, ...], error: int) -> None:
        if (number := numbers[column]) is not None:
            code.extend([_step(_EQUAL, number, 0, 1), _deny(error)])

    def unless(
        numbers: tuple[int | None, ...], argument: int, test: int, value: int, error: int
    ) -> None:
        """Deny when the test of one argument (its low 32 bits) fails."""
        if (number := numbers[column]) is not None:
            check = [
                _step(_LOAD, _ARGUMENTS + 8 * argument),
                _step(test, value, 1, 0),
                _deny(error),
                _step(_LOAD, _NR),
            ]
            code.extend([_step(_EQUAL, number, 0, len(check)), *check])

    for numbers in _DENIED.values():
        always(numbers, errno.EPERM)
    unless(_CLONE, 0, _ANY_BIT, _CLONE_THREAD, errno.EAGAIN)
    # its flags lie in memory, where no filter sees them; libc then takes clone
    always(_CLONE3, errno.ENOSYS)
    unless(_KILL, 0, _EQUAL, pid, errno.EPERM)
    unless(_TGKILL, 0, _EQUAL, pid, errno.EPERM)
    unless(_PRLIMIT, 0, _EQUAL, 0, errno.EPERM)
    if deny_writes:
        for numbers in _DENIED_WRITES.values():
            always(numbers, errno.EACCES)
        for numbers, argument in ((_OPEN, 1), (_OPENAT, 2)):
            # The other way round than `unless`: denied when a bit is set.
            if (number := numbers[column]) is not None:
                check = [
                    _step(_LOAD, _ARGUMENTS + 8 * argument),
                    _step(_ANY_BIT, _WRITE_FLAGS, 0, 1),
                ]
                code.extend(
                    [_step(_EQUAL, number, 0, 4), *check, _deny(errno.EACCES), _step(_LOAD, _NR)]
                )
        always(_OPENAT2, errno.ENOSYS)
    code.append(_step(_RETURN, _ALLOW))
    return b"".join(code)


def _step(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", operation, if_true, if_false, value)


def _deny(error: int) -> bytes:
    return _step(_RETURN, _ERRNO | error)
