"""Asynchronous clients of the critic and reward servers: they satisfy `aligner.protocols.Critic` and `RewardModel`.

Every call returns a future at once; `result()` gives the tensors or raises ServerUnreachable, ServerTimeout or RequestRejected. After a
server dies, the client waits for its successor and asks again; each train request is still applied only once.
"""

from __future__ import annotations

import atexit
import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from aligner.data.collate import token_batch
from aligner.errors import RequestRejected, ServerError, ServerTimeout
from aligner.servers import payloads, wire
from aligner.servers.access import Access
from aligner.servers.config import ClientConfig
from aligner.servers.ledger import Journal
from aligner.servers.link import Patience, Recovery, Server, ServiceLink, WorkerThreads, combine
from aligner.servers.registry import Registration, current_attempt
from aligner.types import Rollout, Scores, TokenBatch, ValueBatch
from aligner.types.rows import num_rows, take_rows

CLOSE_SECONDS = 5.0
WATCH_SECONDS = 1.0

Texts = Callable[[Rollout], tuple[str, str, str | None]]  # prompt, response, answer


TURN_BACK = (
    "Restart the critic server: it then begins at the checkpoint that belongs to the policy's, and gets from the journal what came after"
)


class CriticHistory:
    """A client's history with run `run`'s critic up to `mark`. Without a journal it only asks for values. Its calls wait."""

    def __init__(self, link: ServiceLink, config: ClientConfig, *, run: str, journal: Journal | None) -> None:
        self.mark = payloads.START
        self.recovery = Recovery(link, config, self._fit)
        self._link = link
        self._config = config
        self._run = run
        self._journal = journal
        self._saving: tuple[int, str] | None = None  # step and mark of a checkpoint that was begun
        self._pair_before = 0

    def ask_values(self, batch: TokenBatch) -> np.ndarray:
        inputs = wire.encode_values_request(payloads.ValuesRequest(batch=batch, after=self.mark))
        return self.recovery.call(wire.CRITIC_INFER, inputs, self._config.request_timeout_seconds)["values"]

    def train_now(self, batch: ValueBatch, step: int) -> payloads.TrainReply:
        """Add a request to the history. It is in the journal before it is sent. Raises RequestRejected and removes a bad one."""
        self.recovery.connect()
        arrays = wire.encode_value_batch(batch)
        last_step, last_part = payloads.position(self.mark)
        part = last_part + 1 if step == last_step else 0
        identity = payloads.TrainIdentity(run=self._run, step=step, part=part, digest=payloads.digest_of(arrays), previous=self.mark)
        self._own_journal().append(identity, arrays)
        self.mark = identity.mark
        inputs = arrays | wire.encode_fields(identity)
        try:
            reply = self.recovery.call(wire.CRITIC_TRAIN, inputs, self._config.train_timeout_seconds)
            return payloads.TrainReply(loss_mean=float(reply["loss_mean"][0]), metrics=json.loads(reply["metrics"][0]))
        except RequestRejected:  # a bad request, which no server will ever apply
            self.mark = identity.previous
            self._own_journal().drop_after(identity.previous)
            raise

    def begin_save_now(self, step: int) -> None:
        """The critic copies its current state for a checkpoint, and continues."""
        self._saving = (step, self.mark)
        self._save(payloads.SaveRequest(step=step, after=self.mark, wait=False))

    def save_now(self, step: int) -> str:
        """The path of the complete checkpoint of `step`: the one that was begun, or a new one."""
        begun = self._saving is not None and self._saving[0] == step
        path = self._save(payloads.SaveRequest(step=step, after=self._saving[1] if begun else self.mark, wait=True))
        self._saving = None if begun else self._saving
        return path

    def resume(self, mark: str) -> None:
        """Continue after `mark`, forgetting later entries. Raises ServerError, with the remedy, if the critic has another past."""
        self.follow(mark)
        self._own_journal().drop_after(mark)
        self.recovery.reconnect()

    def follow(self, mark: str) -> None:
        """Ask from now on for values of a critic that was trained last on `mark`."""
        self.mark = payloads.check_mark("mark", mark)

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

    def _save(self, request: payloads.SaveRequest) -> str:
        reply = self.recovery.call(wire.CRITIC_SAVE, wire.encode_fields(request), self._config.train_timeout_seconds)
        return reply["path"][0].decode()

    def _fit(self, server: Server, patience: Patience) -> None:
        """Bring a server that was just met to `self.mark`, or wait until rank 0 has done so."""
        if self._journal is not None:
            self._bring(server, self._journal, patience)
            return
        count = -1
        while (status := self._status(server)).mark != self.mark:
            if payloads.position(status.mark) >= payloads.position(self.mark):
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
        is_behind = payloads.position(status.mark) < payloads.position(target)
        if missing is None and not (status.accepts_gap and is_behind):
            raise ServerError(self._misfit(server, status))
        if missing is None:
            missing = [entry for entry in journal.leading_to(target) if payloads.position(entry.mark) > payloads.position(status.mark)]
            print(f"warning: critic.accept_gap: {self._misfit(server, status)}", flush=True)
            status = self._status(server, adopt=missing[0].previous if missing else target)
        elif missing:
            steps = f"steps {missing[0].step} to {missing[-1].step}" if len(missing) > 1 else f"step {missing[0].step}"
            print(f"critic: {server.registration.describe()} is sent again what it lacks: {steps}, from the journal", flush=True)
        self._continue_save(server, status.mark)
        for identity in missing:
            inputs = journal.read(identity) | wire.encode_fields(identity)
            self._link.call(server, wire.CRITIC_TRAIN, inputs, self._config.train_timeout_seconds)
            patience.renew()
            self._continue_save(server, identity.mark)

    def _continue_save(self, server: Server, mark: str) -> None:
        """A checkpoint that was begun with the server before must be begun again where the critic passes its mark."""
        if self._saving is not None and self._saving[1] == mark:
            request = payloads.SaveRequest(step=self._saving[0], after=mark, wait=False)
            self._link.call(server, wire.CRITIC_SAVE, wire.encode_fields(request), self._config.train_timeout_seconds)

    def _status(self, server: Server, adopt: str | None = None) -> payloads.CriticStatus:
        inputs = wire.encode_fields(payloads.StatusRequest(run=self._run, adopt=adopt))
        reply = self._link.call(server, wire.CRITIC_STATUS, inputs, self._config.train_timeout_seconds)
        return payloads.CriticStatus(**json.loads(reply["status"][0]))

    def _misfit(self, server: Server, status: payloads.CriticStatus) -> str:
        """Which side has what, and what to do."""
        origin = f"its checkpoint of step {status.checkpoint_step}" if status.checkpoint_step else "its first weights"
        both = (
            f"{server.registration.describe()} began at {origin} and was trained last on {payloads.describe(status.mark)}, "
            f"while this actor's critic was trained last on {payloads.describe(self.mark)}"
        )
        here, there = payloads.position(self.mark), payloads.position(status.mark)
        if there > here:
            return f"{both}: the critic is ahead of an actor that has resumed from an older checkpoint. {TURN_BACK}"
        if there == here:
            return f"{both}: they do not have the same past. {TURN_BACK}"
        entries = [] if self._journal is None else self._journal.entries
        held = f"holds steps {entries[0].step} to {entries[-1].step}" if entries else "holds nothing"
        return (
            f"{both}: the critic is behind, and the journal {held}. Resume both sides from a step that both have a checkpoint of (move "
            "the policy's newer ones away), or set critic.accept_gap=true to continue without the training in between"
        )


