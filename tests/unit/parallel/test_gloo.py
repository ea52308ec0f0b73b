"""Gloo groups of one process share its devices whatever arguments torch's version gives them."""

from __future__ import annotations

import runpy
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import distributed_c10d

import aligner.parallel

MINUTE = timedelta(minutes=1)


class _Options:
    """Of torch before 2.14."""

    __slots__ = ("_devices", "_threads", "_timeout")


class _NewerOptions(_Options):
    __slots__ = ("enable_reconfigure",)


def _group(monkeypatch: pytest.MonkeyPatch, options: type, **named: Any) -> SimpleNamespace:
    """What the class of this project gives to a torch whose groups have these options."""

    class Gloo:
        Device = object
        _Options = options

        def __init__(self, store: object, rank: int, size: int, given: object = None, **own: Any) -> None:
            self.place, self.given, self.own = (store, rank, size), given, own

    monkeypatch.setattr(distributed_c10d, "ProcessGroupGloo", Gloo)
    names = runpy.run_path(str(Path(aligner.parallel.__path__[0]) / "gloo.py"))
    names["SharedGloo"].devices = ["one", "two"]
    return names["SharedGloo"]("store", 0, 2, **named)


@pytest.mark.parametrize("options, more", [(_Options, {}), (_NewerOptions, {"enable_reconfigure": False})])
def test_groups_share_the_devices(options: type, more: dict, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder):
    group = _group(monkeypatch, options, timeout=MINUTE, **more)
    assert group.place == ("store", 0, 2) and not group.own
    assert (group.given._devices, group.given._threads, group.given._timeout) == (["one", "two"], 1, MINUTE)
    assert {name: getattr(group.given, name) for name in more} == more
    assert not recwarn.list


def test_what_no_option_holds_costs_the_sharing_and_not_the_group(monkeypatch: pytest.MonkeyPatch):
    with pytest.warns(UserWarning, match="gloo groups cannot share a port in torch .*of_tomorrow"):
        group = _group(monkeypatch, _Options, timeout=MINUTE, of_tomorrow=True)
    assert group.given is None and group.own == {"timeout": MINUTE, "of_tomorrow": True}


def test_a_device_without_its_port_outlives_the_interpreter():
    """Gloo of torch 2.6 aborts when it destroys one."""
    program = """
import gc, weakref
from aligner.parallel import gloo
gloo.share_devices(is_alone=True)
seen = [weakref.ref(device) for device in gloo.SharedGloo.devices]
gloo.SharedGloo.devices.clear()
gc.collect()
print(len(seen), [device for device in seen if device() is None])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "1 []\n"), done.stderr
