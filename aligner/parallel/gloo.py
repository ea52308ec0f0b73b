"""One listening port for all gloo groups of a process, and none for a process alone.

torch gives every gloo group its own device, a listening port and a thread: some fifteen for each rank, without authentication. Groups may
share a device (gloo distinguishes their connections), and here all groups of a process do.
"""

from __future__ import annotations

import ctypes
import os
import socket
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import BarrierOptions, distributed_c10d

_Gloo = distributed_c10d.ProcessGroupGloo


class SharedGloo(_Gloo):
    """A gloo group on the devices of this process."""

    devices: list[_Gloo.Device] = []

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """Like torch's own, with the arguments of any version: the options have a field for each name."""
        options = _Gloo._Options()
        options._devices = SharedGloo.devices
        options._threads = 1  # `settle` counts on it; collectives of one group run in order
        try:
            for name, value in named.items():
                setattr(options, "_timeout" if name == "timeout" else name, value)
            super().__init__(*arguments, options)
        except (AttributeError, TypeError) as error:
            warnings.warn(f"gloo groups cannot share a port in torch {torch.__version__}, each has one of its own: {error}", stacklevel=2)
            super().__init__(*arguments, **named)


def settle(timeout: timedelta) -> None:
    """Wait until this process's gloo threads hold no Python tensor any more. Every rank calls it, after its last collective.

    A thread releases a collective's tensors only after its wait, and needs the interpreter for that. If the interpreter is ending, Python
    ends the thread inside a C++ destructor, which aborts the process although all work was done. A group has one thread, which works in
    order: a barrier has no tensors, and after it all earlier ones are free. Raises RuntimeError if a rank is missing.
    """
    cpu = torch.device("cpu")
    for group in list(distributed_c10d._world.pg_map):
        backend = group._get_backend(cpu) if cpu in group._device_types else None
        if isinstance(backend, _Gloo):
            options = BarrierOptions()
            options.timeout = timeout
            backend.barrier(options).wait()


def share_devices(*, is_alone: bool) -> None:
    """Let all gloo groups from now on share devices; later calls do nothing. `is_alone`: no other rank, so nothing listens."""
    if not SharedGloo.devices:
        before = set(_listening())
        names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        SharedGloo.devices = [_Gloo.create_device(interface=name) for name in names] or [_Gloo.create_default_device()]
        if is_alone:
            for descriptor in set(_listening()) - before:
                _close(descriptor)
            for device in SharedGloo.devices:  # kept to the end: older gloo aborts when it closes a missing socket
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(device))
    distributed_c10d.ProcessGroupGloo = SharedGloo


def _listening() -> Iterator[int]:
    """The descriptors of this process's listening TCP sockets."""
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as copy:
                if copy.family != socket.AF_UNIX and copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    yield int(name)
        except OSError:  # no socket, or closed meanwhile
            continue


def _close(descriptor: int) -> None:
    """Close a listening socket of gloo, which keeps its number: replace it by a descriptor without events."""
    silent = os.eventfd(0)
    os.dup2(silent, descriptor, inheritable=False)
    os.close(silent)
