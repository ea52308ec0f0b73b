"""A critic's record of train requests: every request once, in order. Pure bookkeeping; every rank holds one, and all decide the same.

    the request names                       the ledger
    what was applied lately                 gives the recorded reply, and nothing is done
    its own mark as the one before          lets it be applied
    another request at the same place       refuses it: conflict
    a place before the last one applied     refuses it: past
    another mark as the one before          refuses it: gap
    another run                             refuses it: foreign

The ledger is saved inside the critic's checkpoint, so that weights and ledger are always those of one moment.

A client keeps its train requests in a `Journal`, on disk before they are sent: a server that restarts from an older checkpoint gets them
again. Files appear whole or not at all, and the entries form one chain: each names the one before.

    <folder>/00000007.000.1a2b3c4d5e6f7081.safetensors    step, part and hash of the mark; the tensors as sent, the identity as metadata
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from aligner.errors import CheckpointError, ServerError
from aligner.files import publish
from aligner.servers.payloads import START, CriticStatus, TrainIdentity, TrainReply, describe, digest_of, position

NUM_RECORDS = 8  # replies kept: a client repeats only its last request


class Reason(str, Enum):
    """Why a request was refused."""

    foreign = "foreign"
    conflict = "conflict"
    past = "past"
    gap = "gap"
    behind = "behind"
    ahead = "ahead"


class Refused(ServerError):
    """A request that does not fit the applied ones. Nothing has changed, and every rank refuses it."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(f"refused ({reason.value}): {message}")
        self.reason = reason


class Ledger:
    """Starts at the critic's checkpoint of `checkpoint_step` (0: first weights). `accepts_gap`: a client may make it `adopt` a mark."""

    def __init__(self, run: str, *, accepts_gap: bool = False) -> None:
        self.run = run
        self.mark = START
        self.count = 0
        self.checkpoint_step = 0
        self.accepts_gap = accepts_gap
        self._records: deque[tuple[TrainIdentity, TrainReply]] = deque(maxlen=NUM_RECORDS)

    def find(self, identity: TrainIdentity) -> TrainReply | None:
        """The recorded reply if this very request was applied; None if it is to be applied now. Raises Refused otherwise, naming both."""
        asked = f"step {identity.step} part {identity.part}"
        self.check_run(identity.run)
        for applied, reply in self._records:
            if applied.mark == identity.mark:
                return reply
            if (applied.step, applied.part) == (identity.step, identity.part):
                raise Refused(
                    Reason.conflict,
                    f"{asked} was applied with other tensors or after another request: {describe(applied.mark)} after "
                    f"{describe(applied.previous)}; asked for now is {describe(identity.mark)} after {describe(identity.previous)}",
                )
        if (identity.step, identity.part) <= position(self.mark):
            raise Refused(Reason.past, f"{describe(identity.mark)} comes before what was applied last, {describe(self.mark)}")
        if identity.previous != self.mark:
            raise Refused(
                Reason.gap, f"{asked} follows {describe(identity.previous)}, but this critic was trained last on {describe(self.mark)}"
            )
        return None

    def record(self, identity: TrainIdentity, reply: TrainReply) -> None:
        """The request that `find` let through has been applied."""
        self.mark = identity.mark
        self.count += 1
        self.accepts_gap = False  # its history has begun
        self._records.append((identity, reply))

    def adopt(self, mark: str) -> None:
        """Count as trained last on `mark`, whatever came before. Raises Refused unless this critic accepts a gap."""
        if not self.accepts_gap:
            raise Refused(Reason.gap, f"this critic accepts no gap (critic.accept_gap), and was trained last on {describe(self.mark)}")
        self.mark, self.accepts_gap = mark, False
        self._records.clear()

    def check_run(self, run: str) -> None:
        """Raise Refused unless the client belongs to this critic's run."""
        if run != self.run:
            raise Refused(Reason.foreign, f"this critic belongs to run {self.run}, the request to run {run}")

    def check_after(self, mark: str) -> None:
        """Raise Refused unless `mark` is the last applied one."""
        if mark == self.mark:
            return
        here, asked = position(self.mark), position(mark)
        both = f"trained last on {describe(self.mark)}; asked for is the one trained last on {describe(mark)}"
        if asked == here:
            raise Refused(Reason.conflict, f"this critic has another past: {both}")
        reason = Reason.behind if here < asked else Reason.ahead
        raise Refused(reason, f"this critic is {reason.value}: {both}")

    def status(self) -> CriticStatus:
        return CriticStatus(
            run=self.run, mark=self.mark, count=self.count, checkpoint_step=self.checkpoint_step, accepts_gap=self.accepts_gap
        )

    def state(self) -> dict[str, Any]:
        records = [{"identity": asdict(identity), "reply": asdict(reply)} for identity, reply in self._records]
        return {"run": self.run, "mark": self.mark, "count": self.count, "records": records}

    def load_state(self, state: Mapping[str, Any], *, checkpoint_step: int) -> None:
        """Continue from a checkpoint of this run. Raises CheckpointError if it is another run's, or does not fit together."""
        if state["run"] != self.run:
            raise CheckpointError(
                f"the critic's checkpoint of step {checkpoint_step} belongs to run {state['run']}, this is run {self.run}; "
                "to begin with its weights, name it in critic.model.path"
            )
        records = [(TrainIdentity(**record["identity"]), TrainReply(**record["reply"])) for record in state["records"]]
        if records and records[-1][0].mark != state["mark"]:
            raise CheckpointError(f"the critic's checkpoint of step {checkpoint_step}: its ledger does not end with {state['mark']}")
        self.mark, self.count, self.checkpoint_step = state["mark"], state["count"], checkpoint_step
        self._records = deque(records, maxlen=NUM_RECORDS)


