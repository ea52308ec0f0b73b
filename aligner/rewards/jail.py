"""What a sandboxed program's process runs before it becomes that program: system calls, their filter, and supervision.

Standard library only: it starts once per program."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import resource
import select
import signal
import struct
import sys
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

NOBODY = 65534
_NEW_USER = 0x10000000
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_LANDLOCK_VERSION = 3  # the first that governs truncation
_LANDLOCK_RIGHTS = 0x7FFF  # all that this version knows
_LANDLOCK_READ = 0b1101  # execute, read files and directories
_LANDLOCK_FILE = 0b111 | 1 << 14  # the rights of files: execute, write, read, truncate
_SET_DEATH_SIGNAL, _SET_DUMPABLE, _SET_SECCOMP, _SET_SECURE_BITS, _SET_SUBREAPER, _SET_NO_NEW_PRIVILEGES = 1, 4, 22, 28, 36, 38
_FILTER, _NO_ROOT = 2, 3  # the second with its lock


def become(uid: int) -> None:
    """Give up root and become this user and group."""
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    show_process_files(True)


def enter_user_namespace() -> None:
    """Enter a user namespace with only this user, in which the limit on processes counts from 0.

    A program has no capabilities in it: exec drops them for every user except root. Raises OSError.
    """
    uid, gid = os.geteuid(), os.getegid()  # before: afterwards this process has no user until it is mapped
    _checked("unshare", _libc().unshare(_NEW_USER))
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def show_process_files(shown: bool) -> None:
    """Whether this process's user may open its files in /proc; a change of user forbids it until the next exec."""
    _control("PR_SET_DUMPABLE", _SET_DUMPABLE, int(shown))


