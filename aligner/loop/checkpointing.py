"""Location, pairing (actor and critic) and retention of a run's checkpoints.

<run>/checkpoints/policy/step_000030, latest, best      the component that runs the loop (reward_model for a reward-model run)
<run>/checkpoints/critic/step_000030, latest            completed first: every policy step has a critic step

Actor and critic are different jobs. At a start each searches the same files for the newest complete pair, independently, at about the same
time. They agree, because every checkpoint that one of them sets aside is one that the other would reject too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from aligner.cluster.run_directory import CRITIC, POLICY
from aligner.errors import CheckpointError, ConfigError, WrongContents
from aligner.loop.loop import BY_TIME, NEWEST_BY_TIME
from aligner.models.checkpoint import checkpoint, files, manifest
from aligner.models.checkpoint.checkpoint import shortage
from aligner.models.training.trainable import TrainableModel
from aligner.parallel.collectives import from_rank_0, gather_objects
from aligner.protocols import Critic
from aligner.run.session import Session
from aligner.run.settings import BestMode, CheckpointConfig, DamagedCheckpoint
from aligner.servers.ledger import Ledger
from aligner.servers.payloads import SaveRequest

UNPAIRED = "unpaired_"
MENDING = "What it lacks must be in the journal, or the run ends (critic.accept_gap=true continues without it)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """The steps that a run resumes after (0: it starts anew), and a message if they are not the newest."""

    policy: int = 0
    critic: int = 0
    message: str = ""


def newest_pair(policy: Path, critic: Path, *, without: Collection[Path] = ()) -> Pair:
    """The newest step that both folders have, ignoring checkpoints in `without`.

    Without a common step: the policy's newest, and the critic's newest up to it. The critic's client then resends the missing steps
    from the journal, or refuses to continue (`servers.client`). `loop.save_every` bounds the steps that a missing partner costs.
    """
    policies, critics = _complete_steps(policy, without), _complete_steps(critic, without)
    if both := sorted(set(policies) & set(critics)):
        step, newest = both[-1], policies[-1]
        message = f"warning: there is no critic checkpoint of step {newest}: the run resumes after step {step}, the newest that has both"
        return Pair(policy=step, critic=step, message=message if newest != step else "")
    if not policies:
        return Pair()
    newest = policies[-1]
    older = [step for step in critics if step <= newest]
    if not older:
        message = f"warning: the policy resumes after step {newest}, there is no critic checkpoint up to it: the critic starts anew"
        return Pair(policy=newest, message=f"{message}. {MENDING}")
    message = f"warning: the policy resumes after step {newest}, the newest critic checkpoint is of step {older[-1]}: it is behind"
    return Pair(policy=newest, critic=older[-1], message=f"{message}. {MENDING}")


def find_pair(session: Session, folders: Sequence[Path], *, verify: bool, mends: bool = True) -> Pair:
    """The steps to resume from; prints a message if they are not the newest. Every rank calls it.

    `folders`: the policy's, and the critic's if any. With `verify` every file of the pair is checked against its SHA-256; damaged
    checkpoints are set aside, never deleted. Raises CheckpointError if no intact one is left: a run that has made checkpoints
    never starts anew by itself. Unless a journal `mends` what a critic lacks, it also raises if there is no step that both have.
    """
    damaged: dict[Path, str] = {}
    pair = from_rank_0(partial(_newest_of, folders, damaged))
    while verify and (found := _damage(folders, pair)):
        damaged |= found
        pair = from_rank_0(partial(_newest_of, folders, damaged))
    told = "; ".join(f"{path}: {what}" for path, what in damaged.items())
    if damaged and not pair.policy:
        raise CheckpointError(f"no intact checkpoint is left to continue from: {told}. Move {folders[0].parent} away to begin anew")
    if damaged:
        from_rank_0(lambda: [files.set_aside(path) for path in damaged])
        session.say(
            f"warning: damaged checkpoints are set aside, as {files.DAMAGED}step_...: {told}. The run continues after step {pair.policy}, "
            "the newest that is intact (run.damaged_checkpoint=fall_back)"
        )
    if not mends and pair.critic != pair.policy:
        raise CheckpointError(
            f"{folders[0]} has step {pair.policy} and {folders[1]} has none that fits: the two are saved together, and nothing makes up "
            f"for a lost one. Move {folders[0].parent} away to begin anew"
        )
    if pair.message:
        session.say(pair.message)
    return pair


def _damage(folders: Sequence[Path], pair: Pair) -> dict[Path, str]:
    """The damage to a pair's checkpoints; empty if none. Every rank calls it and hashes its share."""
    parts = [files.step_directory(folder, step) for folder, step in zip(folders, (pair.policy, pair.critic), strict=False) if step]
    return {path: wrong[0] for path in parts if (wrong := manifest.damage(path, needed=lambda _: True))}


