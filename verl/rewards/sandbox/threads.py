"""A limit on the threads of a program that holds for every user, root included.

RLIMIT_NPROC does not bind root and counts the user's other processes, and few containers hand out
control groups. So the kernel asks the server before it starts a thread (seccomp's user
notification), and the server counts those that live.
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
        listener: the file descriptor on which starts of threads are announced; None where the
            kernel does not announce them. Then `is_exceeded` must be asked every few milliseconds.
        reason: why there is no listener.
    """

    def __init__(self, proc: int) -> None:
        """Listen from now on.

        Args:
            proc: file descriptor of a /proc; it may be that of other namespaces.
        """
        self._proc = proc
        self.listener: int | None = None
        self.reason = ""
        try:
            self.listener = seccomp.listen_for_threads()
        except OSError as error:
            self.reason = str(error)

    def answer(self, child: int) -> None:
        """Let the thread that waits start, or have its start fail with EAGAIN."""
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
        return self._count(child) + starting > MAX_THREADS

    def _count(self, child: int) -> int:
        """Count the living threads of a child; 0 when it has ended."""
        try:
            handle = os.pidfd_open(child)
        except ProcessLookupError:
            return 0

        try:
            # The number that the child has in this /proc, which may differ from the one we know.
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