class CriticClient(CriticHistory):
    """A critic behind `services_dir`. Values are asked for in parallel; train and save requests go one after the other, in order.

    `run` is the run's id. The one client that trains and saves has a `journal`; the others only ask for values. Values are those of the
    critic after all training of which the result was awaited: await values before the next training, and training before the next values.
    """

    def __init__(self, services_dir: Path, *, config: ClientConfig, access: Access, run: str, journal: Path | None = None) -> None:
        """Raises ServerError if the journal cannot be opened."""
        link = ServiceLink(services_dir, "critic", config, access=access, attempt=current_attempt(), is_talkative=journal is not None)
        super().__init__(link, config, run=run, journal=None if journal is None else Journal(journal))
        self._threads = {"infer": WorkerThreads("critic-infer", config.num_threads), "train": WorkerThreads("critic-train", 1)}
        if journal is not None:
            self._threads["watch"] = WorkerThreads("critic-watch", 1)
            self._threads["watch"].submit(self._look_now_and_then)
        atexit.register(self.close)  # a thread that is inside torch while the interpreter goes away aborts the process

    def wait_until_ready(self) -> Registration:
        """Block until the server is there; raises ServerUnreachable after `discovery_timeout_seconds`."""
        return self._link.find(self._config.discovery_timeout_seconds).registration

    def values(self, batch: TokenBatch) -> Future[Tensor]:
        """Values float32 [B, S], asked for in pieces of `rows_per_request` rows."""
        rows, piece = num_rows(batch), self._config.rows_per_request
        parts = [take_rows(batch, slice(start, min(start + piece, rows))) for start in range(0, rows, piece)]
        return combine(
            [self._threads["infer"].submit(lambda part=part: torch.from_numpy(self.ask_values(part))) for part in parts], torch.cat
        )

    def train(self, batch: ValueBatch, step: int) -> Future[dict[str, float]]:
        """Train on the whole batch in one request; resolves to the critic's metrics."""
        return self._threads["train"].submit(lambda: self.train_now(batch, step).metrics)

    def begin_save(self, step: int) -> Future[None]:
        """Begin a checkpoint of the current critic; resolves when training may continue."""
        return self._threads["train"].submit(lambda: self.begin_save_now(step))

    def save(self, step: int) -> Future[str]:
        """Complete a checkpoint, begun or not; resolves to its path on the server's machine."""
        return self._threads["train"].submit(lambda: self.save_now(step))

    def close(self) -> None:
        """End the threads; calls under way fail with ServerUnreachable. Happens at exit by itself."""
        atexit.unregister(self.close)
        self._link.close()
        for threads in self._threads.values():
            threads.close(CLOSE_SECONDS)

    def _look_now_and_then(self) -> None:
        """Bring a new server to this client's mark even before this client's next request: other ranks may ask first."""
        while not self._link.is_closed:
            self._link.pause(WATCH_SECONDS)
            try:
                self.recovery.look()
            except ServerError as error:  # the next call raises it too
                if not self._link.is_closed:
                    print(f"error: {error}", file=sys.stderr, flush=True)
                return


