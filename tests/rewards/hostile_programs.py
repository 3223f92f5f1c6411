"""Short programs that try to do harm, and the trainer that they attack.

Run as a script, this file is the trainer: it scores each program in one sandbox, and prints as JSON
which resources the program reached. It runs as any user, so it imports little.
"""

import hashlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SECRET = "hunter2-" + "x" * 8
MARK = "hostile-mark"

# Preamble of each program. `attempt` reports a call that succeeded, `raw` makes a system call by
# name, `denied` reports one that was not refused.
PRELUDE = """
import ctypes, errno, fcntl, os, platform, resource, signal, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
COLUMN = ["x86_64", "aarch64"].index(platform.machine())
NUMBERS = {
    "clone": (56, 220), "fork": (57, None), "vfork": (58, None), "clone3": (435, 435),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "io_uring_setup": (425, 425), "userfaultfd": (323, 282), "bpf": (321, 280),
    "keyctl": (250, 219), "add_key": (248, 217), "perf_event_open": (298, 241),
    "memfd_create": (319, 279), "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186),
    "mq_open": (240, 180), "inotify_init1": (294, 26), "fanotify_init": (300, 262),
    "signalfd4": (289, 74), "timer_create": (222, 107), "io_setup": (206, 0),
    "prlimit64": (302, 261), "setpriority": (141, 140), "ioprio_set": (251, 30),
    "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119), "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438), "kcmp": (312, 272), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97), "setns": (308, 268),
    "open_tree": (428, 428), "fsopen": (430, 430), "init_module": (175, 105),
    "kexec_load": (246, 104), "reboot": (169, 142), "syslog": (103, 116), "sync": (162, 81),
    "personality": (135, 92), "setsid": (112, 157), "setpgid": (109, 154), "acct": (163, 89),
    "swapon": (167, 224), "quotactl": (179, 60), "sethostname": (170, 161),
    "settimeofday": (164, 170), "name_to_handle_at": (303, 264), "rt_tgsigqueueinfo": (297, 240),
    "tkill": (200, 130), "vmsplice": (278, 75), "splice": (275, 76), "mlockall": (151, 230),
    "landlock_create_ruleset": (444, 444), "seccomp": (317, 277), "socket": (41, 198),
    "execveat": (322, 281), "membarrier": (324, 283), "get_robust_list": (274, 100),
    "process_madvise": (440, 440), "move_pages": (279, 239), "futex_requeue": (456, 456),
    "setuid": (105, 146), "setgroups": (116, 159), "capset": (126, 91), "socketpair": (53, 199),
}

def escaped(how):
    os.write(1, f"ESCAPED {how}\\n".encode())

def attempt(action, how=""):
    try:
        result = action()
    except (OSError, ValueError, RuntimeError, MemoryError, ImportError, AttributeError):
        return None
    escaped(how or action.__code__.co_names)
    return result

def raw(name, *arguments):
    number = NUMBERS[name][COLUMN]
    if number is None:
        return -1
    return libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments))

def denied(name, *arguments):
    if raw(name, *arguments) >= 0:
        escaped(name)
"""

