"""Which system calls a sandboxed program may make, as a seccomp filter: what Python programs with NumPy, threads and processes need.

Everything else is refused: EPERM, or ENOSYS for `clone3` and for calls newer than this list, from which libraries go on to older ones.
So there are no sockets but connected pairs, no namespaces, mounts or keys, no tracing, and no memory (System V, `memfd_create`) that limits
do not see.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Sequence

# name, number on x86_64, number on aarch64; -: it has none
_ALLOWED = """
read 0 63  write 1 64  open 2 -  close 3 57  stat 4 -  fstat 5 80  lstat 6 -  newfstatat 262 79  statx 332 291  lseek 8 62  pread64 17 67
pwrite64 18 68  readv 19 65  writev 20 66  preadv 295 69  pwritev 296 70  preadv2 327 286  pwritev2 328 287  openat 257 56  openat2 437 437
creat 85 -  access 21 -  faccessat 269 48  faccessat2 439 439  pipe 22 -  pipe2 293 59  dup 32 23  dup2 33 -  dup3 292 24  sendfile 40 71
copy_file_range 326 285  fsync 74 82  fdatasync 75 83  truncate 76 45  ftruncate 77 46  fallocate 285 47  fadvise64 221 223
readahead 187 213  getdents 78 -  getdents64 217 61  getcwd 79 17  chdir 80 49  fchdir 81 50  rename 82 -  renameat 264 38
renameat2 316 276  mkdir 83 -  mkdirat 258 34  rmdir 84 -  link 86 -  linkat 265 37  unlink 87 -  unlinkat 263 35  symlink 88 -
symlinkat 266 36  readlink 89 -  readlinkat 267 78  umask 95 166  statfs 137 43  fstatfs 138 44  close_range 436 436  getxattr 191 8
lgetxattr 192 9  fgetxattr 193 10  listxattr 194 11  llistxattr 195 12  flistxattr 196 13
poll 7 -  ppoll 271 73  select 23 -  pselect6 270 72  epoll_create 213 -  epoll_create1 291 20  epoll_ctl 233 21  epoll_wait 232 -
epoll_pwait 281 22  epoll_pwait2 441 441  eventfd 284 -  eventfd2 290 19  signalfd 282 -  signalfd4 289 74  timerfd_create 283 85
timerfd_settime 286 86  timerfd_gettime 287 87  pause 34 -  nanosleep 35 101  clock_nanosleep 230 115
mmap 9 222  mprotect 10 226  munmap 11 215  brk 12 214  mremap 25 216  msync 26 227  madvise 28 233  mbind 237 235  get_mempolicy 239 236
set_mempolicy 238 237  membarrier 324 283
fork 57 -  vfork 58 -  execve 59 221  exit 60 93  exit_group 231 94  wait4 61 260  waitid 247 95  getpid 39 172  getppid 110 173
gettid 186 178  getpgid 121 155  setpgid 109 154  getpgrp 111 -  getsid 124 156  setsid 112 157  getuid 102 174  geteuid 107 175
getgid 104 176  getegid 108 177  getresuid 118 148  getresgid 120 150  getgroups 115 158  capget 125 90  set_tid_address 218 96
set_robust_list 273 99  rseq 334 293  futex 202 98  futex_waitv 449 449  arch_prctl 158 -  pidfd_open 434 434  getpriority 140 141
getrlimit 97 163  setrlimit 160 164  getrusage 98 165  times 100 153  sysinfo 99 179  uname 63 160  getrandom 318 278  sched_yield 24 124
sched_getparam 143 121  sched_getscheduler 145 120  sched_get_priority_max 146 125  sched_get_priority_min 147 126
sched_rr_get_interval 148 127  sched_getaffinity 204 123  sched_getattr 315 275  getcpu 309 168
rt_sigaction 13 134  rt_sigprocmask 14 135  rt_sigreturn 15 139  rt_sigpending 127 136  rt_sigtimedwait 128 137  rt_sigsuspend 130 133
sigaltstack 131 132  restart_syscall 219 128  alarm 37 -  getitimer 36 102  setitimer 38 103  timer_create 222 107  timer_settime 223 110
timer_gettime 224 108  timer_getoverrun 225 109  timer_delete 226 111  time 201 -  gettimeofday 96 169  clock_gettime 228 113
clock_getres 229 114
sendto 44 206  recvfrom 45 207  sendmsg 46 211  recvmsg 47 212  shutdown 48 210  getsockname 51 204  getpeername 52 205  getsockopt 55 209
"""
_ATTRIBUTES = """
chmod 90 -  fchmod 91 52  fchmodat 268 53  fchmodat2 452 452  utime 132 -  utimes 235 -  futimesat 261 -  utimensat 280 88
"""
_CHECKED = """
clone 56 220  mknod 133 -  mknodat 259 33  socketpair 53 199  ioctl 16 29  fcntl 72 25  prctl 157 167  prlimit64 302 261
sched_setaffinity 203 122  setpriority 141 140
"""
_SIGNALS = """
kill 62 129  tkill 200 130  tgkill 234 131
"""
_OTHER_SIGNALS = """
rt_sigqueueinfo 129 138  rt_tgsigqueueinfo 297 240  pidfd_send_signal 424 424
"""
_MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # as seccomp_data names them
_CLONE3, _NEWER = 435, 451  # the same on both; from _NEWER on, x86_64's x32 calls too, nothing is known here but what is allowed

_ANY = 0xFFFFFFFF
_NEW_NAMESPACES = 0x7E020000
_FILE_TYPE, _REGULAR, _FIFO = 0xF000, 0x8000, 0x1000
_STREAM, _UNIX = 1, 1
_SOCKET_FLAGS = (0, 0o4000, 0o2000000, 0o2004000)  # not blocking, closed by exec
# Duplicates, flags, locks, a pipe's size, seals; nothing that makes the kernel send signals for the program, or that watches files.
_FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1031, 1032, 1034)
_IOCTL = (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # a terminal's settings and size, FIONREAD, FIONBIO, close on exec
# Signals by the parent's end, dumpable, names, seccomp and privileges (to ask), capabilities (to ask), huge pages, named memory.
_PRCTL = (1, 2, 3, 4, 15, 16, 21, 23, 39, 41, 42, 0x53564D41)

# Conditions: argument, mask, values of which it must be one. Ids are 0, this process, so that nobody else's limits are changed.
_CONDITIONS: dict[str, tuple[tuple[int, int, Sequence[int]], ...]] = {
    "clone": ((0, _NEW_NAMESPACES, (0,)),),
    "mknod": ((1, _FILE_TYPE, (0, _REGULAR, _FIFO)),),
    "mknodat": ((2, _FILE_TYPE, (0, _REGULAR, _FIFO)),),
    "socketpair": ((0, _ANY, (_UNIX,)), (1, _ANY, tuple(_STREAM | flags for flags in _SOCKET_FLAGS))),  # a stream cannot be sent elsewhere
    "ioctl": ((1, _ANY, _IOCTL),),
    "fcntl": ((1, _ANY, _FCNTL),),
    "prctl": ((0, _ANY, _PRCTL),),
    "prlimit64": ((0, _ANY, (0,)),),
    "sched_setaffinity": ((0, _ANY, (0,)),),
    "setpriority": ((0, _ANY, (0,)), (1, _ANY, (0,))),
}

_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_NUMBER, _MACHINE, _ARGUMENTS = (
    0,
    4,
    16,
)  # offsets in seccomp_data; of a 64-bit argument the low half, which is all that the kernel reads of these
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_REFUSE, _UNKNOWN = _ERROR | errno.EPERM, _ERROR | errno.ENOSYS


def allowed_calls(machine: str, *, alone: bool) -> dict[str, int]:
    """Names and numbers of the calls that `call_filter` allows, some of them on conditions.

    `alone`: the program has files and processes of its own. Otherwise it is also refused to change attributes of files, wherever they are:
    Landlock does not govern them.
    """
    if machine not in _MACHINES:
        raise OSError(errno.ENOSYS, f"no list of system calls for {machine}, only for {', '.join(_MACHINES)}")
    text = _ALLOWED + _CHECKED + _SIGNALS + (_ATTRIBUTES + _OTHER_SIGNALS if alone else "")
    words = text.split()
    numbers = words[1 + list(_MACHINES).index(machine) :: 3]
    return {name: int(number) for name, number in zip(words[::3], numbers, strict=True) if number != "-"}


def call_filter(machine: str, *, only_signals_to: tuple[int, ...] | None) -> bytes:
    """The filter's code for `machine` (of os.uname).

    `only_signals_to`: the process ids (0: the own group; negative: a group) that may be sent signals; None: all, as of a program that is
    alone (see `allowed_calls`). Raises OSError if the machine's system calls are not known here.
    """
    allowed = allowed_calls(machine, alone=only_signals_to is None)
    conditions = dict(_CONDITIONS)
    if only_signals_to is not None:
        conditions |= dict.fromkeys(_SIGNALS.split()[::3], ((0, _ANY, [pid & _ANY for pid in only_signals_to]),))
    code = [_step(_LOAD, _MACHINE), _step(_EQUAL, _MACHINES[machine], yes=1), _step(_RETURN, _REFUSE), _step(_LOAD, _NUMBER)]
    for name, number in allowed.items():
        judged = [step for condition in conditions.get(name, ()) for step in _one_of(*condition)] + [_step(_RETURN, _ALLOW)]
        code += [_step(_EQUAL, number, no=len(judged)), *judged]
    code += [_step(_EQUAL, _CLONE3, yes=1), _step(_AT_LEAST, _NEWER, no=1), _step(_RETURN, _UNKNOWN), _step(_RETURN, _REFUSE)]
    return b"".join(code)


def _one_of(argument: int, mask: int, values: Sequence[int]) -> list[bytes]:
    """Refuse unless the masked argument is one of the values."""
    tests = [_step(_EQUAL, value, yes=len(values) - i) for i, value in enumerate(values)]
    return [_step(_LOAD, _ARGUMENTS + 8 * argument), _step(_AND, mask), *tests, _step(_RETURN, _REFUSE)]


def _step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    """One instruction: code, how many to skip where a test holds and where not, its constant."""
    return struct.pack("=HBBI", code, yes, no, value)