@dataclass(eq=False)
class RewardClient:
    """A reward model or function. `texts(rollout)`: (prompt, response, answer) for servers of texts. `reduce`: [B, K] -> [B]."""

    services_dir: Path
    _: KW_ONLY
    config: ClientConfig
    access: Access
    name: str = "reward"
    texts: Texts | None = None
    reduce: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        self._link = ServiceLink(self.services_dir, self.name, self.config, access=self.access, attempt=current_attempt())
        self._recovery = Recovery(self._link, self.config, lambda server, patience: self._link.probe(server))
        self._threads = WorkerThreads(f"{self.name}-score", self.config.num_threads)
        atexit.register(self.close)

    def wait_until_ready(self) -> Registration:
        """Block until the server is there; raises ServerUnreachable after `discovery_timeout_seconds`."""
        return self._recovery.connect()

    def score(self, rollouts: Sequence[Rollout]) -> Future[Scores]:
        """One reward per rollout, asked for in pieces of `rows_per_request` rows."""
        if not rollouts:
            raise ValueError("RewardClient.score: no rollouts were given")
        piece = self.config.rows_per_request
        parts = [rollouts[start : start + piece] for start in range(0, len(rollouts), piece)]
        pieces = [self._threads.submit(lambda part=part: self._scored(part)) for part in parts]
        return combine(pieces, lambda rewards: Scores.of(torch.cat(rewards)))

    def attributes(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """All scores of token sequences, float32 [B, K], as the model gives them. Waits for them; raises the error of a failed request."""
        piece = self.config.rows_per_request
        parts = [wire.RewardRequest(batch=token_batch(rows[start : start + piece], 0)) for start in range(0, len(rows), piece)]
        pieces = [self._threads.submit(lambda part=part: self._asked(part)) for part in parts]
        return torch.cat([one.result() for one in pieces])

    def close(self) -> None:
        """End the threads; calls under way fail with ServerUnreachable. Happens at exit by itself."""
        atexit.unregister(self.close)
        self._link.close()
        self._threads.close(CLOSE_SECONDS)

    def _scored(self, rollouts: Sequence[Rollout]) -> Tensor:
        texts = None
        if self.texts is not None:
            prompts, responses, answers = zip(*(self.texts(rollout) for rollout in rollouts), strict=True)
            texts = wire.RewardTexts(prompts=list(prompts), responses=list(responses), answers=list(answers))
        batch = token_batch([rollout.tokens for rollout in rollouts], 0, extras=[rollout.all_extras for rollout in rollouts])
        scores = self._asked(wire.RewardRequest(batch=batch, texts=texts))
        if self.reduce is not None:
            return self.reduce(scores)
        if scores.shape[1] != 1:
            raise RequestRejected(f"reward_model: {scores.shape[1]} attributes per row; set reward.attribute_weights to combine them")
        return scores[:, 0]

    def _asked(self, request: wire.RewardRequest) -> Tensor:
        arrays = self._recovery.call(wire.REWARD_MODEL, wire.encode_reward(request), self.config.request_timeout_seconds)
        return torch.from_numpy(arrays["rewards"])


def weighted_sum(weights: Sequence[float]) -> Callable[[Tensor], Tensor]:
    """A `reduce` for RewardClient: rewards [B] from scores [B, K]. It raises RequestRejected if a row has another number of scores."""
    factors = torch.tensor(list(weights), dtype=torch.float32)

    def reduce(scores: Tensor) -> Tensor:
        if scores.shape[1] != len(factors):
            raise RequestRejected(f"reward_model: {scores.shape[1]} attributes per row, and reward.attribute_weights has {len(factors)}")
        return scores @ factors

    return reduce