# Name -> program. Programs that only the time limit ends are listed in ENDLESS too.
PROGRAMS = {
    # signals
    "kill the trainer": "for n in (0, 9, 15): attempt(lambda: os.kill(TRAINER, n))",
    "kill the server": "attempt(lambda: os.kill(os.getppid(), 9))",
    "kill everybody": "attempt(lambda: os.kill(-1, 9))",
    "kill the group": "attempt(lambda: os.killpg(0, 9)); attempt(lambda: os.kill(0, 9))",
    "kill by threads": "denied('tkill', VICTIM, 9); denied('rt_tgsigqueueinfo', VICTIM, VICTIM, 9)",
    "kill through a pipe's owner": """
r, w = os.pipe()
attempt(lambda: fcntl.fcntl(r, fcntl.F_SETOWN, VICTIM))
attempt(lambda: fcntl.fcntl(r, 10, 9))
attempt(lambda: fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK))
os.write(w, b"x")
""",
    "kill through F_SETOWN_EX": """
r, w = os.pipe()
attempt(lambda: fcntl.fcntl(r, 15, struct.pack("ii", 1, VICTIM)))
attempt(lambda: fcntl.ioctl(r, 0x5452, struct.pack("i", 1)))
os.write(w, b"x")
""",
    "kill through a socket's owner": """
a, b = socket.socketpair()
attempt(lambda: fcntl.ioctl(a, 0x8901, struct.pack("i", VICTIM)))
attempt(lambda: fcntl.ioctl(a, 0x8902, struct.pack("i", VICTIM)))
""",
    "kill through a pidfd": """
attempt(lambda: os.pidfd_open(VICTIM))
denied('pidfd_open', VICTIM, 0)
""",
    "signals at a distance": "denied('timer_create', 0, 0, 0); denied('signalfd4', -1, 0, 8, 0)",
    # reading other processes
    "trainer's environment": "print(open(f'/proc/{TRAINER}/environ').read())",
    "trainer's memory": "attempt(lambda: open(f'/proc/{TRAINER}/mem', 'rb'))",
    "trainer's files": "attempt(lambda: os.listdir(f'/proc/{TRAINER}/fd'))",
    "trainer's file by link": "attempt(lambda: open(f'/proc/{TRAINER}/fd/' + SECRET_FD).read())",
    "trainer's root": "print(open(f'/proc/{TRAINER}/root' + FOLDER + '/secret').read())",
    "trainer's maps": "attempt(lambda: open(f'/proc/{TRAINER}/maps').read())",
    "victim by ptrace": """
denied('ptrace', 16, VICTIM, 0, 0)
denied('ptrace', 0x4206, VICTIM, 0, 0)
""",
    "server by ptrace": "denied('ptrace', 16, os.getppid(), 0, 0)",
    "memory of others": """
buffer = ctypes.create_string_buffer(64)
vector = struct.pack("QQ", ctypes.addressof(buffer), 8)
where = ctypes.create_string_buffer(vector)
for pid in (TRAINER, VICTIM, os.getppid()):
    denied('process_vm_readv', pid, ctypes.addressof(where), 1, ctypes.addressof(where), 1, 0)
    denied('process_vm_writev', pid, ctypes.addressof(where), 1, ctypes.addressof(where), 1, 0)
""",
    "descriptors of others": """
denied('pidfd_getfd', 0, 0, 0)
denied('kcmp', TRAINER, VICTIM, 0, 0, 0)
""",
    "user's files": "print(open(FOLDER + '/secret').read())",
    "list the user's files": "print('ESCAPED' if os.listdir(FOLDER) else '')",
    "files by handle": "denied('name_to_handle_at', -100, 0, 0, 0, 0)",
    "passwords": """
attempt(lambda: open('/etc/shadow').read())
attempt(lambda: open('/etc/passwd').read())
""",
    "own environment": "print(os.environ, open('/proc/self/environ').read())",
    "inherited descriptors": """
for fd in range(4, 4096):
    attempt(lambda: os.fstat(fd))
""",
    # processes
    "fork": "attempt(os.fork, 'fork')",
    "raw forks": """
for name in ("fork", "vfork"):
    denied(name)
for flags in (17, 0x11 | 0x100, 0x11 | 0x4000, 0x4100, 0x00800000 | 17, 0x8000 | 17, 0):
    if raw("clone", flags, 0, 0, 0, 0) > 0:
        escaped("clone")
denied("clone3", 0, 88)
""",
    "programs": "import subprocess\nattempt(lambda: subprocess.run(['true']), 'run')",
    "replace itself": """
attempt(lambda: os.execv('/bin/true', ['true']))
denied('execveat', -100, 0, 0, 0, 0)
""",
    "LD_PRELOAD": """
os.environ["LD_PRELOAD"] = "/tmp/x.so"
attempt(lambda: os.posix_spawn("/bin/true", ["true"], os.environ), "spawn")
""",
    "processes pool": """
import multiprocessing as m
attempt(lambda: m.Process(target=print).start(), 'start')
""",
    "Python thread bomb": """
threading.stack_size(1 << 16)
gate, n = threading.Event(), 0
while n < 600:
    try:
        threading.Thread(target=gate.wait, daemon=True).start()
        n += 1
    except RuntimeError:
        break
if n > 300:
    escaped(f"{n} threads")
os._exit(0)
""",
    "raw clone of threads": """
import mmap
stack = mmap.mmap(-1, 1 << 16)
base = ctypes.addressof(ctypes.c_char.from_buffer(stack))
slept = ctypes.cast(libc.pause, ctypes.c_void_p).value
clone = libc.clone
n = 0
for i in range(2000):
    top = base + (1 << 16) - 16
    if clone(ctypes.c_void_p(slept), ctypes.c_void_p(top), 0x10D00 | 0x400 | 0x200, None) < 0:
        break
    n += 1
flags = 0x3D0F00
words = (ctypes.c_int * 2)()
for i in range(2000):
    top = base + (1 << 16) - 16
    tid = clone(ctypes.c_void_p(slept), ctypes.c_void_p(top), flags, None,
                ctypes.byref(words), ctypes.c_void_p(base), ctypes.byref(words, 4))
    if tid < 0:
        break
    n += 1
if n > 300:
    escaped(f"{n} threads")
os._exit(0)
""",
    "new session": """
attempt(os.setsid, 'setsid')
denied('setsid')
attempt(lambda: os.setpgid(0, 0))
""",
    "outlive the trainer": """
for option in (1, 4, 22, 36, 38, 0x59616D61):
    if libc.prctl(option, 0, 0, 0, 0) == 0:
        escaped(f"prctl {option}")
""",
    "patient fork bomb": "while True:\n    try: os.fork()\n    except OSError: pass",
    # priorities and limits of other processes
    "limits of others": """
attempt(lambda: resource.prlimit(VICTIM, resource.RLIMIT_CPU, (1, 1)))
attempt(lambda: resource.prlimit(TRAINER, resource.RLIMIT_NOFILE))
""",
    "own limits": """
attempt(lambda: resource.setrlimit(resource.RLIMIT_AS, (-1, -1)))
attempt(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096)))
""",
    "priority of others": """
attempt(lambda: os.setpriority(os.PRIO_PROCESS, VICTIM, 19))
attempt(lambda: os.setpriority(os.PRIO_USER, 0, 19))
""",
    "schedule of others": """
attempt(lambda: os.sched_setaffinity(VICTIM, {0}))
denied('ioprio_set', 1, VICTIM, 0x6000)
denied('sched_setscheduler', VICTIM, 5, 0)
""",
    "pages of others": """
denied('move_pages', VICTIM, 0, 0, 0, 0, 0)
denied('process_madvise', 0, 0, 0, 4, 0)
""",
    # network
    "sockets of every family": """
for family in range(46):
    for kind in (1, 2, 3, 5):
        denied('socket', family, kind, 0)
""",
    "stores on loopback": """
attempt(lambda: socket.create_connection(('127.0.0.1', PORT)), 'connect')
""",
    "abstract socket": """
attempt(lambda: socket.socket(socket.AF_UNIX).connect(ABSTRACT), 'connect')
""",
    "datagram pairs": """
attempt(lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM), 'datagrams')
attempt(lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET), 'packets')
attempt(lambda: socket.socketpair(16, socket.SOCK_RAW), 'netlink')
a, b = socket.socketpair()
attempt(lambda: a.bind(FOLDER + '/hostile-socket'), 'bind')
attempt(lambda: a.bind('\\0hostile'), 'bind')
attempt(lambda: a.connect(DATAGRAMS), 'connect')
attempt(lambda: a.sendto(b'x', DATAGRAMS), 'sendto')
attempt(lambda: a.sendmsg([b'x'], [], 0, DATAGRAMS), 'sendmsg')
attempt(lambda: a.sendmsg([b'x']), 'sendmsg')
attempt(lambda: a.listen(), 'listen')
""",
    "datagrams through descriptors": """
a, b = socket.socketpair()
attempt(lambda: socket.send_fds(a, [b'x'], [1]), 'send_fds')
attempt(lambda: a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24), 'setsockopt')
""",
    # parts of the kernel
    "io_uring": "denied('io_uring_setup', 8, ctypes.addressof(ctypes.create_string_buffer(256)))",
    "userfaultfd": "denied('userfaultfd', 1)",
    "bpf": "denied('bpf', 0, ctypes.addressof(ctypes.create_string_buffer(128)), 128)",
    "perf": """
denied('perf_event_open', ctypes.addressof(ctypes.create_string_buffer(128)), 0, -1, -1, 0)
""",
    "keys": "denied('keyctl', 0, -4, 1); denied('add_key', 0, 0, 0, 0, -4)",
    "asynchronous I/O": "c = ctypes.c_ulong(0); denied('io_setup', 65536, ctypes.addressof(c))",
    "watches": "denied('inotify_init1', 0); denied('fanotify_init', 0, 0)",
    "namespaces": """
for flags in (0x10000000, 0x20000, 0x40000000, 0x10000000 | 0x20000000):
    denied('unshare', flags)
denied('setns', 0, 0)
""",
    "mounts": """
name = ctypes.create_string_buffer(b'/tmp')
denied('mount', ctypes.addressof(name), ctypes.addressof(name), 0, 4096, 0)
denied('umount2', ctypes.addressof(name), 2)
denied('pivot_root', ctypes.addressof(name), ctypes.addressof(name))
denied('chroot', ctypes.addressof(name))
denied('open_tree', -100, ctypes.addressof(name), 1)
denied('fsopen', ctypes.addressof(name), 0)
""",
    "the machine": """
for name in ("init_module", "kexec_load", "reboot", "acct", "swapon", "sethostname",
             "settimeofday", "syslog", "sync", "quotactl"):
    denied(name, 0, 0, 0, 0)
""",
    "identities": "denied('setuid', 0); denied('setgroups', 0, 0); denied('personality', 0x40000)",
    "own privileges": """
header = struct.pack("Ii", 0x20080522, 0)
data = struct.pack("IIIIII", *[0xFFFFFFFF] * 6)
h, d = ctypes.create_string_buffer(header), ctypes.create_string_buffer(data)
denied('capset', ctypes.addressof(h), ctypes.addressof(d))
""",
    "other machine's calls": """
import mmap
if COLUMN == 0:
    memory = mmap.mmap(-1, 4096, prot=7)
    memory.write(bytes.fromhex("53b814000000cd80" "5bc3"))  # int 0x80: getpid by 32 bit
    run = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
    if run() > 0:
        escaped("32 bit")
    if libc.syscall(ctypes.c_long(0x40000000 + 39)) >= 0:
        escaped("x32")
""",
    # memory and objects
    "memory": "x = []\nwhile True: x.append(bytearray(1 << 24))",
    "shared memory": """
denied('shmget', 0, 1 << 20, 0o1666)
denied('semget', 0, 1, 0o1666)
denied('msgget', 0, 0o1666)
""",
    "memory without a limit": """
denied('memfd_create', ctypes.addressof(ctypes.create_string_buffer(b'x')), 0)
""",
    "huge pages": """
import mmap
attempt(lambda: mmap.mmap(-1, 1 << 21, flags=0x40000 | 0x22), 'huge pages')
denied('mlockall', 3)
""",
    "message queues": """
denied('mq_open', ctypes.addressof(ctypes.create_string_buffer(b'hostile')), 0o102, 0o600, 0)
""",
    "pipes of a megabyte": """
r, w = os.pipe()
attempt(lambda: fcntl.fcntl(w, 1031, 1 << 20), 'F_SETPIPE_SZ')
""",
    "descriptors": """
n = 0
try:
    while True:
        os.pipe()
        n += 2
except OSError:
    if n > 64:
        escaped(n)
""",
    "splices": "denied('vmsplice', 1, 0, 0, 0); denied('splice', 0, 0, 1, 0, 1, 0)",
    # files
    "files left behind": """
for folder in ("/tmp", "/dev/shm", "/var/tmp", "/run", "/", FOLDER, "."):
    try:
        open(folder + "/hostile-mark", "w").close()
        os.mkdir(folder + "/hostile-mark-folder")
    except OSError:
        pass
""",
    "user's files changed": """
path = FOLDER + "/secret"
for change in (
    lambda: open(path, "w"), lambda: os.truncate(path, 0), lambda: os.remove(path),
    lambda: os.rename(path, path + "2"), lambda: os.link(path, path + "3"),
    lambda: os.chmod(path, 0o777), lambda: os.chown(path, -1, -1), lambda: os.utime(path),
    lambda: os.setxattr(path, "user.x", b"x"), lambda: os.symlink("/", FOLDER + "/link"),
    lambda: os.mkfifo(FOLDER + "/fifo"), lambda: os.rmdir(FOLDER + "/empty"),
):
    attempt(change, "change")
""",
    "symlinks": """
try:
    os.symlink(FOLDER, "link")
    os.symlink("/proc/%d/root" % TRAINER, "root")
except OSError:
    pass
for path in ("link/secret", "root" + FOLDER + "/secret", "../" * 20 + FOLDER + "/secret"):
    try:
        print(open(path).read())
    except OSError:
        pass
""",
    "devices": """
for path in ("/dev/null", "/dev/zero", "/dev/urandom"):
    attempt(lambda: os.chmod(path, 0o600), 'chmod')
    attempt(lambda: os.utime(path), 'utime')
    attempt(lambda: os.setxattr(path, "user.x", b"x"), 'setxattr')
for path in ("/dev/tty", "/dev/console", "/dev/mem", "/dev/kmsg", "/dev/fuse", "/dev/kvm"):
    attempt(lambda: os.open(path, os.O_RDONLY | os.O_NOCTTY), path)
""",
    "Python's files": """
path = os.__file__
for change in (
    lambda: open(path, "a"), lambda: os.chmod(path, 0), lambda: os.utime(path),
    lambda: os.remove(path), lambda: os.setxattr(path, "user.x", b"x"),
    lambda: open(os.path.dirname(path) + "/hostile.py", "w"),
):
    attempt(change, "change")
""",
    "locks": """
one, other = open(os.__file__), open(os.__file__)
try:
    fcntl.flock(one, fcntl.LOCK_EX)
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    escaped("flock")
fcntl.fcntl(one, 37, struct.pack("hhqqi4x", 0, 0, 0, 0, 0))
answer = fcntl.fcntl(other, 36, struct.pack("hhqqi4x", 1, 0, 0, 0, 0))
if struct.unpack_from("h", answer)[0] != 2:
    escaped("a lock that others see")
""",
    "leases": """
file = open(os.__file__)
attempt(lambda: fcntl.fcntl(file, 1024, fcntl.F_RDLCK), 'lease')
attempt(lambda: fcntl.fcntl(os.open(os.path.dirname(os.__file__), 0), 1026, 1), 'notify')
""",
    "inodes": """
n = 0
try:
    while n < 2000:
        open(f"f{n}", "w").close()
        n += 1
except OSError:
    pass
if n > 256:
    escaped(f"{n} files")
""",
    "disk": """
n = 0
try:
    while n < 64:
        open(f"f{n}", "wb").write(bytes(1 << 20))
        n += 1
except OSError:
    pass
if n > 16:
    escaped(f"{n} MiB")
""",
    # the server and its answers
    "output flood": "while True: os.write(1, b'x' * (1 << 20))",
    "report flood": "while True: os.write(3, b'x' * 4096)",
    "forged report": "os.write(3, b'passed\\nend\\n' * 100); os._exit(0)",
    "forged answer": """
answer = b'{"status": "finished", "passed": [true], "output": "", "error": "", "seconds": 0}\\n'
for fd in range(0, 64):
    try: os.write(fd, answer)
    except OSError: pass
os._exit(0)
""",
    "closes everything": "os.closerange(0, 4096)\nwhile True: pass",
    "stops itself": "os.kill(os.getpid(), signal.SIGSTOP)",
    "ignores all signals": """
for n in range(1, 65):
    try: signal.signal(n, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: pass
""",
    "crash": "ctypes.string_at(0)",
    "output sealed": "attempt(lambda: fcntl.fcntl(1, 1033, 15), 'seal')",
    "supervisor replaced": "denied('seccomp', 1, 8, 0); denied('landlock_create_ruleset', 0, 0, 1)",
}
ENDLESS = {
    "patient fork bomb",
    "report flood",
    "closes everything",
    "stops itself",
    "ignores all signals",
}
# Actions that only Landlock prevents under seccomp.
READS = {
    "trainer's environment",
    "trainer's memory",
    "trainer's files",
    "trainer's file by link",
    "trainer's root",
    "trainer's maps",
    "user's files",
    "list the user's files",
    "passwords",
    "symlinks",
    "devices",
}
# Actions that depend on where the trainer's files are.
OF_FILES = READS | {
    "Python's files",
    "disk",
    "files left behind",
    "inherited descriptors",
    "inodes",
    "own environment",
    "programs",
    "user's files changed",
}
# A program that runs after a hostile one must run as before. The larger one takes ten times as
# long and runs after every tenth program, and after those that the time limit ends.
SMALL = "total = sum([2, 3])"
SMALL_TESTS = ["assert total == 5"]
HONEST = """
import asyncio, threading

async def work():
    await asyncio.sleep(0)
    return await asyncio.to_thread(lambda: 5)

done = []
threads = [threading.Thread(target=done.append, args=(i,)) for i in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
HONEST_TESTS = ["assert sorted(done) == [0, 1, 2, 3]", "assert asyncio.run(work()) == 5"]
# More threads than are allowed; they wait until the program is killed.
SLEEPING_THREADS = """
import threading, time
threading.stack_size(1 << 16)
gate = threading.Event()
for _ in range(200):
    threading.Thread(target=gate.wait, daemon=True).start()