SUFFIX = ".safetensors"


class Journal:
    """The entries of one client, in order. Thread-safe; one process writes."""

    def __init__(self, folder: Path) -> None:
        """Read what is there. Raises ServerError if the folder cannot be made, or an entry is damaged."""
        self._folder = folder
        self._lock = threading.Lock()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for unfinished in folder.glob(f".*{SUFFIX}.new"):
                unfinished.unlink()
        except OSError as error:
            raise ServerError(f"the journal {folder} cannot be opened: {error}") from error
        self._entries = [_identity_of(path) for path in sorted(folder.glob(f"*{SUFFIX}"))]

    def append(self, identity: TrainIdentity, arrays: Mapping[str, np.ndarray]) -> None:
        """Write an entry after its previous one, dropping later ones. Raises ServerError, with the journal unchanged, if it cannot."""
        with self._lock:
            path = self._path(identity)
            fields = {name: str(value) for name, value in asdict(identity).items()}
            contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
            try:
                publish(path, lambda new: new.write_bytes(save(contiguous, metadata=fields)))
            except OSError as error:
                raise ServerError(
                    f"the critic's journal cannot be written: {path}: {error.strerror or error}; step "
                    f"{identity.step} was not sent. The file system of the run directory must have room and be writable"
                ) from error
            self._keep([*self._chain(identity.previous), identity])

    def between(self, mark: str, until: str) -> list[TrainIdentity] | None:
        """The entries after `mark` up to that with the mark `until`, in order; None if the journal does not lead there."""
        if mark == until:
            return []
        chain = self.leading_to(until)
        starts = [index for index, entry in enumerate(chain) if entry.previous == mark]
        return chain[starts[0] :] if starts else None

    def leading_to(self, mark: str) -> list[TrainIdentity]:
        """The unbroken chain of entries that ends with this mark, as far back as it goes."""
        with self._lock:
            return self._chain(mark)

    def read(self, identity: TrainIdentity) -> dict[str, np.ndarray]:
        """The tensors of an entry. Raises ServerError if they are not the written ones."""
        path = self._path(identity)
        try:
            with safe_open(path, framework="numpy") as file:
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
        except (OSError, SafetensorError) as error:
            raise ServerError(f"{path}: this entry of the journal cannot be read: {error}") from error
        if digest_of(arrays) != identity.digest:
            raise ServerError(f"{path}: this entry of the journal is damaged: its tensors do not have their digest")
        return arrays

    def drop_after(self, mark: str) -> None:
        """Forget entries after `mark`: the run continues from there differently."""
        with self._lock:
            self._keep(self._chain(mark))

    def trim(self, step: int) -> None:
        """Forget the steps up to this one: checkpoints of both sides hold them."""
        with self._lock:
            self._keep([entry for entry in self._entries if entry.step > step])

    @property
    def entries(self) -> list[TrainIdentity]:
        with self._lock:
            return list(self._entries)

    def _chain(self, mark: str) -> list[TrainIdentity]:
        chain: list[TrainIdentity] = []
        for entry in reversed(self._entries):
            if entry.mark == (chain[-1].previous if chain else mark):
                chain.append(entry)
        return chain[::-1]

    def _keep(self, entries: list[TrainIdentity]) -> None:
        """Remove the files of all others."""
        stay = {self._path(entry) for entry in entries}
        for entry in self._entries:
            if (path := self._path(entry)) not in stay:
                path.unlink(missing_ok=True)
        self._entries = entries

    def _path(self, identity: TrainIdentity) -> Path:
        return self._folder / f"{identity.step:08d}.{identity.part:03d}.{identity.mark.rpartition('.')[2][:16]}{SUFFIX}"


def _identity_of(path: Path) -> TrainIdentity:
    try:
        with safe_open(path, framework="numpy") as file:
            fields = file.metadata()
        identity = TrainIdentity(**{**fields, "step": int(fields["step"]), "part": int(fields["part"])})
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ServerError(f"{path} is not an entry of the journal: {error}; move it away") from error
    return identity
