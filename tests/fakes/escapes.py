"""Runs the programs of escapes.txt, which try to get out of the sandbox, and makes what they aim at, for test_sandbox_escapes.py.

    python escapes.py PACKAGE_ROOT ISOLATION INTERPRETER [NAME ...]      as any user; standard library only

runs all that this isolation claims to stop, or those that are named, and prints JSON: what is in force, what each program said and how it
ended, and the harm done.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# Each attempt must raise OSError; a program that has made all of its attempts prints `held`.
PRELUDE = """
import ctypes, errno, fcntl, mmap, os, resource, signal, socket, struct, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def attempt(action, *arguments, **named):
    try:
        found = action(*arguments, **named)
    except OSError:
        return
    print('escaped:', getattr(action, '__name__', action), arguments, '->', repr(found)[:80], flush=True)
def number(n, *arguments):
    padded = [ctypes.c_long(x) if isinstance(x, int) else x for x in (*arguments, 0, 0, 0, 0, 0, 0)][:6]
    found = libc.syscall(ctypes.c_long(n), *padded)
    if found == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found
def numbers(*names):
    for name in names:
        if name in CALLS:
            attempt(number, CALLS[name])
def children(count, body):
    for _ in range(count):
        if os.fork() == 0:
            try:
                body()
            finally:
                os._exit(0)