time.sleep(60)
"""


class Trainer:
    """A process with everything that a program might try to reach."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "empty").mkdir()
        (folder / "secret").write_text(SECRET)
        self.secret = (folder / "secret").open()
        self.signals: list[int] = []
        for number in (signal.SIGIO, signal.SIGURG, signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, _: self.signals.append(number))

        self.victim = subprocess.Popen(["sleep", "600"])
        self.store = socket.create_server(("127.0.0.1", 0))
        self.abstract = socket.socket(socket.AF_UNIX)
        self.abstract_name = f"\0{MARK}-{os.getpid()}"
        self.abstract.bind(self.abstract_name)
        self.abstract.listen()
        self.datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.datagrams.bind(str(folder / "datagrams"))
        for listener in (self.store, self.abstract, self.datagrams):
            listener.setblocking(False)
        self.state = self._state()

    def program(self, code: str) -> str:
        names = {
            "TRAINER": os.getpid(),
            "VICTIM": self.victim.pid,
            "FOLDER": str(self.folder),
            "SECRET_FD": str(self.secret.fileno()),
            "PORT": self.store.getsockname()[1],
            "ABSTRACT": self.abstract_name,
            "DATAGRAMS": str(self.folder / "datagrams"),
        }
        lines = [f"{name} = {value!r}" for name, value in names.items()]
        return "\n".join([PRELUDE, *lines, code])

    def harm(self) -> list[str]:
        """List the damage since the last call."""
        harm = []
        if self.victim.poll() is not None:
            self.victim = subprocess.Popen(["sleep", "600"])
            harm.append("the other process of this user is dead")

        if self.signals:
            harm.append(f"signals {self.signals}")
            self.signals.clear()

        state = self._state()
        if state != self.state:
            self.state = state
            harm.append("files, limits or priorities changed")

        for folder in ("/tmp", "/dev/shm", "/var/tmp", "/run", "/", "."):
            if os.path.exists(f"{folder}/{MARK}"):
                harm.append(f"a file in {folder}")

        for listener in (self.store, self.abstract):
            try:
                listener.accept()
                harm.append("a connection")
            except BlockingIOError:
                continue

        try:
            self.datagrams.recv(1)
            harm.append("a datagram")
        except BlockingIOError:
            pass

        return harm

    def _state(self) -> str:
        parts = []
        for path in sorted(self.folder.rglob("*")):
            status = path.lstat()
            facts = (status.st_mode, status.st_nlink, status.st_mtime_ns, status.st_size)
            parts.append((str(path), facts))
        for pid in (os.getpid(), self.victim.pid):
            parts.append(resource.prlimit(pid, resource.RLIMIT_CPU))
            parts.append(os.getpriority(os.PRIO_PROCESS, pid))
            parts.append(sorted(os.sched_getaffinity(pid)))
        for device in ("/dev/null", "/dev/zero"):
            parts.append(os.stat(device).st_mode)
        return hashlib.sha256(repr(parts).encode()).hexdigest()


