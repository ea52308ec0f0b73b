"""A sandboxed program's own file system, process table and network, built without privileges with user namespaces."""

from __future__ import annotations

import os
from collections.abc import Sequence

from aligner.rewards.jail import kernel

NOBODY = 65534
WORK = "/sandbox"  # the only place that can be written to
PAGE_BYTES = 4096  # at least what a file with anything in it takes
DEVICES = ("null", "zero", "full", "random", "urandom")
LINKS = {"tmp": WORK, "dev/shm": WORK, "dev/fd": "/proc/self/fd"}


def enter_namespaces() -> None:
    """Continue as process 1 of new namespaces, with the same user. The process that called stays behind until this one ends.

    Raises OSError if the kernel does not let this user have them.
    """
    kernel.unshare(
        kernel.NEW_MOUNTS | kernel.NEW_PIDS | kernel.NEW_NETWORK | kernel.NEW_IPC | kernel.NEW_HOST_NAME | kernel.NEW_CONTROL_GROUPS
    )
    first = os.fork()
    if first:
        _, status = os.waitpid(first, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def become(uid: int) -> None:
    """Give up root for this user and group."""
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    kernel.show_process_files(True)


def enter_user_namespace() -> None:
    """Enter a user namespace, in which there is this user only and the limit on processes counts from 0. Root is NOBODY there.

    So a program has no capabilities in it: exec drops them for every user but root. Raises OSError.
    """
    uid, gid = os.geteuid(), os.getegid()  # before: afterwards this process has no user until it is mapped
    kernel.unshare(kernel.NEW_USER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid or NOBODY} {uid} 1"), ("gid_map", f"{gid or NOBODY} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def build_root(directory: str, readable: Sequence[str], size_bytes: int) -> None:
    """Make an own root of `directory` (an empty one): `readable` paths read-only, some devices, and WORK of at most `size_bytes`, which
    bound the number of files too.

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
    kernel.mount(
        "tmpfs",
        directory + WORK,
        "tmpfs",
        kernel.NO_SUID | kernel.NO_DEVICES,
        f"size={size_bytes},nr_inodes={max_files(size_bytes)},mode=777",
    )
    kernel.change_root(directory)


def max_files(size_bytes: int) -> int:
    """Files and directories that WORK of this size may hold: empty ones take kernel memory too."""
    return max(64, size_bytes // PAGE_BYTES)


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
