"""Programs that behave badly, in every kind of isolation that works here: each ends soon, harms nothing and leaves nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from aligner.errors import ConfigError
from aligner.rewards.jail.calls import call_filter
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
    with pytest.raises(ConfigError, match="bubblewrap: there is no bwrap"):
        Sandbox(isolation=Isolation.bubblewrap, bubblewrap=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="interpreter=.*none: cannot be run"):
        Sandbox(interpreter=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="memory_bytes=0: must be above 0 and finite"):
        SandboxLimits(memory_bytes=0)


def test_call_filter_is_eight_bytes_a_step_and_knows_its_machines():
    for machine in ("x86_64", "aarch64"):
        assert len(call_filter(machine, only_signals_to=None)) % 8 == 0
        assert len(call_filter(machine, only_signals_to=(7, 0, -7))) > len(call_filter(machine, only_signals_to=None))
    with pytest.raises(OSError, match="no system call filter for sparc"):
        call_filter("sparc", only_signals_to=None)
