"""Train requests, on disk before they are sent: a server that restarts from an older checkpoint gets them again.

    <folder>/00000007.000.1a2b3c4d5e6f7081.safetensors    step, part and hash of the mark; the tensors as sent, the identity as metadata

Files appear whole or not at all, and are on the disk before `append` returns. The entries form one chain: each names the one before.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from aligner.errors import ServerError
from aligner.files import publish
from aligner.servers.payloads import TrainIdentity, digest_of

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
        """Write one entry behind the one that it names as its previous; earlier entries after that one belong to an abandoned past.

        Raises:
            ServerError: it cannot be written (a full disk, say). The journal is then as it was.
        """
        with self._lock:
            path = self._path(identity)
            fields = {name: str(value) for name, value in asdict(identity).items()}
            contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
            try:
                publish(path, lambda new: new.write_bytes(save(contiguous, metadata=fields)))
            except OSError as error:
                raise ServerError(
                    f"the journal of what the critic is trained on cannot be written: {path}: {error.strerror or error}; step "
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
        """The tensors of an entry. Raises ServerError if they are not those that were written."""
        path = self._path(identity)
        try:
            with safe_open(path, framework="numpy") as file:
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no mapping)
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
        """Its entries, in order."""
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
        raise ServerError(f"{path} is no entry of the journal: {error}; move it away") from error
    return identity
