"""Asynchronous clients of the critic and reward servers: they satisfy `aligner.protocols.Critic` and `RewardModel`.

Every call returns a future at once; `result()` gives the tensors or raises ServerUnreachable, ServerTimeout or RequestRejected. Nothing is
ever swallowed. After a server dies, the client waits for its successor and asks again; each train request is still applied only once.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import torch
from torch import Tensor

from aligner.data.collate import token_batch
from aligner.errors import RequestRejected, ServerError
from aligner.servers import wire
from aligner.servers.access import Access
from aligner.servers.config import ClientConfig
from aligner.servers.history import CriticHistory
from aligner.servers.journal import Journal
from aligner.servers.link import ServiceLink
from aligner.servers.recovery import Recovery
from aligner.servers.registry import Registration, current_attempt
from aligner.servers.worker_thread import WorkerThreads, combine
from aligner.types import Rollout, Scores, TokenBatch, ValueBatch
from aligner.types.rows import num_rows, select_rows

CLOSE_SECONDS = 5.0
WATCH_SECONDS = 1.0

Texts = Callable[[Rollout], tuple[str, str, str | None]]  # prompt, response, answer


class CriticClient:
    """A critic behind `services_dir`. Values are asked for in parallel; train and save requests go one after the other, in order.

    `run` is the run's id. The one client that trains and saves has a `journal`; the others only ask for values. Values are those of the
    critic after all training of which the result was awaited: await values before the next training, and training before the next values.
    """

    def __init__(
        self, services_dir: Path, *, config: ClientConfig, access: Access, run: str, journal: Path | None = None, name: str = "critic"
    ) -> None:
        """Raises ServerError if the journal cannot be opened."""
        self._config = config
        talks = journal is not None
        self._link = ServiceLink(services_dir, name, config, access=access, attempt=current_attempt(), is_talkative=talks)
        self._history = CriticHistory(self._link, config, run=run, journal=None if journal is None else Journal(journal))
        self._infer = WorkerThreads(f"{name}-infer", config.num_threads)
        self._train = WorkerThreads(f"{name}-train", 1)
        self._watch = None if journal is None else WorkerThreads(f"{name}-watch", 1)
        if self._watch is not None:
            self._watch.submit(self._look_now_and_then)
        atexit.register(self.close)  # a thread that is inside torch while the interpreter goes away aborts the process

    @property
    def mark(self) -> str:
        """Names the request that the critic was trained on last; part of an actor's checkpoint."""
        return self._history.mark

    def resume(self, mark: str) -> None:
        """Continue after `mark`, which an actor's checkpoint holds. Only the client with the journal.

        Raises ServerError if the critic was trained on something else and cannot be brought there: it says which checkpoints there are,
        and what to do.
        """
        self._history.resume(mark)

    def follow(self, mark: str) -> None:
        """Ask from now on for values of a critic that was trained last on `mark`."""
        self._history.follow(mark)

    def wait_until_ready(self) -> Registration:
        """Block until the server is there; raises ServerUnreachable after `discovery_timeout_seconds`."""
        return self._link.find(self._config.discovery_timeout_seconds).registration

    def values(self, batch: TokenBatch) -> Future[Tensor]:
        """Values float32 [B, S], asked for in pieces of `rows_per_request` rows."""
        rows, piece = num_rows(batch), self._config.rows_per_request
        parts = [select_rows(batch, start, min(start + piece, rows)) for start in range(0, rows, piece)]
        return combine([self._infer.submit(lambda part=part: torch.from_numpy(self._history.values(part))) for part in parts], torch.cat)

    def train(self, batch: ValueBatch, step: int) -> Future[dict[str, float]]:
        """Train on the whole batch in one request; resolves to the critic's metrics."""
        return self._train.submit(lambda: self._history.train(batch, step).metrics)

    def begin_save(self, step: int) -> Future[None]:
        """Begin a checkpoint of the current critic; resolves when training may continue."""
        return self._train.submit(lambda: self._history.begin_save(step))

    def save(self, step: int) -> Future[str]:
        """Complete a checkpoint, begun or not; resolves to its path on the server's machine."""
        return self._train.submit(lambda: self._history.save(step))

    def checkpointed(self, step: int) -> None:
        """Both sides' checkpoints of `step` are complete; the journal may forget what is older."""
        self._history.checkpointed(step)

    def close(self) -> None:
        """End the threads; calls under way fail with ServerUnreachable. Happens at exit by itself."""
        atexit.unregister(self.close)
        self._link.close()
        for threads in (self._infer, self._train, self._watch):
            if threads is not None:
                threads.close(CLOSE_SECONDS)

    def _look_now_and_then(self) -> None:
        """Bring a new server to where this client is although nobody asks anything of it yet: other ranks may."""
        while not self._link.is_closed:
            self._link.pause(WATCH_SECONDS)
            try:
                self._history.recovery.look()
            except ServerError as error:  # the next call raises it too
                if not self._link.is_closed:
                    print(f"error: {error}", file=sys.stderr, flush=True)
                return


