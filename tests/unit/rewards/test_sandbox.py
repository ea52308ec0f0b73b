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
from aligner.rewards import surroundings
from aligner.rewards.sandbox import Ending, Isolation, Sandbox, SandboxError, SandboxLimits
from aligner.rewards.surroundings import remove_tree

pytestmark = pytest.mark.cpu  # it forks processes of other users: that takes as much memory as this one has mapped, a GPU's too
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


# What programs of people do: none of it may need a call that is not on the list. OWN is for those with files and processes of their own.
ORDINARY = """
import asyncio, concurrent.futures, contextlib, ctypes, fcntl, gzip, mmap, multiprocessing, os, pathlib, pickle, select
import shutil, signal, socket, sqlite3, subprocess, sys, tempfile, time, uuid, zipfile
with contextlib.suppress(ImportError):
    import numpy
    assert numpy.allclose(numpy.linalg.inv(2 * numpy.eye(300)) @ numpy.ones(300), 0.5) and numpy.random.default_rng(0).random(9).max() < 1
    numpy.save('a.npy', numpy.arange(9)); assert numpy.load('a.npy', mmap_mode='r+').sum() == 36
with concurrent.futures.ThreadPoolExecutor(3) as pool:
    assert list(pool.map(len, ['a', 'bb'])) == [1, 2]
assert subprocess.run([sys.executable, '-c', 'print(input())'], input=b'x', capture_output=True).stdout == b'x\\n'
assert subprocess.run('echo y | cat', shell=True, capture_output=True, text=True).stdout == 'y\\n'
async def chat():
    process = await asyncio.create_subprocess_exec(sys.executable, '-c', 'print(6 * 7)', stdout=asyncio.subprocess.PIPE)
    return await asyncio.wait_for(process.communicate(), 60)
assert asyncio.run(chat())[0] == b'42\\n'
base = sqlite3.connect('base'); base.execute('create table t (x)'); base.execute('insert into t values (3)'); base.commit()
assert base.execute('select x from t').fetchall() == [(3,)]
with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile() as file:
    path = pathlib.Path(folder, 'x'); path.write_text('x'); path.rename(path.with_name('y')); os.link(path.with_name('y'), folder + '/z')
    os.symlink('z', folder + '/l'); shutil.copyfile(folder + '/l', folder + '/copied')
    assert sorted(os.listdir(folder)) == ['copied', 'l', 'y', 'z']
with zipfile.ZipFile('a.zip', 'w') as packed:
    packed.writestr('one', 'x' * 1000)
pickle.loads(gzip.decompress(gzip.compress(pickle.dumps(list(range(99))))))
left, right = socket.socketpair(); left.sendall(b'hello')
assert right.recv(9) == b'hello' and select.select([left], [], [], 0) == ([], [], [])
reading, writing = os.pipe(); os.set_blocking(reading, False)
fcntl.fcntl(writing, fcntl.F_GETFL); fcntl.lockf(open('base', 'r+'), fcntl.LOCK_EX)
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.01); signal.pause()
memory = mmap.mmap(-1, 9999); memory[:3] = b'abc'; time.sleep(0.01)
time.localtime(); os.urandom(9); uuid.uuid4(); os.cpu_count(); os.uname()
callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(lambda x: x + 1); assert callback(4) == 5
os.nice(0); os.sched_getaffinity(0); os.getpgid(0); os.getgroups(); os.times(); os.get_terminal_size if sys.stdout.isatty() else None
child = os.fork()
if child == 0:
    os._exit(5)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
OWN
print('done')
"""
OWN = """
with multiprocessing.get_context('fork').Pool(2) as pool:
    assert pool.map(abs, [-1, -2]) == [1, 2]
queue = multiprocessing.get_context('fork').Queue(); queue.put(7); assert queue.get() == 7
shutil.copy2('base', 'copy'); os.chmod('copy', 0o700)
shutil.copytree('.', tempfile.mkdtemp() + '/all', ignore=shutil.ignore_patterns('tmp*'))
os.utime('copy'); process = subprocess.Popen(['sleep', '60']); process.terminate(); assert process.wait() == -15
with zipfile.ZipFile('a.zip') as packed:
    packed.extractall()
"""


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
    separate = isolation is Isolation.bubblewrap
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
def test_ordinary_programs(isolation):
    # The limit of processes counts those that this user's other tests start meanwhile.
    limits = SandboxLimits(wall_seconds=300.0, cpu_seconds=60, memory_bytes=2**30, processes=4096)
    outcome = sandbox(isolation, limits).run(ORDINARY.replace("OWN", OWN if isolation is Isolation.bubblewrap else ""))
    assert (outcome.ending, outcome.code, outcome.stdout) == (Ending.exited, 0, "done\n"), outcome.stderr


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


