"""Finds the checkpoints that a run's components resume from: the newest complete pair.

Actor and critic are different jobs. Each searches the same files independently, at about the same time. They agree, because
every checkpoint that one of them sets aside is one that the other would reject too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from aligner.errors import CheckpointError
from aligner.models.checkpoint import files, manifest
from aligner.parallel.collectives import from_rank_0
from aligner.run.session import Session

MENDING = "What it lacks must be in the journal, or the run ends (critic.accept_gap=true goes on without)"


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
    policies, critics = _steps(policy, without), _steps(critic, without)
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


def find_pair(session: Session, folders: Sequence[Path], *, verify: bool) -> Pair:
    """The steps to resume from; prints a message if they are not the newest. Every rank calls it.

    `folders`: the policy's, and the critic's if any. With `verify` every file of the pair is checked against its SHA-256; damaged
    checkpoints are set aside, never deleted. Raises CheckpointError if no intact one is left: a run that has made checkpoints
    never starts anew by itself.
    """
    damaged: dict[Path, str] = {}
    pair = from_rank_0(partial(_newest, folders, damaged))
    while verify and (found := _damage(folders, pair)):
        damaged |= found
        pair = from_rank_0(partial(_newest, folders, damaged))
    told = "; ".join(f"{path}: {what}" for path, what in damaged.items())
    if damaged and not pair.policy:
        raise CheckpointError(f"no intact checkpoint is left to go on from: {told}. Move {folders[0].parent} away to begin anew")
    if damaged:
        from_rank_0(lambda: [files.set_aside(path) for path in damaged])
        session.say(
            f"warning: damaged checkpoints are set aside, as {files.DAMAGED}step_...: {told}. The run goes on after step {pair.policy}, "
            "the newest that is intact (run.damaged_checkpoint=fall_back)"
        )
    if pair.message:
        session.say(pair.message)
    return pair


def _damage(folders: Sequence[Path], pair: Pair) -> dict[Path, str]:
    """The damage to a pair's checkpoints; empty if none. Every rank calls it and hashes its share."""
    parts = [files.step_directory(folder, step) for folder, step in zip(folders, (pair.policy, pair.critic), strict=False) if step]
    return {path: wrong[0] for path in parts if (wrong := manifest.damage(path, needed=lambda _: True))}


def _newest(folders: Sequence[Path], without: Collection[Path]) -> Pair:
    return newest_pair(*folders, without=without) if len(folders) > 1 else Pair(policy=max(_steps(folders[0], without), default=0))


def _steps(folder: Path, without: Collection[Path]) -> list[int]:
    return [step for step, path in files.complete_steps(folder).items() if path not in without]
