"""Programs that behave badly, in every kind of isolation that works here: each ends soon, harms nothing and leaves nothing."""

from __future__ import annotations

import errno
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from aligner.errors import ConfigError
from aligner.rewards.jail.calls import allowed_calls, call_filter
from aligner.rewards.sandbox import Ending, Isolation, Sandbox, SandboxLimits

LIMITS = SandboxLimits(wall_seconds=20.0, cpu_seconds=1, memory_bytes=256 * 2**20, disk_bytes=2**20, output_bytes=2000, processes=8)
PROGRAMS = {
    "good": """import os, sys
print(sys.stdin.read()[::-1], sorted(os.listdir('.')), 'SECRET' in os.environ)""",
    "code": "raise SystemExit(3)",
    "forks": """import os
while True:
    try:
        os.fork()
    except OSError:
        print('refused', flush=True)
        os._exit(0)""",
    "outside": """for place in ('OUTSIDE', '/usr/outside'):
    try:
        open(place, 'w').write('x')
    except OSError:
        print('refused')""",
    "reads": """try:
    print(open('HIDDEN').read())
except OSError:
    print('refused')""",
    "socket": """import socket
try:
    socket.create_connection(('127.0.0.1', 1))
except PermissionError:
    print('refused')""",
    "loops": "while True: pass",
    "allocates": """data = []
while True:
    data.append(bytearray(2**24))""",
    "prints": "while True: print('x' * 500)",
    "crashes": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "files": """for i in range(100):
    open(str(i), 'wb').write(b'x' * 2**16)""",
    "big file": "open('big', 'wb').write(b'x' * 2**22)",
    "signals": """import os, signal
try:
    os.kill(PID, signal.SIGKILL)
except OSError:
    print('refused')""",
    "background": """import os, signal, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(300)
    os._exit(0)
os.wait()
print('parent is done')""",
}
FORBIDDEN = {
    "socket",
    "ptrace",
    "memfd_create",
    "shmget",
    "unshare",
    "setns",
    "clone3",
    "mount",
    "bpf",
    "io_uring_setup",
    "process_vm_readv",
}
SLEEPER = """import signal, time
for one in (signal.SIGTERM, signal.SIGINT):
    signal.signal(one, signal.SIG_IGN)
time.sleep(300)"""


def interpreters() -> list[str]:
    """This Python, and the system's: root becomes another user, who may not reach this one."""
    return [path for path in (sys.executable, "/usr/bin/python3") if os.path.exists(path)]


def sandbox(isolation: Isolation, limits: SandboxLimits = LIMITS) -> Sandbox:
    refusals = []
    for interpreter in interpreters():
        try:
            return Sandbox(limits, isolation, interpreter=interpreter)
        except ConfigError as error:
            refusals.append(str(error))
    pytest.skip("; ".join(refusals))


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path):  # tmp_path first: pytest's own directories are not to be below this one
    """Where sandboxes have their directories, which is how their processes are known; another user may pass through."""
    with tempfile.TemporaryDirectory(prefix="sandbox-tests-") as directory:
        os.chmod(directory, 0o711)
        monkeypatch.setattr(tempfile, "tempdir", directory)
        yield directory


def left_behind(place: str) -> list[str]:
    """Command lines of processes, whoever their parent is, that know of `place`; and files there."""
    found = [str(path) for path in Path(place).iterdir()]
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            facts = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes() + os.readlink(entry / "cwd").encode()
            if place.encode() in facts:
                found.append((entry / "cmdline").read_text())
        except (FileNotFoundError, ProcessLookupError, PermissionError):  # ended, or another user's
            continue
    return found


