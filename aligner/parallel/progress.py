"""Records what one rank is doing: phase, step, its current collective and the last one it left.

The process's one recorder is made by `aligner.run.session` and handed to the loop and the server. `aligner.parallel.watch` writes the
record to the run directory and notices when it stands still.

`marked` wraps `torch.distributed`'s functions, there and where Megatron-Core bound them at import. A mark costs about two microseconds.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from aligner.telemetry import recording

IDLE = "idle"  # the phase of a server that waits for a request
WAIT_FOR_SERVERS = "wait for servers"
# Phases in which a rank waits for a server, outside any collective, with the client's own deadline. They do not count as stalls.
AWAITING = frozenset({WAIT_FOR_SERVERS, "critic_wait"})


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """A process group: `key` is its name on every rank, `label` its purpose, `members` are global ranks."""

    key: str
    label: str
    members: tuple[int, ...]


@dataclass(slots=True)  # not frozen: one is made for every collective, and freezing would double the cost
class Collective:
    """One call of `torch.distributed`. `sequence` numbers the group's collectives from 1, the same on all members; 0 for point-to-point.

    `number` counts this rank's calls. `peers` are the global ranks of the other ends, for point-to-point. `since`: seconds since 1970.
    """

    name: str
    number: int
    group: GroupInfo
    sequence: int
    peers: tuple[int, ...]
    since: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A rank's record at one moment; times in seconds since 1970, `still_seconds` without any progress."""

    phase: str
    phase_since: float
    step: int
    last_progress: float
    still_seconds: float
    inside: Collective | None
    last_left: Collective | None
    counts: dict[str, int]  # collectives entered, by group


@dataclass(slots=True)
class _Thread:
    """The collectives of one thread."""

    inside: Collective | None = None
    last_async: Collective | None = None


class Progress:
    """The recorder, for any thread. Entering or leaving a phase (of the rank) or a collective, and `heartbeat`, are progress."""

    def __init__(self) -> None:
        self._threads: defaultdict[int, _Thread] = defaultdict(_Thread)
        self._phase, self._phase_since = "start", time.time()
        self.step = 0  # the training step that began last; 0 before the first
        self._last_left: Collective | None = None
        self._number = 0
        self._counts: dict[str, int] = {}
        self._still_since = time.monotonic()

    @property
    def inside(self) -> Collective | None:
        """The collective that the calling thread is in."""
        return self._threads[threading.get_ident()].inside

    @contextmanager
    def phase(self, name: str) -> Iterator[dict[str, object]]:
        """The block is phase `name` and a span of the trace, whose arguments this yields. The phase around it continues afterwards."""
        before, start = self._phase, time.perf_counter()
        arguments: dict[str, object] = {"step": self.step} if self.step else {}
        self.enter_phase(name)
        try:
            yield arguments
        finally:
            if name != IDLE:
                recording.add(name, start, **arguments)
            self.enter_phase(before)

    def enter_phase(self, name: str) -> None:
        self._phase, self._phase_since = name, time.time()
        self.heartbeat()

    def at_step(self, step: int) -> None:
        """Training step `step` (or a server's running number of operations) begins."""
        self.step = step
        self.heartbeat()
        recording.flush()

    def heartbeat(self) -> None:
        self._still_since = time.monotonic()

    def enter(self, name: str, group: GroupInfo, peers: tuple[int, ...] = ()) -> None:
        """Record the call of a collective, or with `peers` of a point-to-point operation."""
        self._number += 1
        sequence = 0
        if not peers:
            sequence = self._counts[group.key] = self._counts.get(group.key, 0) + 1
        self._threads[threading.get_ident()].inside = Collective(name, self._number, group, sequence, peers, time.time())
        self.heartbeat()

    def leave(self, *, is_async: bool) -> None:
        """Record its return; after `is_async` a wait may follow."""
        own = self._threads[threading.get_ident()]
        self._last_left, own.inside = own.inside, None
        if is_async:
            own.last_async = self._last_left
        self.heartbeat()

    def wait(self, call: Callable[[], Any]) -> Any:
        """Record a wait for an asynchronous operation: assumed to be this thread's newest, which completes after the others."""
        own = self._threads[threading.get_ident()]
        own.inside = own.last_async
        self.heartbeat()
        try:
            return call()
        finally:
            own.inside = None
            self.heartbeat()

    @property
    def still_seconds(self) -> float:
        return time.monotonic() - self._still_since

    def snapshot(self) -> Snapshot:
        """The record of this moment. Callable from another thread."""
        still = self.still_seconds
        entered = [thread.inside for thread in list(self._threads.values()) if thread.inside is not None]
        return Snapshot(
            phase=self._phase,
            phase_since=self._phase_since,
            step=self.step,
            last_progress=time.time() - still,
            still_seconds=still,
            inside=min(entered, key=lambda collective: collective.since, default=None),  # of two, the one that lasts longer
            last_left=self._last_left,
            counts=dict(self._counts),
        )


def from_json(record: dict[str, Any]) -> Snapshot:
    """The inverse of `dataclasses.asdict`, from a health file."""

    def collective(record: dict[str, Any] | None) -> Collective | None:
        if record is None:
            return None
        group = GroupInfo(**{**record["group"], "members": tuple(record["group"]["members"])})
        return Collective(**{**record, "group": group, "peers": tuple(record["peers"])})

    return Snapshot(**{**record, "inside": collective(record["inside"]), "last_left": collective(record["last_left"])})


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
    wait = dist.Work.wait

    def marked_wait(*args: Any, **kwargs: Any) -> Any:
        return wait(*args, **kwargs) if progress.inside is not None else progress.wait(functools.partial(wait, *args, **kwargs))

    replace(dist.Work, "wait", marked_wait)
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