def main(isolation: str, names: list[str]) -> dict:
    from verl.config.reward import SandboxConfig
    from verl.rewards.sandbox.runner import LocalRunner
    from verl.utils.errors import ConfigError

    patient = LocalRunner(SandboxConfig(isolation=isolation, timeout_s=20.0, memory_limit_mb=512))
    short = LocalRunner(SandboxConfig(isolation=isolation, timeout_s=0.3, memory_limit_mb=512))
    try:
        patient.run("", [])
    except ConfigError as error:
        return {"unavailable": str(error)}

    results = {}
    with tempfile.TemporaryDirectory(prefix="user-", dir="/tmp") as folder:
        trainer = Trainer(Path(folder))
        try:
            for number, name in enumerate(names):
                runner = short if name in ENDLESS else patient
                began = time.monotonic()
                run = runner.run(trainer.program(PROGRAMS[name]), ["pass"])
                seconds = time.monotonic() - began
                if name in ENDLESS or number % 10 == 0:
                    honest = patient.run(HONEST, HONEST_TESTS)
                else:
                    honest = patient.run(SMALL, SMALL_TESTS)
                text = run.output[-100_000:] + run.error
                results[name] = {
                    "status": run.status,
                    "passed": run.passed,
                    "output": text[:2000],
                    "size": len(run.output),
                    "escaped": "ESCAPED" in text or SECRET in text,
                    "harm": trainer.harm(),
                    "honest": len(honest.passed) > 0 and all(honest.passed),
                    "complaint": honest.error,
                    "seconds": seconds,
                }
        finally:
            trainer.victim.kill()
            trainer.victim.wait()
            patient.close()
            short.close()
    return {"results": results}


if __name__ == "__main__":
    os.environ["SECRET"] = SECRET
    json.dump(main(sys.argv[1], sys.argv[2:]), sys.stdout)