def _newest_of(folders: Sequence[Path], without: Collection[Path]) -> Pair:
    return newest_pair(*folders, without=without) if len(folders) > 1 else Pair(policy=max(_complete_steps(folders[0], without), default=0))


def _complete_steps(folder: Path, without: Collection[Path]) -> list[int]:
    return [step for step, path in files.complete_steps(folder).items() if path not in without]


@dataclass(slots=True)
class _SaveUnderWay:
    """A checkpoint whose files are being written, and the pending request to the critic (on rank 0)."""

    step: int
    files: Sequence[checkpoint.PendingSave]  # in the order in which they are published
    critic_began: Future[None] | None
    critic_ended: Future[str] | None = None


class Resident(Protocol):
    """A critic that is trained in the same processes."""

    @property
    def model(self) -> TrainableModel: ...

    @property
    def tokenizer(self) -> Path:
        """The folder of its tokenizer."""

    def present(self) -> AbstractContextManager[None]:
        """In the block it is on the device. Collective."""


@dataclass(eq=False)
class RunCheckpointer:
    """`aligner.loop.loop.Checkpointer` for one model in a run directory, with the optional critic: behind a server, which computes while
    the GPUs are `given_away`, or a `resident` of the same processes."""

    session: Session
    model: TrainableModel
    _: KW_ONLY
    name: str
    tokenizer: Path
    source: Path | None = None
    config: CheckpointConfig
    critic: Critic | None = None
    resident: Resident | None = None
    given_away: Callable[[], AbstractContextManager[None]] = nullcontext
    damaged: DamagedCheckpoint = DamagedCheckpoint.fall_back

    def __post_init__(self) -> None:
        names = (self.name,) if self.critic is None and self.resident is None else (self.name, CRITIC)
        self._folders = [self.session.directory.checkpoints / folder for folder in names]
        self._published = 0
        self._under_way: _SaveUnderWay | None = None

    def load(self) -> tuple[int, dict[str, Any]]:
        """Restore the newest checkpoint that has its partner, if any; remove partial ones, set damaged ones aside (or raise)."""
        own = self._folders[0]
        warn_of_shortage(self.session, self.model, own, self.config)
        if self.resident is not None:
            warn_of_shortage(self.session, self.resident.model, self._folders[1], self.config)
        from_rank_0(lambda: files.clean(self._folders))
        falls_back = self.damaged is DamagedCheckpoint.fall_back
        mends = self.resident is None
        step = find_pair(self.session, self._folders, verify=self.config.verify and falls_back, mends=mends).policy
        if not step:
            return 0, {}
        how = {"verify": self.config.verify, "falls_back": falls_back}
        if self.resident is not None:
            with self.resident.present():
                _load(self.resident.model, files.step_directory(self._folders[1], step), **how)
        state = _load(self.model, files.step_directory(own, step), **how)
        continued = [own] if self.resident is None else self._folders
        from_rank_0(lambda: [_continue_from(folder, step) for folder in continued])
        self._published = step
        return step, state

    def save(self, step: int, state: dict[str, Any], validation: Mapping[str, float]) -> None:
        """Save the critic and this component. With `checkpoint.asynchronous` the files are written in the background."""
        self._check_metric(validation)
        self.wait()
        began: Future[None] | None = None
        critic = self.critic
        if critic is not None and self.config.asynchronous:
            began = critic.begin_save(step) if self.session.is_first else None
        elif critic is not None:
            with self.given_away():
                from_rank_0(lambda: critic.save(step).result())
        self._under_way = _SaveUnderWay(step=step, files=self._start(step, state, validation), critic_began=began)
        if not self.config.asynchronous:
            self._publish_pair(self._under_way)

    def poll(self) -> bool:
        """Publish the pending checkpoint if every rank has written it. Never waits; raises a writer's error."""
        save = self._under_way
        if save is None:
            return True
        is_written = all(one.is_written for one in save.files)
        if all(gather_objects(is_written)) and from_rank_0(lambda: self._critic_has_ended(save)):
            self._publish_pair(save)
        return self._under_way is None

    def wait(self) -> None:
        """Wait for the pending checkpoint, then publish it."""
        save = self._under_way
        if save is not None:
            with self.given_away() if self.critic is not None else nullcontext():
                from_rank_0(lambda: self._wait_for_critic(save))
            self._publish_pair(save)

    def settle(self) -> int:
        """Publish this component's part of the pending checkpoint, with or without its partner. Returns the last step on disk."""
        if self._under_way is not None:
            self._publish(self._under_way)
        return self._published

    def rescue(self, step: int, state: dict[str, Any]) -> None:
        """Save this component alone: a server may have died."""
        self._publish(_SaveUnderWay(step=step, files=self._start(step, state, {}), critic_began=None))

    def version(self) -> int:
        """Optimizer steps behind the weights, those of a resident included."""
        return self.model.version + (0 if self.resident is None else self.resident.model.version)

    def _start(self, step: int, state: dict[str, Any], validation: Mapping[str, float]) -> list[checkpoint.PendingSave]:
        config_yaml = self.session.config_yaml
        how = {"in_background": self.config.asynchronous, "read_back": self.config.read_back}
        started = []
        if self.resident is not None:
            beside = checkpoint.SaveRequest(step=step, state={}, config_yaml=config_yaml, tokenizer=self.resident.tokenizer)
            with self.resident.present():
                started.append(checkpoint.start_save(self._folders[1], self.resident.model, beside, **how))
        request = checkpoint.SaveRequest(
            step=step, state=state, config_yaml=config_yaml, validation=validation, tokenizer=self.tokenizer, source=self.source
        )
        return [*started, checkpoint.start_save(self._folders[0], self.model, request, **how)]

    def _publish(self, save: _SaveUnderWay) -> None:
        self._under_way = None
        for one in save.files:
            one.publish(self.config.write_timeout_seconds)
        self._published = save.step
        from_rank_0(lambda: keep(self._folders, self.config))

    def _publish_pair(self, save: _SaveUnderWay) -> None:
        """Publish, given that the critic's part, if any, is complete."""
        self._publish(save)
        critic = self.critic
        if critic is not None:
            from_rank_0(lambda: critic.checkpointed(save.step))

    def _check_metric(self, validation: Mapping[str, float]) -> None:
        metric = self.config.best_metric
        if metric and validation and metric not in validation:
            raise ConfigError(f"checkpoint.best_metric={metric}: validation reports {', '.join(sorted(validation))}")

    def _critic_has_ended(self, save: _SaveUnderWay) -> bool:
        """Never waits. The critic answers the first call once its state is copied, the second once its checkpoint is complete."""
        if self.critic is None or save.critic_began is None:
            return True
        if save.critic_ended is None:
            if save.critic_began.done():
                save.critic_began.result()
                save.critic_ended = self.critic.save(save.step)
            return False
        if not save.critic_ended.done():
            return False
        save.critic_ended.result()
        return True

    def _wait_for_critic(self, save: _SaveUnderWay) -> None:
        """`server_client.train_timeout_seconds` limits each request; this deadline covers the whole wait."""
        deadline = time.monotonic() + self.config.write_timeout_seconds
        while not self._critic_has_ended(save):
            asked = [future for future in (save.critic_began, save.critic_ended) if future is not None]
            _, waiting = futures.wait(asked, timeout=max(0.0, deadline - time.monotonic()))
            if waiting:
                seconds = self.config.write_timeout_seconds
                raise CheckpointError(f"the critic did not save step {save.step} within {seconds:.0f} s")


