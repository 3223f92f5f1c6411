"""A limit on the threads of a program, for every user including root.

RLIMIT_NPROC does not apply to root and counts the user's other processes, and few containers allow
control groups. Therefore the kernel asks the server before it starts a thread (seccomp's user
notification), and the server counts the living threads.
"""

import errno
import fcntl
import os
import struct

from verl.rewards.sandbox import seccomp

MAX_THREADS = 128
# ioctl numbers and structures of linux/seccomp.h
_RECEIVE = 0xC0502100
_SEND = 0xC0182101
_NOTIFICATION_BYTES = 80
_CONTINUE = 1


class ThreadLimit:
    """Counts the threads of one process at a time, and refuses those beyond MAX_THREADS.

    Attributes:
        listener: the file descriptor on which the kernel announces starts of threads; None if it
            does not. Then `is_exceeded` must be called every few milliseconds.
        reason: the reason for a missing listener.
    """

    def __init__(self, proc: int) -> None:
        """Start to listen.

        Args:
            proc: file descriptor of a /proc, which may belong to other namespaces.
        """
        self._proc = proc
        self.listener: int | None = None
        self.reason = ""
        try:
            self.listener = seccomp.listen_for_threads()
        except OSError as error:
            self.reason = str(error)

    def answer(self, child: int) -> None:
        """Let the waiting thread start, or make its start fail with EAGAIN."""
        assert self.listener is not None
        notification = bytearray(_NOTIFICATION_BYTES)
        try:
            fcntl.ioctl(self.listener, _RECEIVE, notification)
            number = struct.unpack_from("=Q", notification)[0]
            if self.is_exceeded(child, starting=1):
                answer = struct.pack("=QqiI", number, 0, -errno.EAGAIN, 0)
            else:
                answer = struct.pack("=QqiI", number, 0, 0, _CONTINUE)
            fcntl.ioctl(self.listener, _SEND, answer)
        except OSError as error:
            if error.errno != errno.ENOENT:  # killed while it waited
                raise

    def is_exceeded(self, child: int, starting: int = 0) -> bool:
        """Return whether a child has too many threads, those that wait to start included."""
        return self._count(child) + starting > MAX_THREADS

    def _count(self, child: int) -> int:
        """Count the living threads of a child; 0 when it has ended."""
        try:
            handle = os.pidfd_open(child)
        except ProcessLookupError:
            return 0

        try:
            # The child's number in this /proc, which may differ from the one in our namespace.
            with open(f"self/fdinfo/{handle}", opener=self._open) as lines:
                fields = dict(line.split(":", 1) for line in lines)
            number = int(fields["Pid"])
            if number <= 0:  # ended
                return 0
            return os.stat(f"{number}/task", dir_fd=self._proc).st_nlink - 2
        except FileNotFoundError:
            return MAX_THREADS  # hidden from us (hidepid): no thread may start
        finally:
            os.close(handle)

    def _open(self, path: str, flags: int) -> int:
        return os.open(path, flags, dir_fd=self._proc)
