"""Which system calls a sandboxed program may not make, as a seccomp filter: no sockets, and no hands on other processes.

Refused calls fail with EPERM. If the program has no process namespace of its own, it may send signals to itself and its own process
group only: it runs as the same user as the run, whose processes `kill(-1)` would end.
"""

from __future__ import annotations

import errno
import struct

# by machine: architecture of seccomp_data, and the numbers of what is refused
_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_REFUSED = {  # socket, ptrace, process_vm_readv, process_vm_writev, io_uring_setup, pidfd_getfd
    "x86_64": (41, 101, 310, 311, 425, 438),
    "aarch64": (198, 117, 270, 271, 425, 438),
}
_SIGNALS = {"x86_64": (62, 200, 234), "aarch64": (129, 130, 131)}  # kill, tkill, tgkill: the first argument says whom
_OTHER_SIGNALS = {"x86_64": (129, 297, 424), "aarch64": (138, 240, 424)}  # rt_sigqueueinfo, rt_tgsigqueueinfo, pidfd_send_signal
_X32 = 0x40000000  # numbers from here on are another table of calls on x86_64
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER, _MACHINE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in seccomp_data; of a 64-bit argument the low half
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM


def call_filter(machine: str, *, only_signals_to: tuple[int, ...] | None) -> bytes:
    """The filter's code for `machine` (of os.uname).

    `only_signals_to`: the process ids (0: the own group; negative: a group) that may be sent signals; None: all that the kernel lets it.
    Raises OSError if the machine's system calls are not known here.
    """
    if machine not in _ARCHITECTURE:
        raise OSError(errno.ENOSYS, f"no system call filter for {machine}, only for {', '.join(_ARCHITECTURE)}")
    code = [_step(_LOAD, _MACHINE), _step(_EQUAL, _ARCHITECTURE[machine], yes=1), _step(_RETURN, _REFUSE), _step(_LOAD, _NUMBER)]
    code += [*_refuse(_AT_LEAST, _X32)]
    refused = _REFUSED[machine] + (() if only_signals_to is None else _OTHER_SIGNALS[machine])
    for number in refused:
        code += _refuse(_EQUAL, number)
    if only_signals_to is not None:
        judged = [_step(_LOAD, _FIRST_ARGUMENT)]
        for pid in only_signals_to:
            judged += [_step(_EQUAL, pid & 0xFFFFFFFF, no=1), _step(_RETURN, _ALLOW)]
        judged.append(_step(_RETURN, _REFUSE))
        for number in _SIGNALS[machine]:
            code += [_step(_EQUAL, number, no=len(judged)), *judged]
    return b"".join([*code, _step(_RETURN, _ALLOW)])


def _refuse(test: int, value: int) -> list[bytes]:
    """Refuse where the loaded number passes the test."""
    return [_step(test, value, no=1), _step(_RETURN, _REFUSE)]


def _step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    """One instruction: code, how many to skip where a test holds and where not, its constant."""
    return struct.pack("=HBBI", code, yes, no, value)