@dataclass(eq=False)
class CriticCheckpointer:
    """Saves the critic, one request at a time, each with its current ledger. Every rank holds one and makes the same calls."""

    session: Session
    model: TrainableModel
    ledger: Ledger
    _: KW_ONLY
    tokenizer: Path
    config: CheckpointConfig
    _under_way: tuple[int, str, checkpoint.PendingSave] | None = field(default=None, init=False)

    @property
    def _folder(self) -> Path:
        return self.session.directory.checkpoints / CRITIC

    def save(self, request: SaveRequest) -> str:
        """The path of a checkpoint for the critic at mark `request.after`. Idempotent. Raises `ledger.Refused` for another state."""
        step, mark = request.step, request.after or self.ledger.mark
        if self._under_way is not None and self._under_way[:2] == (step, mark):
            return self._end() if request.wait else str(self._under_way[2].final)
        if complete := from_rank_0(lambda: self._complete(step, mark)):
            return complete
        self.ledger.check_after(mark)
        self._end()
        state = {"ledger": self.ledger.state()}
        saved = checkpoint.SaveRequest(step=step, state=state, config_yaml=self.session.config_yaml, tokenizer=self.tokenizer)
        began = checkpoint.start_save(
            self._folder, self.model, saved, in_background=self.config.asynchronous, read_back=self.config.read_back
        )
        self._under_way = (step, mark, began)
        return str(began.final) if self.config.asynchronous and not request.wait else self._end()

    def _complete(self, step: int, mark: str) -> str:
        """Path of an existing checkpoint of exactly this critic state, or ""."""
        path = files.step_directory(self._folder, step)
        return str(path) if files.is_complete(path) and _saved_ledger(path)["mark"] == mark else ""

    def _end(self) -> str:
        under_way, self._under_way = self._under_way, None
        return "" if under_way is None else str(under_way[2].publish(self.config.write_timeout_seconds))


