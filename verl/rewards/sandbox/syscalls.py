"""System calls that a program may make, each with its number on x86_64 and aarch64.

A machine without the call has "-" there. All other calls are denied: sockets, processes and
programs, signals and limits of others, objects that outlive the process or that no limit counts,
and parts of the kernel that a Python program does not need. `seccomp` has the rules for the
arguments of RESTRICTED calls.
"""

_MACHINES = ("x86_64", "aarch64")


def _read(table: str) -> dict[str, dict[str, int]]:
    """Return the numbers of each call, by its name and by the machine."""
    calls: dict[str, dict[str, int]] = {}
    for line in table.splitlines():
        if not line or line.startswith("#"):
            continue
        name, *numbers = line.split()
        calls[name] = {}
        for machine, number in zip(_MACHINES, numbers):
            if number != "-":
                calls[name][machine] = int(number)
    return calls


# Calls that cannot affect anything outside of the process, for any arguments.
ALLOWED = _read("""
# open files
read 0 63
write 1 64
readv 19 65
writev 20 66
pread64 17 67
pwrite64 18 68
preadv 295 69
pwritev 296 70
preadv2 327 286
pwritev2 328 287
lseek 8 62
close 3 57
close_range 436 436
dup 32 23
dup2 33 -
dup3 292 24
pipe 22 -
pipe2 293 59
fstat 5 80
fstatfs 138 44
fsync 74 82
fdatasync 75 83
ftruncate 77 46
fallocate 285 47
fadvise64 221 223
sendfile 40 71
copy_file_range 326 285
getdents 78 -
getdents64 217 61
fgetxattr 193 10
flistxattr 196 13
# names of files
stat 4 -
lstat 6 -
newfstatat 262 79
statx 332 291
statfs 137 43
access 21 -
faccessat 269 48
faccessat2 439 439
readlink 89 -
readlinkat 267 78
getxattr 191 8
lgetxattr 192 9
listxattr 194 11
llistxattr 195 12
getcwd 79 17
chdir 80 49
fchdir 81 50
umask 95 166
# waiting for files; a pair of connected sockets is the only network
poll 7 -
ppoll 271 73
select 23 -
pselect6 270 72
epoll_create 213 -
epoll_create1 291 20
epoll_ctl 233 21
epoll_wait 232 -
epoll_pwait 281 22
epoll_pwait2 441 441
eventfd 284 -
eventfd2 290 19
timerfd_create 283 85
timerfd_settime 286 86
timerfd_gettime 287 87
recvfrom 45 207
shutdown 48 210
getsockname 51 204
getpeername 52 205
getsockopt 55 209
# memory, which RLIMIT_AS counts
brk 12 214
munmap 11 215
mprotect 10 226
mremap 25 216
madvise 28 233
msync 26 227
mincore 27 232
# this process and its threads
getpid 39 172
gettid 186 178
getppid 110 173
getpgrp 111 -
getpgid 121 155
getsid 124 156
getuid 102 174
geteuid 107 175
getgid 104 176
getegid 108 177
getresuid 118 148
getresgid 120 150
getgroups 115 158
capget 125 90
uname 63 160
sysinfo 99 179
times 100 153
getrusage 98 165
getrlimit 97 163
setrlimit 160 164
getpriority 140 141
getcpu 309 168
sched_yield 24 124
sched_getaffinity 204 123
sched_getparam 143 121
sched_getscheduler 145 120
sched_get_priority_max 146 125
sched_get_priority_min 147 126
arch_prctl 158 -
set_tid_address 218 96
set_robust_list 273 99
rseq 334 293
futex 202 98
futex_waitv 449 449
wait4 61 260
waitid 247 95
exit 60 93
exit_group 231 94
# signals that it handles itself
rt_sigaction 13 134
rt_sigprocmask 14 135
rt_sigreturn 15 139
rt_sigpending 127 136
rt_sigtimedwait 128 137
rt_sigsuspend 130 133
sigaltstack 131 132
pause 34 -
restart_syscall 219 128
# time and chance
alarm 37 -
getitimer 36 102
setitimer 38 103
time 201 -
gettimeofday 96 169
clock_gettime 228 113
clock_getres 229 114
nanosleep 35 101
clock_nanosleep 230 115
getrandom 318 278
""")

# Calls that change a file system; allowed if the program has its own.
ALLOWED_WRITES = _read("""
creat 85 -
truncate 76 45
unlink 87 -
unlinkat 263 35
rename 82 -
renameat 264 38
renameat2 316 276
mkdir 83 -
mkdirat 258 34
rmdir 84 -
link 86 -
linkat 265 37
symlink 88 -
symlinkat 266 36
mknod 133 -
mknodat 259 33
chmod 90 -
fchmod 91 52
fchmodat 268 53
chown 92 -
lchown 94 -
fchown 93 55
fchownat 260 54
utime 132 -
utimes 235 -
utimensat 280 88
futimesat 261 -
""")

# Calls that are allowed for some arguments only.
RESTRICTED = _read("""
open 2 -
openat 257 56
openat2 437 437
mmap 9 222
fcntl 72 25
flock 73 32
ioctl 16 29
prctl 157 167
prlimit64 302 261
kill 62 129
tgkill 234 131
clone 56 220
clone3 435 435
socketpair 53 199
sendto 44 206
""")
