"""Marks every collective of a process in its progress record, by wrapping `torch.distributed`'s functions.

Megatron-Core looks most of them up in `torch.distributed` at each call. Those that it bound at import are replaced in its modules. A mark
costs about two microseconds.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from aligner.parallel.progress import GroupInfo, Progress

COLLECTIVES = (
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "_all_gather_base",
    "_reduce_scatter_base",
)
POINT_TO_POINT = {"send": "dst", "recv": "src", "isend": "dst", "irecv": "src"}
BATCHED = "batch_isend_irecv"
# A P2POp takes these two only, and compares with the names in its own module.
COMPARED = ("isend", "irecv")

Marked = Callable[..., Any]


@contextmanager
def marked(progress: Progress) -> Iterator[None]:
    """Within the block every collective of this process is marked in `progress`. After `torch.distributed` has been initialised."""
    groups = _Groups()
    replaced: list[tuple[ModuleType | type, str, Any]] = []

    def replace(owner: ModuleType | type, name: str, new: Any) -> None:
        replaced.append((owner, name, vars(owner)[name]))
        setattr(owner, name, new)

    stand_ins: dict[Any, Marked] = {}
    for name in (*COLLECTIVES, *POINT_TO_POINT, BATCHED):
        original = vars(dist)[name]
        stand_ins[original] = _stand_in(progress, groups, name, original)
        replace(dist, name, stand_ins[original])
        if name in COMPARED:
            replace(distributed_c10d, name, stand_ins[original])
    for module in [module for name, module in sys.modules.items() if name.startswith("megatron.")]:
        for name, value in list(vars(module).items()):
            if inspect.isfunction(value) and value in stand_ins:
                replace(module, name, stand_ins[value])
    replace(dist.Work, "wait", _marked_wait(progress, dist.Work.wait))
    try:
        yield
    finally:
        for owner, name, original in reversed(replaced):
            setattr(owner, name, original)


class _Groups:
    """The description of each process group, looked up once."""

    def __init__(self) -> None:
        self._known: dict[dist.ProcessGroup, GroupInfo] = {}

    def info(self, group: dist.ProcessGroup | None) -> GroupInfo:
        group = group or dist.group.WORLD
        found = self._known.get(group)
        if found is None:
            members = tuple(dist.get_process_group_ranks(group))
            label = "world" if group is dist.group.WORLD else _label(group.group_desc)
            found = self._known[group] = GroupInfo(group.group_name, label, members)
        return found


def _label(description: str) -> str:
    """Megatron-Core's `TENSOR_MODEL_PARALLEL_GROUP` as `tensor model parallel`."""
    return description.lower().removesuffix("_group").replace("_", " ").replace("undefined", "").strip()


def _stand_in(progress: Progress, groups: _Groups, name: str, original: Marked) -> Marked:
    if name == BATCHED:
        return _marked_batch(progress, groups, original)
    parameters = list(inspect.signature(original).parameters)
    group_at = parameters.index("group")
    async_at = parameters.index("async_op") if "async_op" in parameters else len(parameters)
    always_async = name in COMPARED
    peer_of = _peer_of(POINT_TO_POINT[name], parameters) if name in POINT_TO_POINT else None

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        group = args[group_at] if len(args) > group_at else kwargs.get("group")
        if progress.inside is not None or group is dist.GroupMember.NON_GROUP_MEMBER:  # a part of one, or none of this rank's
            return original(*args, **kwargs)
        info = groups.info(group)
        progress.enter(name, info, () if peer_of is None else peer_of(args, kwargs, info))
        try:
            return original(*args, **kwargs)
        finally:
            progress.leave(is_async=always_async or bool(args[async_at] if len(args) > async_at else kwargs.get("async_op", False)))

    return call


def _peer_of(parameter: str, parameters: list[str]) -> Callable[[tuple, dict, GroupInfo], tuple[int, ...]]:
    at, group_rank = parameters.index(parameter), f"group_{parameter}"

    def peers(args: tuple, kwargs: dict, info: GroupInfo) -> tuple[int, ...]:
        peer = args[at] if len(args) > at else kwargs.get(parameter)
        if peer is None and kwargs.get(group_rank) is not None:
            peer = info.members[kwargs[group_rank]]
        return info.members if peer is None else (peer,)  # `recv` may take from anybody

    return peers


def _marked_batch(progress: Progress, groups: _Groups, original: Marked) -> Marked:
    @functools.wraps(original)
    def call(p2p_op_list: list[dist.P2POp]) -> Any:
        if progress.inside is not None or not p2p_op_list:
            return original(p2p_op_list)
        peers = tuple(sorted({operation.peer for operation in p2p_op_list}))
        progress.enter(BATCHED, groups.info(p2p_op_list[0].group), peers)
        try:
            return original(p2p_op_list)
        finally:
            progress.leave(is_async=True)

    return call


def _marked_wait(progress: Progress, original: Marked) -> Marked:
    def wait(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
        if progress.inside is not None:
            return original(work, *args, **kwargs)
        progress.enter_wait()
        try:
            return original(work, *args, **kwargs)
        finally:
            progress.leave_wait()

    return wait
