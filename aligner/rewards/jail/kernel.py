"""The system calls that a sandbox is made of, as Linux numbers them. Every failure is an OSError that names the call."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence

NOBODY = 65534
_NEW_USER = 0x10000000
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_LANDLOCK_VERSION = 3  # the first that governs truncation
_LANDLOCK_RIGHTS = 0x7FFF  # all that this version knows
_LANDLOCK_READ = 0b1101  # execute, read files and directories
_LANDLOCK_FILE = 0b111 | 1 << 14  # rights that are of files: execute, write, read, truncate
_SET_DEATH_SIGNAL, _SET_DUMPABLE, _SET_SECCOMP, _SET_SECURE_BITS, _SET_SUBREAPER, _SET_NO_NEW_PRIVILEGES = 1, 4, 22, 28, 36, 38
_FILTER, _NO_ROOT = 2, 3  # the second with its lock


def become(uid: int) -> None:
    """Give up root for this user and group."""
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    show_process_files(True)


def enter_user_namespace() -> None:
    """Enter a user namespace, in which there is this user only and the limit on processes counts from 0.

    So a program has no capabilities in it: exec drops them for every user but root. Raises OSError.
    """
    uid, gid = os.geteuid(), os.getegid()  # before: afterwards this process has no user until it is mapped
    _checked("unshare", _libc().unshare(_NEW_USER))
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def die_with_parent(signal_number: int) -> None:
    """Be sent this signal when the thread that started this process ends."""
    _control("PR_SET_PDEATHSIG", _SET_DEATH_SIGNAL, signal_number)


def show_process_files(shown: bool) -> None:
    """Whether this process's user may open its files in /proc; a change of user forbids it until the next exec."""
    _control("PR_SET_DUMPABLE", _SET_DUMPABLE, int(shown))


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends."""
    _control("PR_SET_CHILD_SUBREAPER", _SET_SUBREAPER, 1)


def make_root_ordinary() -> None:
    """From the next exec on root has no capabilities."""
    _control("PR_SET_SECUREBITS", _SET_SECURE_BITS, _NO_ROOT)


def filter_calls(program: bytes) -> None:
    """Let a classic BPF program judge every system call of this process and its descendants from now on; no new privileges by exec."""

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]

    _control("PR_SET_NO_NEW_PRIVS", _SET_NO_NEW_PRIVILEGES, 1)
    _control("PR_SET_SECCOMP", _SET_SECCOMP, _FILTER, ctypes.byref(Program(length=len(program) // 8, code=program)))


def restrict_files(readable: Sequence[str], writable: Sequence[str]) -> None:
    """Let this process and its descendants use files below these paths only (Landlock, Linux 6.2; `writable` ones are readable too)."""

    class Ruleset(ctypes.Structure):
        _fields_ = [("handled", ctypes.c_uint64)]

    class Rule(ctypes.Structure):
        _pack_ = 1
        _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]

    version = _libc().syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if 0 < version < _LANDLOCK_VERSION:
        raise OSError(
            errno.ENOSYS, f"Landlock here is version {version}, which lets files be cut short; it needs {_LANDLOCK_VERSION} (Linux 6.2)"
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