def filter_calls(program: bytes) -> None:
    """Filter every later system call of this process and its descendants with a classic BPF program; no new privileges by exec."""

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]

    _control("PR_SET_NO_NEW_PRIVS", _SET_NO_NEW_PRIVILEGES, 1)
    _control("PR_SET_SECCOMP", _SET_SECCOMP, _FILTER, ctypes.byref(Program(length=len(program) // 8, code=program)))


def restrict_files(readable: Sequence[str], writable: Sequence[str]) -> None:
    """Restrict this process and its descendants to files below these paths (Landlock, Linux 6.2; `writable` paths are readable too)."""

    class Ruleset(ctypes.Structure):
        _fields_ = [("handled", ctypes.c_uint64)]

    class Rule(ctypes.Structure):
        _pack_ = 1
        _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]

    version = _libc().syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if 0 < version < _LANDLOCK_VERSION:
        raise OSError(
            errno.ENOSYS, f"Landlock here is version {version}, which allows truncating files; required: {_LANDLOCK_VERSION} (Linux 6.2)"
        )
    rules = _libc().syscall(_CREATE_RULESET, ctypes.byref(Ruleset(handled=_LANDLOCK_RIGHTS)), ctypes.c_size_t(8), 0)
    if rules < 0:
        _checked("landlock_create_ruleset", rules)
    for paths, allowed in ((readable, _LANDLOCK_READ), (writable, _LANDLOCK_RIGHTS)):
        for path in paths:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            wanted = allowed if os.path.isdir(path) else allowed & _LANDLOCK_FILE
            rule = Rule(allowed=wanted, parent=place)
            _checked(f"landlock_add_rule for {path}", _libc().syscall(_ADD_RULE, rules, 1, ctypes.byref(rule), 0))
            os.close(place)
    _control("PR_SET_NO_NEW_PRIVS", _SET_NO_NEW_PRIVILEGES, 1)
    _checked("landlock_restrict_self", _libc().syscall(_RESTRICT_SELF, rules, 0))
    os.close(rules)


def _control(name: str, option: int, *arguments: object) -> None:
    padded = [*arguments, 0, 0, 0, 0][:4]
    _checked(name, _libc().prctl(option, *(ctypes.c_ulong(one) if isinstance(one, int) else one for one in padded)))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(what: str, result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


# name, number on x86_64, number on aarch64 (-: missing)
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
_CLONE3, _NEWER = 435, 451  # the same on both; from _NEWER on (x86_64's x32 calls too) only allowed calls are known here

_ANY = 0xFFFFFFFF
_NEW_NAMESPACES = 0x7E020000
_FILE_TYPE, _REGULAR, _FIFO = 0xF000, 0x8000, 0x1000
_STREAM, _UNIX = 1, 1
_SOCKET_FLAGS = (0, 0o4000, 0o2000000, 0o2004000)  # non-blocking, closed by exec
# Duplicates, flags, locks, a pipe's size, seals; nothing that makes the kernel send signals for the program, or that watches files.
_FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1031, 1032, 1034)
_IOCTL = (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # a terminal's settings and size, FIONREAD, FIONBIO, close on exec
# Signals by the parent's end, dumpable, names, seccomp and privileges (to ask), capabilities (to ask), huge pages, named memory.
_PRCTL = (1, 2, 3, 4, 15, 16, 21, 23, 39, 41, 42, 0x53564D41)

# Conditions: argument, mask, allowed values. Ids must be 0, this process, so that no other process's limits are changed.
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
    """Names and numbers of the calls that `call_filter` allows, some of them conditionally.

    `alone`: the program has files and processes of its own. Otherwise it may not change attributes of any files either, which Landlock
    does not control.
    """
    if machine not in _MACHINES:
        raise OSError(errno.ENOSYS, f"no list of system calls for {machine}, only for {', '.join(_MACHINES)}")
    text = _ALLOWED + _CHECKED + _SIGNALS + (_ATTRIBUTES + _OTHER_SIGNALS if alone else "")
    words = text.split()
    numbers = words[1 + list(_MACHINES).index(machine) :: 3]
    return {name: int(number) for name, number in zip(words[::3], numbers, strict=True) if number != "-"}


def call_filter(machine: str, *, only_signals_to: tuple[int, ...] | None) -> bytes:
    """The filter's code for `machine` (of os.uname).

    `only_signals_to`: the process ids (0: the own group; negative: a group) that may receive signals; None: all, for a program that is
    alone (see `allowed_calls`). Raises OSError if the machine's system calls are unknown here.
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
    """One instruction: code, instructions to skip if a test holds and if not, constant."""
    return struct.pack("=HBBI", code, yes, no, value)


PROGRAM = "program.py"
WORK = "/sandbox"  # the only writable place under bubblewrap
DEVICES = ("null", "zero", "full", "random", "urandom")
PAGE_BYTES = 4096  # the minimal size of a non-empty file
CLEANUP_SECONDS = 5.0
WATCH_SECONDS = 0.02


def main() -> NoReturn:
    """Carry out the order, a JSON object in the first argument (see `Sandbox` in aligner.rewards.sandbox); with a second argument,
    bubblewrap has built the surroundings. Writes lines of JSON to the order's status descriptor: started, then the wait status or the
    exceeded limit; or an error."""
    order = json.loads(sys.argv[1])
    by_bubblewrap = order["isolation"] == "bubblewrap"
    try:
        if by_bubblewrap and len(sys.argv) == 2:
            _prefer_to_end()
            command = [*order["bubblewrap"], *sys.orig_argv, "inside"]
            os.execve(command[0], command, {})
        for descriptor in filter(None, (order["status"], order["program"], order["control_group"])):
            os.set_inheritable(descriptor, False)
        _prepare(order)
        directory = WORK if by_bubblewrap else order["directory"]
        os.chdir(directory)
        _supervise(order, directory)
    except OSError as error:
        _tell(order, error=str(error))
    os._exit(0)


def _prefer_to_end() -> None:
    """If the machine runs out of memory, end this process before the run."""
    with (
        contextlib.suppress(OSError),
        open("/proc/self/oom_score_adj", "w") as file,
    ):  # not available everywhere; the limits hold without it
        file.write("1000")


def _prepare(order: dict) -> None:
    """Give up root's rights, and ensure that nothing outlives this process."""
    by_bubblewrap, uid = order["isolation"] == "bubblewrap", order["uid"]
    if not by_bubblewrap:
        _prefer_to_end()
    if uid is not None:
        become(uid)
        if by_bubblewrap:
            enter_user_namespace()
    if by_bubblewrap:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # process 1 receives no signal from inside without a handler
    else:
        signal.signal(signal.SIGTERM, _end_all)
        _control("PR_SET_CHILD_SUBREAPER", _SET_SUBREAPER, 1)  # become the parent of descendants whose own parent ends
    # When the thread that started this process ends; after the change of user, which would reset it.
    _control("PR_SET_PDEATHSIG", _SET_DEATH_SIGNAL, signal.SIGKILL if by_bubblewrap else signal.SIGTERM)


def _supervise(order: dict, directory: str) -> None:
    """Start the program; when it has ended or exceeded a limit, end its remaining processes and report."""
    alone = order["isolation"] == "bubblewrap"
    with open(order["program"], "rb") as source, open(PROGRAM, "wb") as file:
        file.write(source.read())
    in_use = 1 if alone else _threads_of_user()  # a user namespace of its own counts from 0
    awake, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    _tell(order, started=True)
    show_process_files(False)  # the program, run by the same user, could fake its report through them
    child = os.fork()
    if child == 0:
        _become(order, directory, in_use)
    events = select.poll()
    events.register(awake, select.POLLIN)
    events.register(order["status"], 0)  # only errors: nobody reads it any more
    status = None
    while status is None:
        for descriptor, _ in events.poll(WATCH_SECONDS * 1000 if alone else None):
            if descriptor != awake:
                _end_all()
            os.read(awake, 4096)
        status = _reap(child)
        if alone and status is None and (limit := _passed(order)):
            _tell(order, limit=limit)
            return
    if not alone:
        _end_descendants()
    _tell(order, status=status)


def _reap(child: int) -> int | None:
    """Reap all ended processes, including orphans; returns the child's wait status once it is among them."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == child:
            found = status


def _passed(order: dict) -> str:
    """The limit that the program's processes together have exceeded: files (bubblewrap only limits their size) or memory."""
    place = os.statvfs(WORK)
    if place.f_files - place.f_ffree > max(64, order["disk_bytes"] // PAGE_BYTES):  # empty files use kernel memory too
        return "disk"
    most, pids = order["memory_bytes"], [name for name in os.listdir("/proc") if name.isdigit() and name != str(os.getpid())]
    if sum(map(_resident, pids)) > most and sum(map(_share, pids)) > most:  # the first is quick, but counts shared pages repeatedly
        return "memory"
    return ""


def _resident(pid: str) -> int:
    """Its resident memory in bytes, including shared pages."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (FileNotFoundError, ProcessLookupError):
        return 0  # it has ended


def _share(pid: str) -> int:
    """Its memory in bytes, with its part of shared pages."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return next((int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:")), 0)
    except (FileNotFoundError, ProcessLookupError):
        return 0
    except PermissionError:  # it hides them
        return _resident(pid)


def _become(order: dict, directory: str, in_use: int) -> NoReturn:
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if order["control_group"] is not None:
            os.write(order["control_group"], b"0")  # this process
        limits = {
            resource.RLIMIT_AS: order["memory_bytes"],
            resource.RLIMIT_FSIZE: order["disk_bytes"],
            resource.RLIMIT_NOFILE: order["open_files"],
            resource.RLIMIT_NPROC: in_use + order["processes"],
            resource.RLIMIT_CORE: 1,  # 0 would still start a system's crash handler (core(5))
        }
        for kind, most in limits.items():
            hard = resource.getrlimit(kind)[1]
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(kind, (most, most))
        seconds = order["cpu_seconds"]
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))  # SIGXCPU first: SIGKILL would give no reason
        own = None if order["isolation"] == "bubblewrap" else (os.getpid(), 0, -os.getpid())
        environment = {"PATH": "/usr/bin:/bin", "HOME": directory, "TMPDIR": directory, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
        if os.geteuid() == 0:  # in a user namespace without another user, with a weaker isolation
            _control("PR_SET_SECUREBITS", _SET_SECURE_BITS, _NO_ROOT)  # from the next exec on root has no capabilities
        if order["isolation"] == "landlock":
            devices = [f"/dev/{name}" for name in DEVICES]
            restrict_files(order["readable"] + devices, [directory, "/dev/null"])
        filter_calls(call_filter(os.uname().machine, only_signals_to=own))
        os.execve(order["interpreter"], [order["interpreter"], "-I", "-B", PROGRAM], environment)
    except OSError as error:
        _tell(order, error=str(error))
    finally:
        os._exit(1)


def _tell(order: dict, **what: object) -> None:
    os.write(order["status"], json.dumps(what).encode() + b"\n")


def _threads_of_user() -> int:
    """This user's current threads: RLIMIT_NPROC counts all of them."""
    return sum(_of_processes(lambda place: len(os.listdir(f"{place}/task")) if os.stat(place).st_uid == os.getuid() else 0).values())


def _of_processes(read: Callable[[str], int]) -> dict[int, int]:
    """What `read` finds in the folder of each process, unless it has ended."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found[int(name)] = read(f"/proc/{name}")
    return found


def _end_all(*_: object) -> NoReturn:
    """The time is over, or the caller is gone."""
    _end_descendants()
    os._exit(1)


def _end_descendants() -> None:
    """Kill and reap all descendants (orphans become children) until none is left."""
    deadline = time.monotonic() + CLEANUP_SECONDS
    while (pids := _descendants()) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.kill(pid, signal.SIGKILL)
        _reap(0)
        time.sleep(0.002)


def _descendants() -> list[int]:
    def parent(place: str) -> int:
        with open(f"{place}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[1])

    parents, found = _of_processes(parent), [os.getpid()]
    for above in found:  # which grows
        found += [pid for pid, its in parents.items() if its == above]
    return found[1:]
