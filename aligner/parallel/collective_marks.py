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
# A P2POp accepts these two only, and compares them with the names in its own module.
COMPARED = ("isend", "irecv")

Marked = Callable[..., Any]


@contextmanager
def marked(progress: Progress) -> Iterator[None]:
    """Within the block every collective of this process is marked in `progress`. After `torch.distributed` has been initialised."""
    info = functools.cache(_group_info)
    replaced: list[tuple[ModuleType | type, str, Any]] = []

    def replace(owner: ModuleType | type, name: str, new: Any) -> None:
        replaced.append((owner, name, vars(owner)[name]))
        setattr(owner, name, new)

    stand_ins: dict[Any, Marked] = {}
    for name in (*COLLECTIVES, *POINT_TO_POINT, BATCHED):
        original = vars(dist)[name]
        stand_ins[original] = _stand_in(progress, info, name, original)
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


def _group_info(group: dist.ProcessGroup) -> GroupInfo:
    """Labels Megatron-Core's `TENSOR_MODEL_PARALLEL_GROUP` as `tensor model parallel`."""
    described = group.group_desc.lower().removesuffix("_group").replace("_", " ").replace("undefined", "").strip()
    label = "world" if group is dist.group.WORLD else described
    return GroupInfo(group.group_name, label, tuple(dist.get_process_group_ranks(group)))


def _stand_in(progress: Progress, info_of: Callable[[dist.ProcessGroup], GroupInfo], name: str, original: Marked) -> Marked:
    places = {parameter: at for at, parameter in enumerate(inspect.signature(original).parameters)}
    peer = POINT_TO_POINT.get(name, "")

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        def argument(parameter: str) -> Any:
            at = places.get(parameter, len(args))
            return args[at] if at < len(args) else kwargs.get(parameter)

        batch = argument("p2p_op_list") if name == BATCHED else None
        group = batch[0].group if batch else argument("group")
        # The parts of a collective are not marked, nor is a call in a group without this rank, nor an empty batch.
        if progress.inside is not None or group is dist.GroupMember.NON_GROUP_MEMBER or (name == BATCHED and not batch):
            return original(*args, **kwargs)
        info, peers = info_of(group or dist.group.WORLD), ()
        if batch:
            peers = tuple(sorted({operation.peer for operation in batch}))
        elif peer:
            by_group, by_world = argument(f"group_{peer}"), argument(peer)
            known = info.members[by_group] if by_world is None and by_group is not None else by_world
            peers = info.members if known is None else (known,)  # `recv` may accept from any rank
        progress.enter(name, info, peers)
        try:
            return original(*args, **kwargs)
        finally:
            progress.leave(is_async=bool(batch) or name in COMPARED or bool(argument("async_op")))

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
