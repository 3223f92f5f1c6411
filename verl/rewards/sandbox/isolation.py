"""Namespaces for the server: its own file system, no network, no access to other processes.

They need Linux, but not root. The new file system holds the system's libraries and Python,
read-only, without the user's home, data and secrets. Every run gets an empty folder in memory.
"""

import ctypes
import os
import platform
import sys
from pathlib import Path

from verl.rewards.sandbox.kernel import check, libc

# linux/sched.h, sys/mount.h, linux/mount.h, sys/prctl.h, linux/capability.h
# user ns net pid ipc uts
_NEW_NAMESPACES = 0x10000000 | 0x20000 | 0x40000000 | 0x20000000 | 0x8000000 | 0x4000000
_MS_NOSUID = 2
_MS_NODEV = 4
_MS_BIND = 4096
_MS_REC = 16384
_MS_PRIVATE = 1 << 18
_MNT_DETACH = 2
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_ATTR_RDONLY = 1
_ATTR_NOSUID = 2
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_SIGKILL = 9
_CAPABILITY_VERSION_3 = 0x20080522
_MOUNT_SETATTR = 442  # the same number on all machines
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

# The new root is built here: a folder that every Linux has, and that the new root does not need.
_BUILDING_SITE = "/proc"
_SYSTEM_FOLDERS = ("/usr", "/bin", "/lib", "/lib32", "/lib64")
_SYSTEM_FILES = (
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/dev/null",
    "/dev/zero",
    "/dev/random",
    "/dev/urandom",
)
_SCRATCH = "/tmp"
_OTHER_SCRATCH = "/scratch"
SCRATCH_BYTES = 16 * 2**20
SCRATCH_FILES = 256


def enter() -> str:
    """Continue in new namespaces as their process 1, while the calling process waits for it.

    Returns:
        The folder for `mount_scratch`.

    Raises:
        OSError: the kernel, or the container around us, does not allow it. The process must then
            end.
    """
    uid = os.getuid()
    gid = os.getgid()
    check(libc.unshare(_NEW_NAMESPACES), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    child = os.fork()
    if child:
        os.closerange(0, 2)  # they belong to the child only, so that they close when it ends
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    die_with_parent()
    return _build_root()


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends for any reason."""
    check(libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")


def mount_scratch(folder: str) -> None:
    """Mount an empty file system in memory, of at most SCRATCH_BYTES and SCRATCH_FILES."""
    options = f"size={SCRATCH_BYTES},nr_inodes={SCRATCH_FILES},mode=0700"
    _mount("tmpfs", folder, "tmpfs", _MS_NOSUID | _MS_NODEV, options)


def unmount_scratch(folder: str) -> None:
    """Undo `mount_scratch`: the files of the run are gone."""
    check(libc.umount2(folder.encode(), _MNT_DETACH), "umount2")


def drop_capabilities() -> None:
    """Drop every privilege for good: no program that could restore one is executed after this."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    check(libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")


def forbid_dumps() -> None:
    """Forbid core dumps of this process, and access by other processes of the same user.

    A handler of the machine would otherwise run on a crash and store the dump.
    """
    check(libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl(PR_SET_DUMPABLE)")


def readable_paths() -> list[str]:
    """List the folders and files that a program may read: Python and the system's libraries."""
    return [*_SYSTEM_FOLDERS, *_python_folders(), *_SYSTEM_FILES]


def _build_root() -> str:
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", _BUILDING_SITE, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=0755")
    folders = _take_over_folders()
    _take_over_files()
    scratch = _SCRATCH
    if any(_lies_in(folder, _SCRATCH) for folder in folders):
        scratch = _OTHER_SCRATCH  # the usual one would hide this Python
    os.makedirs(_BUILDING_SITE + scratch)

    os.chdir(_BUILDING_SITE)
    # The old root is now on top of the new one; unmount it.
    check(libc.syscall(_PIVOT_ROOT[platform.machine()], b".", b"."), "pivot_root")
    check(libc.umount2(b".", _MNT_DETACH), "umount2")
    os.chdir("/")
    _set_read_only("/", recursive=False)
    return scratch


def _take_over_folders() -> list[str]:
    """Mount the system's and Python's folders in the new root, and return the mounted ones."""
    taken: list[str] = []
    for folder in (*_SYSTEM_FOLDERS, *_python_folders()):
        if not os.path.isdir(folder) or any(_lies_in(folder, one) for one in taken):
            continue
        if os.path.islink(folder) and folder in _SYSTEM_FOLDERS:
            os.symlink(os.readlink(folder), _BUILDING_SITE + folder)
            continue
        taken.append(folder)
        os.makedirs(_BUILDING_SITE + folder, exist_ok=True)
        _mount(folder, _BUILDING_SITE + folder, None, _MS_BIND | _MS_REC)
        _set_read_only(_BUILDING_SITE + folder)
    return taken


def _take_over_files() -> None:
    for file in filter(os.path.exists, _SYSTEM_FILES):
        target = Path(_BUILDING_SITE + file)
        target.parent.mkdir(exist_ok=True)
        target.touch()
        _mount(file, str(target), None, _MS_BIND)
        # A device can still be written to, but its owner, root, cannot change its mode.
        _set_read_only(str(target))


def _lies_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


def _python_folders() -> list[str]:
    """Return the folders of this Python and its packages, also with links resolved, short first."""
    # Only folders of packages in the search path: a source tree may be in the user's data folder.
    packages = (path for path in sys.path if path.endswith(("site-packages", "dist-packages")))
    named = {sys.prefix, sys.base_prefix, sys.exec_prefix, *filter(os.path.isabs, packages)}
    folders = named | {os.path.realpath(folder) for folder in named}
    return sorted(folders - {"/"}, key=len)


def _set_read_only(path: str, recursive: bool = True) -> None:
    attributes = (ctypes.c_uint64 * 4)(_ATTR_RDONLY | _ATTR_NOSUID, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    status = libc.syscall(
        _MOUNT_SETATTR,
        _AT_FDCWD,
        path.encode(),
        flags,
        ctypes.byref(attributes),
        ctypes.sizeof(attributes),
    )
    check(status, f"mount_setattr {path}")


def _mount(
    source: str | None, target: str, kind: str | None, flags: int, options: str | None = None
) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind)]
    data = options.encode() if options else None
    check(libc.mount(*texts, ctypes.c_ulong(flags), data), f"mount {target}")
