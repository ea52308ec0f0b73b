"""The critic as its trainer sees it: a history of requests, each applied once even if servers die.

Rank 0 of the actor keeps the journal. A critic that comes back from an older checkpoint is asked what it was trained on (`critic_status`)
and gets again what it lacks, in order. The other ranks only ask for values; they wait until rank 0 has done that.
"""

from __future__ import annotations

import threading

import numpy as np

from aligner.errors import RequestRejected, ServerError, ServerTimeout
from aligner.servers import wire
from aligner.servers.config import ClientConfig
from aligner.servers.journal import Journal
from aligner.servers.link import Server, ServiceLink
from aligner.servers.payloads import (
    START,
    CriticStatus,
    SaveRequest,
    StatusRequest,
    TrainIdentity,
    TrainReply,
    ValuesRequest,
    check_mark,
    describe,
    digest_of,
    position,
)
from aligner.servers.recovery import Patience, Recovery
from aligner.types import TokenBatch, ValueBatch

TURN_BACK = (
    "Restart the critic server: it then begins at the checkpoint that belongs to the policy's, and gets from the journal what came after"
)


class CriticHistory:
    """One client's history with the critic of run `run`. Without a journal it can only ask for values.

    `mark` names the last request of the history: values and checkpoints are those of a critic that was trained last on it.
    """

    def __init__(self, link: ServiceLink, config: ClientConfig, *, run: str, journal: Journal | None) -> None:
        self.mark = START
        self.recovery = Recovery(link, config, self._fit)
        self._link = link
        self._config = config
        self._run = run
        self._journal = journal
        self._saving: tuple[int, str] | None = None  # step and mark of a checkpoint that was begun
        self._pair_before = 0
        self._lock = threading.Lock()

    def values(self, batch: TokenBatch) -> np.ndarray:
        """float32 [B, S]"""
        inputs = wire.encode_values_request(ValuesRequest(batch=batch, after=self.mark))
        return self.recovery.call(wire.CRITIC_INFER, inputs, self._config.request_timeout_seconds)["values"]

    def train(self, batch: ValueBatch, step: int) -> TrainReply:
        """Add a request to the history. It is in the journal before it is sent.

        Raises RequestRejected for one that is bad in itself; the history is then as before.
        """
        self.recovery.connect()
        arrays = wire.encode_value_batch(batch)
        last_step, last_part = position(self.mark)
        part = last_part + 1 if step == last_step else 0
        identity = TrainIdentity(run=self._run, step=step, part=part, digest=digest_of(arrays), previous=self.mark)
        self._own_journal().append(identity, arrays)
        self.mark = identity.mark
        inputs = wire.encode_train(arrays, identity)
        try:
            return wire.decode_trained(self.recovery.call(wire.CRITIC_TRAIN, inputs, self._config.train_timeout_seconds))
        except RequestRejected:  # a bad request, which no server will ever apply
            self.mark = identity.previous
            self._own_journal().drop_after(identity.previous)
            raise

    def begin_save(self, step: int) -> None:
        """The critic copies its current state for a checkpoint, and continues."""
        self._saving = (step, self.mark)
        self._save(SaveRequest(step=step, after=self.mark, wait=False))

    def save(self, step: int) -> str:
        """The path of the complete checkpoint of `step`: the one that was begun, or a new one."""
        begun = self._saving is not None and self._saving[0] == step
        path = self._save(SaveRequest(step=step, after=self._saving[1] if begun else self.mark, wait=True))
        self._saving = None if begun else self._saving
        return path

    def resume(self, mark: str) -> None:
        """Continue after `mark`, the critic's mark in an actor's checkpoint; later entries of the journal are forgotten.

        Raises ServerError if the critic was trained on something else, and the journal does not lead from there to here.
        """
        self.follow(mark)
        self._own_journal().drop_after(mark)
        self.recovery.reconnect()

    def follow(self, mark: str) -> None:
        """Ask from now on for values of a critic that was trained last on `mark`."""
        self.mark = check_mark("mark", mark)

    def checkpointed(self, step: int) -> None:
        """Checkpoints of both sides for `step` are complete: the journal keeps what came after those *before* them.

        One more than needed, because a critic that starts at this moment may have chosen those before already.
        """
        self._own_journal().trim(self._pair_before)
        self._pair_before = step

    def _own_journal(self) -> Journal:
        if self._journal is None:
            raise ServerError("this client has no journal: it can ask the critic for values, but neither train nor save it")
        return self._journal

    def _save(self, request: SaveRequest) -> str:
        return wire.decode_saved(self.recovery.call(wire.CRITIC_SAVE, wire.encode_save(request), self._config.train_timeout_seconds))

    def _fit(self, server: Server, patience: Patience) -> None:
        """Bring a server that was just met to `self.mark`, or wait until rank 0 has done so."""
        if self._journal is not None:
            self._bring(server, self._journal, patience)
            return
        count = -1
        while (status := self._status(server)).mark != self.mark:
            if position(status.mark) >= position(self.mark):
                raise ServerError(self._misfit(server, status))
            if status.count != count:
                count = status.count
                patience.renew()
            if not patience.left:
                raise ServerTimeout(f"nothing changed for {patience.seconds:g} s: {self._misfit(server, status)}")
            self._link.pause(self._config.retry_delay_seconds)

    def _bring(self, server: Server, journal: Journal, patience: Patience) -> None:
        target, status = self.mark, self._status(server)
        missing = journal.between(status.mark, target)
        is_behind = position(status.mark) < position(target)
        if missing is None and not (status.accepts_gap and is_behind):
            raise ServerError(self._misfit(server, status))
        if missing is None:
            missing = [entry for entry in journal.leading_to(target) if position(entry.mark) > position(status.mark)]
            print(f"warning: critic.accept_gap: {self._misfit(server, status)}", flush=True)
            status = self._status(server, adopt=missing[0].previous if missing else target)
        elif missing:
            steps = f"steps {missing[0].step} to {missing[-1].step}" if len(missing) > 1 else f"step {missing[0].step}"
            print(f"critic: {server.registration.describe()} is sent again what it lacks: {steps}, from the journal", flush=True)
        self._continue_save(server, status.mark)
        for identity in missing:
            inputs = wire.encode_train(journal.read(identity), identity)
            self._link.call(server, wire.CRITIC_TRAIN, inputs, self._config.train_timeout_seconds)
            patience.renew()
            self._continue_save(server, identity.mark)

    def _continue_save(self, server: Server, mark: str) -> None:
        """A checkpoint that was begun with the server before must be begun again where the critic passes its mark."""
        if self._saving is not None and self._saving[1] == mark:
            request = SaveRequest(step=self._saving[0], after=mark, wait=False)
            self._link.call(server, wire.CRITIC_SAVE, wire.encode_save(request), self._config.train_timeout_seconds)

    def _status(self, server: Server, adopt: str | None = None) -> CriticStatus:
        inputs = wire.encode_status_request(StatusRequest(run=self._run, adopt=adopt))
        return wire.decode_status(self._link.call(server, wire.CRITIC_STATUS, inputs, self._config.train_timeout_seconds))

    def _misfit(self, server: Server, status: CriticStatus) -> str:
        """Which side has what, and what to do."""
        origin = f"its checkpoint of step {status.checkpoint_step}" if status.checkpoint_step else "its first weights"
        both = (
            f"{server.registration.describe()} began at {origin} and was trained last on {describe(status.mark)}, "
            f"while this actor's critic was trained last on {describe(self.mark)}"
        )
        here, there = position(self.mark), position(status.mark)
        if there > here:
            return f"{both}: the critic is ahead of an actor that has resumed from an older checkpoint. {TURN_BACK}"
        if there == here:
            return f"{both}: they do not have the same past. {TURN_BACK}"
        entries = [] if self._journal is None else self._journal.entries
        held = f"holds steps {entries[0].step} to {entries[-1].step}" if entries else "holds nothing"
        return (
            f"{both}: the critic is behind, and the journal {held}. Resume both sides from a step that both have a checkpoint of (move "
            "the policy's newer ones away), or set critic.accept_gap=true to go on with a critic that was not trained on what lies between"
        )