def _saved_ledger(path: Path) -> Mapping[str, Any]:
    """The ledger in a critic's checkpoint. Raises CheckpointError if it has none."""
    state = checkpoint.read_state(path)["loop"]
    if "ledger" not in state:
        raise CheckpointError(
            f"{path} does not say what the critic was trained on: it was trained with critic.kind=model, or an earlier version wrote it; "
            "begin a new run with it"
        )
    return state["ledger"]


def load_critic(
    session: Session,
    model: TrainableModel,
    config: CheckpointConfig,
    *,
    accept_gap: bool = False,
    damaged: DamagedCheckpoint = DamagedCheckpoint.fall_back,
) -> Ledger:
    """Restore the critic's checkpoint of the policy's. Returns its ledger, empty if it starts anew. Raises CheckpointError."""
    folder = session.directory.checkpoints / CRITIC
    warn_of_shortage(session, model, folder, config)
    from_rank_0(lambda: files.clean([folder]))
    falls_back = damaged is DamagedCheckpoint.fall_back
    pair = find_pair(session, (session.directory.checkpoints / POLICY, folder), verify=config.verify and falls_back)
    ledger = Ledger(from_rank_0(session.directory.run_id), accepts_gap=accept_gap)
    if pair.critic:
        path = files.step_directory(folder, pair.critic)
        ledger.load_state(from_rank_0(lambda: _saved_ledger(path)), checkpoint_step=pair.critic)
        _load(model, path, verify=config.verify, falls_back=falls_back)
    return ledger


