"""The filter of system calls of both machines, run step by step as the kernel runs it."""

from __future__ import annotations

import errno
import re
import struct
from pathlib import Path

import pytest

from aligner.rewards.jail import allowed_calls, call_filter

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
