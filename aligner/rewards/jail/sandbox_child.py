"""From a fresh process to a sandboxed program: give up rights, build the surroundings, start it, say how it ended, leave nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import sys
import time
from typing import NoReturn

from aligner.rewards.jail import kernel
from aligner.rewards.jail.calls import call_filter

PROGRAM = "program.py"
WORK = "/sandbox"  # the only place that can be written to under bubblewrap
DEVICES = ("null", "zero", "full", "random", "urandom")
PAGE_BYTES = 4096  # at least what a file with anything in it takes
CLEANUP_SECONDS = 5.0
WATCH_SECONDS = 0.02


def main() -> NoReturn:
    """Run as the JSON object in the first argument says (see `Sandbox` in aligner.rewards.sandbox); a second argument says that bubblewrap
    has built the surroundings. Writes lines of JSON to the order's status descriptor: started, then the wait status, or the limit that was
    passed; or an error."""
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
    """Where the machine runs out of memory, before the run does."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # not everywhere; the limits hold without it
        file.write("1000")


def _prepare(order: dict) -> None:
    """Give up the rights of root, and see to it that nothing outlives this process."""
    by_bubblewrap, uid = order["isolation"] == "bubblewrap", order["uid"]
    if not by_bubblewrap:
        _prefer_to_end()
    if uid is not None:
        kernel.become(uid)
        if by_bubblewrap:
            kernel.enter_user_namespace()
    if by_bubblewrap:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # process 1 is sent nothing from inside that it has no handler for
        kernel.die_with_parent(signal.SIGKILL)  # after the change of user, which would undo it
    else:
        signal.signal(signal.SIGTERM, _end_all)
        kernel.die_with_parent(signal.SIGTERM)
        kernel.adopt_orphans()


def _supervise(order: dict, directory: str) -> None:
    """Start the program; when it has ended or passed a limit, end what it left behind and say so."""
    alone = order["isolation"] == "bubblewrap"
    with open(order["program"], "rb") as source, open(PROGRAM, "wb") as file:
        file.write(source.read())
    in_use = 1 if alone else _threads_of_user()  # own user namespaces count from 0
    awake, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    _tell(order, started=True)
    kernel.show_process_files(False)  # the program, which has the same user, could say through them how it ended
    child = os.fork()
    if child == 0:
        _become(order, directory, in_use)
    events = select.poll()
    events.register(awake, select.POLLIN)
    events.register(order["status"], 0)  # an error on it: nobody reads it any more
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
    """Reap all that has ended, also what the program's children left; the child's wait status once it is among them."""
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
    """The limit that the program, with all its processes, has passed: files, for bubblewrap bounds only their size, or memory."""
    place = os.statvfs(WORK)
    if place.f_files - place.f_ffree > max(64, order["disk_bytes"] // PAGE_BYTES):  # empty ones take kernel memory too
        return "disk"
    most, pids = order["memory_bytes"], _others()
    if sum(map(_resident, pids)) > most and sum(map(_share, pids)) > most:  # the first is quick, but counts shared pages again and again
        return "memory"
    return ""


def _others() -> list[str]:
    """Processes besides this one."""
    return [name for name in os.listdir("/proc") if name.isdigit() and name != str(os.getpid())]


def _resident(pid: str) -> int:
    """Bytes of its memory, shared ones too."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (FileNotFoundError, ProcessLookupError):
        return 0  # it has ended


def _share(pid: str) -> int:
    """Bytes of its memory, of shared ones its part."""
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
            resource.RLIMIT_CORE: 1,  # not 0, with which a system's crash handler is still started (core(5))
        }
        for kind, most in limits.items():
            hard = resource.getrlimit(kind)[1]
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(kind, (most, most))
        seconds = order["cpu_seconds"]
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))  # SIGXCPU first: SIGKILL would not say why
        own = None if order["isolation"] == "bubblewrap" else (os.getpid(), 0, -os.getpid())
        environment = {"PATH": "/usr/bin:/bin", "HOME": directory, "TMPDIR": directory, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
        if os.geteuid() == 0:  # of a user namespace without another user, in one of the weaker isolations
            kernel.make_root_ordinary()
        if order["isolation"] == "landlock":
            devices = [f"/dev/{name}" for name in DEVICES]
            kernel.restrict_files(order["readable"] + devices, [directory, "/dev/null"])
        kernel.filter_calls(call_filter(os.uname().machine, only_signals_to=own))
        os.execve(order["interpreter"], [order["interpreter"], "-I", "-B", PROGRAM], environment)
    except OSError as error:
        _tell(order, error=str(error))
    finally:
        os._exit(1)


def _tell(order: dict, **what: object) -> None:
    os.write(order["status"], json.dumps(what).encode() + b"\n")


def _threads_of_user() -> int:
    """Threads that this user has now: RLIMIT_NPROC counts all of them."""
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == os.getuid():
                count += len(os.listdir(f"/proc/{name}/task"))
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
    return count


def _end_all(*_: object) -> NoReturn:
    """The time is over, or whoever wanted the program is gone."""
    _end_descendants()
    os._exit(1)


def _end_descendants() -> None:
    """Kill and reap all below this process (orphans are its children) until there are none."""
    deadline = time.monotonic() + CLEANUP_SECONDS
    while (pids := _descendants()) and time.monotonic() < deadline:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it has ended
        _reap(0)
        time.sleep(0.002)


def _descendants() -> list[int]:
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(parent, []).append(int(name))
    found, waiting = [], [os.getpid()]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found