def _load(model: TrainableModel, path: Path, *, verify: bool, falls_back: bool) -> dict[str, Any]:
    """`checkpoint.load`. A checkpoint whose files verify but whose load fails is set aside if the run `falls_back`. The component then
    ends, since its partner holds the other part. The next start of both finds the pair before."""
    try:
        return checkpoint.load(model, path, verify=verify and not falls_back)
    except WrongContents as error:
        if not falls_back:
            raise
        from_rank_0(lambda: files.set_aside(path))
        again = f"it is set aside as {files.DAMAGED}{path.name}; start again to continue from the newest intact one"
        raise CheckpointError(f"{error}; {again} (run.damaged_checkpoint=fall_back)") from error


def warn_of_shortage(session: Session, model: TrainableModel, folder: Path, config: CheckpointConfig) -> None:
    """Warn if the file system has no room for the checkpoints that the run keeps. Every rank calls it."""
    if warning := shortage(model, folder, keep=config.keep):
        session.say(warning)


def keep(folders: list[Path], config: CheckpointConfig) -> None:
    """Point `best` at the best checkpoint. Remove superfluous ones, those of all components together. On one rank.

    Without `config.keep` only those saved by time alone are superfluous, once there are `NEWEST_BY_TIME` newer ones. The newest pair known
    to be intact stays, however old; without one, nothing is removed.
    """
    complete = [files.complete_steps(folder) for folder in folders]
    own = complete[0]
    best = _best_steps(own, config)
    if best:
        files.point(folders[0], files.BEST, own[best[0]])
    latest = (files.pointed_step(folder, files.LATEST) for folder in folders)
    protected = {*best, *(step for step in latest if step is not None)}
    paired = [step for step in own if all(step in steps for steps in complete)]
    if not paired:
        return
    for aside in folders[0].glob(f"{UNPAIRED}step_*"):  # of a history that has been lived again
        if int(aside.name.rpartition("_")[2]) <= paired[-1]:
            files.discard(aside)
    if not config.keep:
        protected |= {step for step in set().union(*complete) if step not in own or not _is_by_time(own[step])}
    sound = next((step for step in reversed(paired) if all(files.is_sound(steps[step]) for steps in complete)), None)
    if sound is None:  # the older ones are all there is to go back to
        return
    protected.add(sound)
    for step in files.steps_to_remove(sorted(set().union(*complete)), paired, keep=config.keep or NEWEST_BY_TIME, protected=protected):
        files.remove_step(folders, step)


def _is_by_time(path: Path) -> bool:
    try:
        return BY_TIME in checkpoint.read_state(path)["loop"]
    except (OSError, ValueError, KeyError, TypeError):  # damaged: whoever loads it says so
        return False


def _best_steps(complete: Mapping[int, Path], config: CheckpointConfig) -> list[int]:
    """Up to `keep_best` validated steps, best first; ties go to the newer."""
    if not config.best_metric:
        return []
    validations = {step: checkpoint.read_state(path)["validation"] for step, path in complete.items()}
    scores = {step: values[config.best_metric] for step, values in validations.items() if config.best_metric in values}
    sign = 1.0 if config.best_mode == BestMode.max else -1.0
    return sorted(scores, key=lambda step: (sign * scores[step], step), reverse=True)[: config.keep_best]


def _continue_from(folder: Path, step: int) -> None:
    """Make `step` the newest of a folder. Later checkpoints belong to a history that this run does not continue."""
    for later, path in files.complete_steps(folder).items():
        if later > step:
            aside = folder / f"{UNPAIRED}{path.name}"
            files.discard(aside)
            path.rename(aside)
    if files.pointed_step(folder, files.LATEST) != step:
        files.point(folder, files.LATEST, files.step_directory(folder, step))
