"""One listening port for all gloo groups of a process, and none where there is nobody to talk to.

torch gives every gloo group a device of its own, that is a listening port and a thread: some fifteen for each rank, without authentication.
Groups may share a device (gloo tells their connections apart), so those of a process do.
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
        """As torch's own, with whatever arguments its version gives: the options have a field for each name."""
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
    """Wait until this process's gloo threads hold no tensor of Python any more. Every rank calls it, after its last collective.

    A thread lets go of a collective's tensors only after that has been waited for, and needs the interpreter to do so. If that is
    ending by then, Python ends the thread inside a C++ destructor, which aborts the process after all was done. A group has one thread,
    which works in order: after a barrier, which has no tensors, all before it are free. Raises RuntimeError if a rank does not come.
    """
    cpu = torch.device("cpu")
    for group in list(distributed_c10d._world.pg_map):
        backend = group._get_backend(cpu) if cpu in group._device_types else None
        if isinstance(backend, _Gloo):
            options = BarrierOptions()
            options.timeout = timeout
            backend.barrier(options).wait()


def share_devices(*, is_alone: bool) -> None:
    """Let all gloo groups that are made from now on have the same devices. Called before the first; again it does nothing.

    `is_alone`: this process is the only rank, so nobody may connect.
    """
    if not SharedGloo.devices:
        before = set(_listening())
        names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        SharedGloo.devices = [_Gloo.create_device(interface=name) for name in names] or [_Gloo.create_default_device()]
        if is_alone:
            for descriptor in set(_listening()) - before:
                _close(descriptor)
            for device in SharedGloo.devices:  # kept to the end: older gloo aborts when it takes back a socket that has gone
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(device))
    distributed_c10d.ProcessGroupGloo = SharedGloo


def _listening() -> Iterator[int]:
    """Descriptors of this process that are TCP sockets which listen."""
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as copy:
                if copy.family != socket.AF_UNIX and copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    yield int(name)
        except OSError:  # no socket, or closed meanwhile
            continue


def _close(descriptor: int) -> None:
    """Close a listening socket of gloo's, which keeps its number: something that never has an event has it from now on."""
    silent = os.eventfd(0)
    os.dup2(silent, descriptor, inheritable=False)
    os.close(silent)