def test_nothing_weaker_is_taken_unasked(monkeypatch, tmp_path):
    tried = []

    def refuses(box):
        tried.append(box.isolation)
        return "" if box.isolation is Isolation.landlock else "unshare: Operation not permitted"

    monkeypatch.setattr(Sandbox, "_refusal", refuses)
    with pytest.raises(ConfigError, match="isolation=auto: does not work .*unshare: .*user.max_user_namespaces.*isolation=landlock"):
        Sandbox(bubblewrap=sys.executable)  # any program that is there: it is not started
    assert tried == [Isolation.bubblewrap]
    with pytest.raises(ConfigError, match="isolation=auto: does not work .*bwrap was not found.*isolation=landlock"):
        Sandbox(bubblewrap=str(tmp_path / "none"))
    assert Sandbox(isolation=Isolation.landlock).describe().startswith("sandbox isolation=landlock: weak")


def test_memory_of_all_processes_together():
    limits = SandboxLimits(wall_seconds=60.0, memory_bytes=200 * 2**20)
    fill = "import os, time\nfor _ in range(COUNT):\n    if os.fork() == 0:\n        data = bytearray(SIZE * 2**20)\n"
    fill += "        time.sleep(WAIT)\n        os._exit(0)\nfor _ in range(COUNT):\n    os.wait()\nprint('fits')"
    box = sandbox(Isolation.bubblewrap, limits)
    assert "of all its processes together" in box.describe()
    for count, size, wait, ending, said in ((3, 120, 50, Ending.memory, ""), (3, 20, 1, Ending.exited, "fits\n")):
        outcome = box.run(fill.replace("COUNT", str(count)).replace("SIZE", str(size)).replace("WAIT", str(wait)))
        assert (outcome.ending, outcome.stdout) == (ending, said), outcome
    shared = "data = bytearray(120 * 2**20)\n" + fill.replace("bytearray(SIZE * 2**20)", "0").replace("COUNT", "3").replace("WAIT", "1")
    assert box.run(shared).stdout == "fits\n"  # copied on write: one copy, whatever each process shows


def test_an_ordinary_user_has_namespaces():
    """In a process of its own that is one: `unshare` there asks for the user that it had before."""
    script = "import sys; sys.path.insert(0, sys.argv[1])\nimport jail\nimport os\n"
    script += "before = os.getuid()\njail.enter_user_namespace()\nassert os.getuid() == before, os.getuid()"
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        shutil.copy(surroundings.JAIL, folder)
        more = {"user": 1000, "group": 1000, "extra_groups": []} if os.geteuid() == 0 else {}
        python = "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable
        subprocess.run(["chmod", "-R", "a+rX", folder], check=True)
        ran = subprocess.run([python, "-B", "-c", script, folder], capture_output=True, text=True, cwd="/", **more)
    if "unshare: " in ran.stderr:
        pytest.skip(ran.stderr[-200:])
    assert ran.returncode == 0, ran.stderr


def test_directories_are_removed_whatever_is_in_them(tmp_path):
    outside, place = tmp_path / "outside", tmp_path / "place"
    outside.mkdir(mode=0o755)
    (outside / "file").write_text("stays")
    place.mkdir()
    (place / "link").symlink_to(outside)
    (place / "file link").symlink_to(outside / "file")
    (place / "closed").mkdir()
    (place / "closed" / "link").symlink_to(outside)
    (place / "closed").chmod(0)
    os.mkfifo(place / "fifo")
    here = os.open(place, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    remove_tree(str(place))
    assert not place.exists() and (outside / "file").read_text() == "stays" and outside.stat().st_mode & 0o777 == 0o755


def test_what_cannot_be_removed_is_said_and_no_reason_to_stop(monkeypatch, capsys):
    def fails(directory):
        shutil.rmtree(directory)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(surroundings, "remove_tree", fails)
    assert sandbox(Isolation.limits).run("print(1)").stdout == "1\n"
    assert "warning: a program's files in" in capsys.readouterr().out


def test_no_room_for_a_program_is_an_error_of_the_sandbox(monkeypatch, tmp_path):
    box = sandbox(Isolation.limits)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(SandboxError, match="surroundings cannot be built or removed: .*none"):
        box.run("print(1)")


def test_an_isolation_that_does_not_work_says_why(tmp_path):
    with pytest.raises(
        ConfigError, match="sandbox isolation=bubblewrap: .*bwrap was not found.*install bubblewrap, and .*isolation=landlock"
    ):
        Sandbox(isolation=Isolation.bubblewrap, bubblewrap=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="interpreter=.*none: cannot be run"):
        Sandbox(interpreter=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="memory_bytes=0: must be above 0 and finite"):
        SandboxLimits(memory_bytes=0)
