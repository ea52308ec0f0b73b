"""From a fresh process to a sandboxed program: give up rights, build the surroundings, start it, say how it ended, leave nothing behind."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from typing import NoReturn

from aligner.rewards.jail import kernel
from aligner.rewards.jail.calls import call_filter
from aligner.rewards.jail.namespaces import DEVICES, WORK, become, build_root, count_own_processes, end_with, enter_namespaces

PROGRAM = "program.py"
SEPARATE = ("bubblewrap", "namespaces")  # with file system, processes and network of their own
CLEANUP_SECONDS = 5.0


def main() -> NoReturn:
    """Run as the JSON object in the first argument says (see `Sandbox` in aligner.rewards.sandbox); a second argument says that bubblewrap
    has built the surroundings. Writes lines of JSON to the order's status descriptor: started, then the wait status; or an error."""
    order = json.loads(sys.argv[1])
    by_bubblewrap = order["isolation"] == "bubblewrap"
    try:
        if by_bubblewrap and len(sys.argv) == 2:
            command = [*order["bubblewrap"], *sys.orig_argv, "inside"]
            os.execve(command[0], command, {})
        for descriptor in (order["status"], order["program"]):
            os.set_inheritable(descriptor, False)
        _prepare(order)
        directory = WORK if order["isolation"] in SEPARATE else order["directory"]
        os.chdir(directory)
        _supervise(order, directory)
    except OSError as error:
        _tell(order, error=str(error))
    os._exit(0)


def _prepare(order: dict) -> None:
    """Build the surroundings, unless bubblewrap has, then give up the rights of root."""
    isolation = order["isolation"]
    if isolation == "namespaces":
        kernel.die_with_parent(signal.SIGKILL)
        parent = enter_namespaces()
        build_root(order["directory"], order["readable"], order["disk_bytes"])
    if order["uid"] is not None:
        become(order["uid"])
        if isolation in SEPARATE:
            count_own_processes()
    if isolation == "namespaces":
        end_with(parent)
    if isolation not in SEPARATE:
        signal.signal(signal.SIGTERM, _end_all)
        kernel.die_with_parent(signal.SIGTERM)  # after the change of user, which would undo it
        kernel.adopt_orphans()


def _supervise(order: dict, directory: str) -> None:
    """Start the program; when it has ended, end what it left behind and say how it ended."""
    with open(order["program"], "rb") as source, open(PROGRAM, "wb") as file:
        file.write(source.read())
    in_use = 1 if order["isolation"] in SEPARATE else _threads_of_user()  # own user namespaces count from 0
    _tell(order, started=True)
    kernel.show_process_files(False)  # the program, which has the same user, could say through them how it ended
    child = os.fork()
    if child == 0:
        _become(order, directory, in_use)
    while True:  # also reaps what the program's children leave
        pid, status = os.wait()
        if pid == child:
            break
    if order["isolation"] not in SEPARATE:
        _end_descendants()
    _tell(order, status=status)


def _become(order: dict, directory: str, in_use: int) -> NoReturn:
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        limits = {
            resource.RLIMIT_AS: order["memory_bytes"],
            resource.RLIMIT_FSIZE: order["disk_bytes"],
            resource.RLIMIT_NOFILE: order["open_files"],
            resource.RLIMIT_NPROC: in_use + order["processes"],
            resource.RLIMIT_CORE: 0,
        }
        for kind, most in limits.items():
            hard = resource.getrlimit(kind)[1]
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(kind, (most, most))
        seconds = order["cpu_seconds"]
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))  # SIGXCPU first: SIGKILL would not say why
        own = None if order["isolation"] in SEPARATE else (os.getpid(), 0, -os.getpid())
        environment = {"PATH": "/usr/bin:/bin", "HOME": directory, "TMPDIR": directory, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
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


def _end_all(*_: object) -> None:
    """On SIGTERM: the time is over, or whoever wanted the program is gone."""
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
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass  # none is left to reap
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