class RewardClient:
    """A reward model or reward function behind `services_dir`.

    `texts(rollout)` gives (prompt, response, answer) for servers that score texts; without it only tokens are sent. `reduce` turns scores
    [B, K] of a model with several attributes into rewards [B].
    """

    def __init__(
        self,
        services_dir: Path,
        *,
        config: ClientConfig,
        access: Access,
        name: str = "reward",
        texts: Texts | None = None,
        reduce: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._config = config
        self._texts = texts
        self._reduce = reduce
        self._link = ServiceLink(services_dir, name, config, access=access, attempt=current_attempt())
        self._recovery = Recovery(self._link, config, lambda server, patience: self._link.probe(server))
        self._threads = WorkerThreads(f"{name}-score", config.num_threads)
        atexit.register(self.close)

    def wait_until_ready(self) -> Registration:
        """Block until the server is there; raises ServerUnreachable after `discovery_timeout_seconds`."""
        return self._recovery.connect()

    def score(self, rollouts: Sequence[Rollout]) -> Future[Scores]:
        """One reward per rollout, asked for in pieces of `rows_per_request` rows."""
        if not rollouts:
            raise ValueError("RewardClient.score: no rollouts were given")
        piece = self._config.rows_per_request
        parts = [rollouts[start : start + piece] for start in range(0, len(rollouts), piece)]
        pieces = [self._threads.submit(lambda part=part: self._scored(part)) for part in parts]
        return combine(pieces, lambda rewards: Scores.of(torch.cat(rewards)))

    def attributes(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """All scores of token sequences, float32 [B, K], as the model gives them. Waits for them; raises what went wrong."""
        piece = self._config.rows_per_request
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
        if self._texts is not None:
            prompts, responses, answers = zip(*(self._texts(rollout) for rollout in rollouts), strict=True)
            texts = wire.RewardTexts(prompts=list(prompts), responses=list(responses), answers=list(answers))
        batch = token_batch([rollout.tokens for rollout in rollouts], 0, extras=[rollout.all_extras for rollout in rollouts])
        scores = self._asked(wire.RewardRequest(batch=batch, texts=texts))
        if self._reduce is not None:
            return self._reduce(scores)
        if scores.shape[1] != 1:
            raise RequestRejected(
                f"reward_model: {scores.shape[1]} attributes per row; give reward.attribute_weights (RewardClient: a `reduce`), to "
                "make one reward of them"
            )
        return scores[:, 0]

    def _asked(self, request: wire.RewardRequest) -> Tensor:
        arrays = self._recovery.call(wire.REWARD_MODEL, wire.encode_reward(request), self._config.request_timeout_seconds)
        return torch.from_numpy(arrays["rewards"])


def weighted_sum(weights: Sequence[float]) -> Callable[[Tensor], Tensor]:
    """A `reduce` for RewardClient: rewards [B] from scores [B, K]. It raises RequestRejected if a row has another number of scores."""
    factors = torch.tensor(list(weights), dtype=torch.float32)

    def reduce(scores: Tensor) -> Tensor:
        if scores.shape[1] != len(factors):
            raise RequestRejected(f"reward_model: {scores.shape[1]} attributes per row, and reward.attribute_weights has {len(factors)}")
        return scores @ factors

    return reduce
