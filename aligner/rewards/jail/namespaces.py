"""A sandboxed program's own file system, process table and network, built without privileges with user namespaces."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Sequence

from aligner.rewards.jail import kernel

WORK = "/sandbox"  # the only place that can be written to
DEVICES = ("null", "zero", "full", "random", "urandom")
LINKS = {"tmp": WORK, "dev/shm": WORK, "dev/fd": "/proc/self/fd"}


def enter_namespaces() -> int:
    """Continue as process 1 of new namespaces, with the same user and group. The process that called stays behind until this one ends.

    Returns a descriptor for `end_with`, to be called after the last change of user. Raises OSError if the kernel does not let this user
    have them.
    """
    is_root = os.geteuid() == 0
    kernel.unshare(
        kernel.NEW_MOUNTS
        | kernel.NEW_PIDS
        | kernel.NEW_NETWORK
        | kernel.NEW_IPC
        | kernel.NEW_HOST_NAME
        | (0 if is_root else kernel.NEW_USER)  # root needs none to build, and could not become another user in one
    )
    if not is_root:
        _keep_user()
    alive, holder = os.pipe()
    first = os.fork()
    if first:
        os.close(alive)
        _, status = os.waitpid(first, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    os.close(holder)
    return alive


def end_with(parent: int) -> None:
    """End when the process that `enter_namespaces` left behind does. A change of user undoes it."""
    kernel.die_with_parent(signal.SIGKILL)
    if select.select([parent], [], [], 0)[0]:  # its end is closed: it was gone before it could be watched
        os._exit(1)


def become(uid: int) -> None:
    """Give up root for this user and group."""
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    kernel.show_process_files(True)


def count_own_processes() -> None:
    """Enter a user namespace, in which the limit on processes counts from 0."""
    kernel.unshare(kernel.NEW_USER)
    _keep_user()


def _keep_user() -> None:
    """In a new user namespace: the same user and group as outside."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"{os.getuid()} {os.getuid()} 1"), ("gid_map", f"{os.getgid()} {os.getgid()} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def build_root(directory: str, readable: Sequence[str], size_bytes: int) -> None:
    """Make an own root of `directory` (an empty one): `readable` paths read-only, some devices, and WORK of at most `size_bytes`.

    Only in mount and process namespaces of its own. Raises OSError.
    """
    kernel.mount("none", "/", flags=kernel.RECURSIVE | kernel.PRIVATE)
    kernel.mount("tmpfs", directory, "tmpfs", kernel.NO_SUID | kernel.NO_DEVICES, "size=1m,mode=755")
    for path in (*readable, *(f"/dev/{name}" for name in DEVICES)):
        _show(path, directory + path)
    for path in ("/proc", WORK):
        os.mkdir(directory + path)
    for name, goal in LINKS.items():
        if not os.path.lexists(f"{directory}/{name}"):  # the interpreter may live below /tmp
            os.symlink(goal, f"{directory}/{name}")
    kernel.make_read_only(directory)
    _mount_processes(f"{directory}/proc")
    kernel.mount("tmpfs", directory + WORK, "tmpfs", kernel.NO_SUID | kernel.NO_DEVICES, f"size={size_bytes},mode=777")
    kernel.change_root(directory)


def _show(path: str, target: str) -> None:
    """The same file, directory or symbolic link at `target`."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        open(target, "x").close()
    kernel.mount(path, target, flags=kernel.BIND | kernel.RECURSIVE)


def _mount_processes(target: str) -> None:
    try:
        kernel.mount("proc", target, "proc", kernel.NO_SUID | kernel.NO_DEVICES | kernel.NO_EXEC)
    except PermissionError:  # inside containers that hide parts of theirs the kernel grants none: /proc stays empty, which programs bear
        pass