def eventually_nothing(place: str) -> bool:
    """The kernel ends the processes of a namespace a moment after its first one."""
    deadline = time.monotonic() + 10
    while (left := left_behind(place)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left
    return True


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """PROGRAMS with this process's id, a file that only its user may read, and one that shall not be written."""
    monkeypatch.setenv("SECRET", "do not tell")
    hidden = tmp_path / "hidden"
    hidden.write_text("do not tell")
    hidden.chmod(0o600)
    words = {"OUTSIDE": str(tmp_path / "outside"), "HIDDEN": str(hidden), "PID": str(os.getpid())}
    found = dict(PROGRAMS)
    for word, meaning in words.items():
        found = {name: source.replace(word, meaning) for name, source in found.items()}
    return found


@pytest.mark.parametrize("isolation", list(Isolation)[1:])
def test_programs_that_nobody_has_read(isolation, programs, tmp_path, place):
    box = sandbox(isolation)
    with ThreadPoolExecutor(max_workers=4) as threads:
        ran = dict(zip(programs, threads.map(lambda source: box.run(source, "olleh"), programs.values()), strict=True))
    said = {name: (one.ending.value, one.code, one.stdout) for name, one in ran.items()}
    separate = isolation in (Isolation.bubblewrap, Isolation.namespaces)
    assert said["good"] == ("exited", 0, "hello ['program.py'] False\n"), ran["good"].stderr
    assert said["code"] == ("exited", 3, "")
    assert said["forks"][0] in ("exited", "signal") and said["forks"][2].startswith("refused"), ran["forks"]
    assert said["socket"] == ("exited", 0, "refused\n"), ran["socket"].stderr
    assert said["loops"][0] == "cpu"
    assert said["allocates"][0] == "memory", ran["allocates"]
    assert said["prints"][0] == "output" and len(said["prints"][2]) == LIMITS.output_bytes
    assert said["crashes"] == ("signal", 11, "")
    assert said["big file"][0] == "exited" and said["big file"][1] == 1 and "OSError" in ran["big file"].stderr
    assert said["files"][1] == (1 if separate else 0), ran["files"]  # a directory in memory has a size
    assert said["signals"] == ("exited", 0, "refused\n"), ran["signals"]
    assert said["background"] == ("exited", 0, "parent is done\n"), ran["background"]
    if isolation is not Isolation.limits:
        assert said["outside"] == ("exited", 0, "refused\nrefused\n") and not (tmp_path / "outside").exists()
        assert said["reads"] == ("exited", 0, "refused\n")
    assert eventually_nothing(place)


@pytest.mark.parametrize("isolation", list(Isolation)[1:])
def test_the_clock_ends_what_ignores_signals(isolation, place):
    box = sandbox(isolation, SandboxLimits(wall_seconds=0.5))
    started = time.monotonic()
    outcome = box.run(SLEEPER)
    assert outcome.ending is Ending.timeout
    assert time.monotonic() - started < 60  # not the 300 s that it would sleep
    assert eventually_nothing(place)


def test_nothing_outlives_a_run_that_is_killed(place):
    """A process with a sleeping program in every isolation that works."""
    script = (
        "import sys, threading\nfrom aligner.errors import ConfigError\nfrom aligner.rewards.sandbox import *\n"
        "limits = SandboxLimits(wall_seconds=250)\n"
        "for isolation in list(Isolation)[1:]:\n    for interpreter in sys.argv[2:]:\n        try:\n"
        "            box = Sandbox(limits, isolation, interpreter=interpreter)\n        except ConfigError:\n            continue\n"
        "        threading.Thread(target=box.run, args=(sys.argv[1],), daemon=True).start()\n        break\n"
        "print('ready', flush=True)\nthreading.Event().wait(250)\n"
    )
    environment = {**os.environ, "TMPDIR": place, "PYTHONPATH": str(Path(__file__).parents[3])}
    run = subprocess.Popen([sys.executable, "-c", script, SLEEPER, *interpreters()], stdout=subprocess.PIPE, env=environment)
    assert run.stdout.readline() == b"ready\n"
    deadline = time.monotonic() + 60
    while not [one for one in left_behind(place) if "program.py" in one] and time.monotonic() < deadline:
        time.sleep(0.05)
    run.kill()
    run.wait(30)
    run.stdout.close()
    for directory in Path(place).iterdir():  # which nobody was left to remove
        shutil.rmtree(directory)
    assert eventually_nothing(place)


def test_an_isolation_that_does_not_work_says_why(tmp_path):
    with pytest.raises(ConfigError, match="sandbox isolation=bubblewrap: .*there is no bwrap.*install bubblewrap, or .*isolation=landlock"):
        Sandbox(isolation=Isolation.bubblewrap, bubblewrap=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="interpreter=.*none: cannot be run"):
        Sandbox(interpreter=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="memory_bytes=0: must be above 0 and finite"):
        SandboxLimits(memory_bytes=0)


def judged(code: bytes, machine: int, number: int, arguments: tuple[int, ...] = ()) -> int:
    """What a filter says of a system call, as the kernel runs it: 0 if it is allowed, else the error number."""
    data = struct.pack("=IIQ6Q", number, machine, 0, *arguments, *[0] * (6 - len(arguments)))
    steps = list(struct.iter_unpack("=HBBI", code))
    loaded = at = 0
    while True:
        operation, yes, no, value = steps[at]
        at += 1
        if operation == 0x20:
            loaded = struct.unpack_from("=I", data, value)[0]
        elif operation == 0x54:
            loaded &= value
        elif operation in (0x15, 0x35):
            at += yes if (loaded == value if operation == 0x15 else loaded >= value) else no
        else:
            assert operation == 0x06 and (value == 0x7FFF0000 or value >> 16 == 5)
            return 0 if value == 0x7FFF0000 else value & 0xFFFF


@pytest.mark.parametrize(("machine", "name"), [(0xC000003E, "x86_64"), (0xC00000B7, "aarch64")])
def test_the_filter_allows_its_list_and_nothing_else(machine, name):
    alone, shared = call_filter(name, only_signals_to=None), call_filter(name, only_signals_to=(7, 0, -7))
    calls, fewer = allowed_calls(name, alone=True), allowed_calls(name, alone=False)
    conditional = {"clone", "mknod", "mknodat", "socketpair", "ioctl", "fcntl", "prctl", "prlimit64", "sched_setaffinity", "setpriority"}
    for number in range(1200):
        if number in calls.values():
            continue
        assert judged(alone, machine, number) == (errno.ENOSYS if number == 435 or number > 450 else errno.EPERM)
    for called, number in calls.items():
        assert called in conditional or judged(alone, machine, number, (99,) * 6) == 0
        assert judged(alone, machine ^ 0x80000000, number) == judged(alone, 0x40000003, number) == errno.EPERM  # another table of calls
        assert judged(alone, machine, number | 0x40000000) == errno.ENOSYS  # x32
    lost = {"chmod", "utime", "utimes", "futimesat"} if name == "x86_64" else set()
    lost |= {"fchmod", "fchmodat", "fchmodat2", "utimensat", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_send_signal"}
    assert calls.keys() - fewer.keys() == lost and len(set(calls.values())) == len(calls)
    assert all(judged(shared, machine, calls[one]) for one in lost)
    for called in ("kill", "tkill", "tgkill"):
        minus_one, own_group = 2**64 - 1, 2**64 - 7
        said = [judged(shared, machine, calls[called], (pid, 9)) for pid in (7, 0, own_group, 8, 1, minus_one)]
        assert said == [0, 0, 0, errno.EPERM, errno.EPERM, errno.EPERM]


@pytest.mark.parametrize(("machine", "name"), [(0xC000003E, "x86_64"), (0xC00000B7, "aarch64")])
def test_calls_that_are_allowed_on_conditions(machine, name):
    calls = allowed_calls(name, alone=True)
    fine = {
        "clone": [(17,), (0x3D0F00,), (0x4111,)],  # fork, a thread, vfork
        "mknodat": [(9, 9, 0o100644), (9, 9, 0o10600), (9, 9, 0o600)],
        "socketpair": [(1, 1), (1, 1 | 0o2000000), (1, 1 | 0o2004000)],
        "ioctl": [(1, 0x5401), (1, 0x5421)],
        "fcntl": [(3, 1), (3, 4, 0o4000), (3, 6), (3, 1030)],
        "prctl": [(15,), (0x53564D41,)],
        "prlimit64": [(0, 7)],
        "sched_setaffinity": [(0, 8)],
        "setpriority": [(0, 0, 5)],
    }
    refused = {
        "clone": [(0x10000011,), (0x20000,), (0x7E020000,), (0x2000000 | 17,), (0x40000011,)],
        "mknodat": [(9, 9, 0o60600), (9, 9, 0o20600), (9, 9, 0o140600)],
        "socketpair": [(1, 2), (2, 1), (1, 5), (1, 3), (16, 1)],
        "ioctl": [(0, 0x5412), (0, 0x541C), (0, 0x8901), (0, 0x8914)],
        "fcntl": [(3, 8), (3, 10), (3, 15), (3, 1024), (3, 1026), (3, 1033)],
        "prctl": [(22,), (38,), (24,), (35,), (47,), (0x59616D61,)],
        "prlimit64": [(1, 7), (1234, 7)],
        "sched_setaffinity": [(1234, 8)],
        "setpriority": [(0, 1234), (1, 0), (2, 0)],
    }
    code = call_filter(name, only_signals_to=None)
    assert [(one, a) for one in fine for a in fine[one] if judged(code, machine, calls[one], a)] == []
    assert [(one, a) for one in refused for a in refused[one] if judged(code, machine, calls[one], a) != errno.EPERM] == []


def test_the_lists_numbers_are_the_kernels():
    """Against the headers of this machine, where there are some, and some numbers that every reader of them knows."""
    x86, arm = (allowed_calls(name, alone=True) for name in ("x86_64", "aarch64"))
    assert (x86["read"], x86["openat"], x86["execve"], x86["clone"], x86["tgkill"]) == (0, 257, 59, 56, 234)
    assert (arm["read"], arm["openat"], arm["execve"], arm["clone"], arm["tgkill"]) == (63, 56, 221, 220, 131)
    assert not x86.keys() & FORBIDDEN and not arm.keys() & FORBIDDEN and arm.keys() < x86.keys()
    headers = [Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), Path("/usr/include/asm-generic/unistd.h")]
    for header, calls in zip(headers, (x86, arm), strict=True):
        if header.exists():
            pairs = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text())
            known = {name: int(number) for name, number in pairs} | {"fchmodat2": 452}
            known.setdefault("newfstatat", known.get("fstatat", -1))
            assert {name: known[name] for name in calls} == calls


def test_a_machine_without_a_list_of_calls():
    with pytest.raises(OSError, match="no list of system calls for sparc, only for x86_64, aarch64"):
        call_filter("sparc", only_signals_to=None)