"""

# What no program may call: name, number on x86_64, number on aarch64.
CALLS = """
ptrace 101 117  process_vm_readv 310 270  process_vm_writev 311 271  process_madvise 440 440  kcmp 312 272  pidfd_getfd 438 438
socket 41 198  connect 42 203  bind 49 200  listen 50 201  accept4 288 242  shmget 29 194  msgget 68 186  semget 64 190  mq_open 240 180
memfd_create 319 279  memfd_secret 447 447  unshare 272 97  setns 308 268  clone3 435 435  mount 165 40  umount2 166 39  pivot_root 155 41
chroot 161 51  fsopen 430 430  open_tree 428 428  move_mount 429 429  mount_setattr 442 442  io_uring_setup 425 425  io_setup 206 0
bpf 321 280  perf_event_open 298 241  userfaultfd 323 282  add_key 248 217  request_key 249 218  keyctl 250 219  personality 135 92
seccomp 317 277  open_by_handle_at 304 265  name_to_handle_at 303 264  fanotify_init 300 262  inotify_init1 294 26  init_module 175 105
finit_module 313 273  kexec_load 246 104  reboot 169 142  swapon 167 224  acct 163 89  settimeofday 164 170  clock_settime 227 112
adjtimex 159 171  sethostname 170 161  syslog 103 116  quotactl 179 60  setuid 105 146  setgid 106 144  setresuid 117 147
setgroups 116 159  capset 126 91  sync 162 81  vhangup 153 58  sched_setscheduler 144 119  sched_setattr 314 274  ioprio_set 251 30
migrate_pages 256 238  move_pages 279 239  splice 275 76  vmsplice 278 75  execveat 322 281  flock 73 32  mlockall 151 230
modify_ldt 154 -  iopl 172 -  ioperm 173 -  setxattr 188 5  fsetxattr 190 7  removexattr 197 14  chown 92 -  fchownat 260 54
setsockopt 54 208
"""


def programs(strong: bool) -> dict[str, tuple[str, str]]:
    """Names, sources and right endings of all that an isolation claims to stop; `strong`: one with files and processes of its own."""
    found = {}
    for part in ("\n" + Path(__file__).with_suffix(".txt").read_text()).split("\n=== ")[1:]:
        head, _, source = part.partition("\n")
        name, isolations, endings = head.split(" | ")
        if strong or isolations == "all":
            found[name] = (source, endings)
    return found


class Targets:
    """What programs aim at: files of the user that they run as, a process of that user, sockets; `harm` is what was done to them."""

    def __init__(self, place: Path, uid: int) -> None:
        self.file, self.place, self.uid = place / "secret", place, uid
        self.file.write_text("do not tell")
        with contextlib.suppress(OSError):  # tmpfs has none before Linux 6.6
            os.setxattr(self.file, "user.mine", b"1")
        place.chmod(0o755)  # nothing but the sandbox stands between
        self.file.chmod(0o600)
        for one in (place, self.file):
            os.chown(one, uid, uid)
        self.process = subprocess.Popen(
            ["sleep", "900"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"SECRET": "do not tell"},
            user=uid if os.geteuid() == 0 else None,
        )
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.unix = socket.socket(socket.AF_UNIX)
        self.unix.bind(str(place.parent / "socket"))
        os.chmod(self.unix.getsockname(), 0o777)
        for one in (self.tcp, self.unix):
            one.listen()
            one.settimeout(0.01)
        self.before = self.facts()

    def facts(self) -> dict[str, object]:
        """What no program may change."""
        pid, seen = self.process.pid, {}
        for path in (self.file, self.place):
            facts = path.stat()
            seen[path.name] = [
                facts.st_mode,
                facts.st_uid,
                facts.st_gid,
                facts.st_nlink,
                facts.st_size,
                facts.st_mtime_ns,
                os.listxattr(path),
            ]
        limits = Path(f"/proc/{pid}/limits").read_text()
        kinds = [Path(f"/proc/sysvipc/{kind}").read_text().splitlines() for kind in ("shm", "msg")]
        shared = sum(line.split()[title.split().index("cuid")] == str(self.uid) for title, *lines in kinds for line in lines)
        seen |= {"names": sorted(os.listdir(self.place)), "alive": self.process.poll() is None, "shared": shared, "limits": limits}
        seen |= {"nice": os.getpriority(os.PRIO_PROCESS, pid), "cores": sorted(os.sched_getaffinity(pid)), "connections": 0}
        for one in (self.tcp, self.unix):
            try:
                one.accept()
                seen["connections"] = 1
            except TimeoutError:
                pass
        return seen

    def harm(self) -> list[str]:
        """What is not as it was."""
        after = self.facts()
        return [f"{key}: {value} became {after[key]}" for key, value in self.before.items() if after[key] != value]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.tcp.close()
        self.unix.close()


def main() -> None:
    package, isolation, interpreter, *names = sys.argv[1:]
    sys.path.insert(0, package)
    from aligner.errors import ConfigError
    from aligner.rewards.jail import allowed_calls
    from aligner.rewards.sandbox import NOBODY, Isolation, Sandbox, SandboxLimits, has_nobody

    os.environ["SECRET"] = "do not tell"
    limits = SandboxLimits(
        wall_seconds=20.0, cpu_seconds=4, memory_bytes=256 * 2**20, disk_bytes=4 * 2**20, output_bytes=4000, processes=8, open_files=64
    )
    quick = SandboxLimits(
        wall_seconds=2.0, cpu_seconds=1, memory_bytes=limits.memory_bytes, disk_bytes=limits.disk_bytes, output_bytes=4000
    )
    try:
        box = Sandbox(limits, Isolation(isolation), interpreter=interpreter)
        impatient = Sandbox(quick, Isolation(isolation), interpreter=interpreter)
    except ConfigError as error:
        print(json.dumps({"refused": str(error)}))
        return
    strong = box.isolation is Isolation.bubblewrap
    machine = os.uname().machine
    table = CALLS.split()
    numbers = table[1 + ["x86_64", "aarch64"].index(machine) :: 3]
    known = allowed_calls(machine, alone=True)
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        place = Path(folder, "place")
        place.mkdir()
        targets = Targets(place, NOBODY if os.geteuid() == 0 and has_nobody() else os.geteuid())
        words = {"FILE": str(targets.file), "PLACE": str(place), "PID": targets.process.pid, "PORT": targets.tcp.getsockname()[1]}
        words |= {"UNIX": targets.unix.getsockname(), "DISK": limits.disk_bytes, "MEMORY": limits.memory_bytes, "STRONG": strong}
        words |= {
            "CALLS": {name: int(n) for name, n in zip(table[::3], numbers, strict=True) if n != "-"},
            "CAPGET": known["capget"],
            "CLONE": known["clone"],
            "TKILL": known["tkill"],
        }
        words |= {"TGKILL": known["tgkill"], "SIGQUEUE": known["rt_sigqueueinfo"], "TGSIGQUEUE": known["rt_tgsigqueueinfo"]}
        words |= {"ALLOWED": sorted(allowed_calls(machine, alone=strong).values())}
        prelude = PRELUDE + "".join(f"{name} = {value!r}\n" for name, value in words.items())
        lock, said = threading.Lock(), {}

        def run(item: tuple[str, tuple[str, str]]) -> None:
            name, (source, expected) = item
            outcome = (impatient if expected == "timeout" else box).run(f"{prelude}{source}\nprint('held')", "some input")
            with lock:
                said[name] = [outcome.ending.value, outcome.code, outcome.stdout[-500:], outcome.stderr[-500:]]

        try:
            with ThreadPoolExecutor(max_workers=2) as threads:
                chosen = {name: one for name, one in programs(strong).items() if not names or name in names}
                list(threads.map(run, chosen.items()))
            harm = targets.harm()
        finally:
            targets.close()
    print(json.dumps({"in_force": box.describe(), "strong": strong, "said": said, "harm": harm}))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    main()
