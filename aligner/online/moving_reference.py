"""A reference policy that is replaced by the trained one every N steps; a resumed run restores it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from torch import Tensor

from aligner.cluster.run_directory import POLICY, REFERENCE
from aligner.loop.session import Session
from aligner.models import checkpoint
from aligner.models import checkpoint_files as files
from aligner.models.policy import MegatronPolicy, ReferencePolicy
from aligner.parallel.collectives import from_rank_0
from aligner.types import MaskedBatch


class CheckpointedReference:
    """`aligner.algorithms.online_dpo.MovingReference`: every reference but the first is a checkpoint of weights alone.

    They are in <run>/checkpoints/reference. No checkpoint of the policy has to be of the same step; those that none of the policy's
    checkpoints continues with are removed.
    """

    def __init__(self, session: Session, policy: MegatronPolicy, frozen: ReferencePolicy, *, verify: bool) -> None:
        self._session = session
        self._policy = policy
        self._frozen = frozen
        self._verify = verify
        self._folder = session.directory.checkpoints / REFERENCE

    def logprobs(self, batch: MaskedBatch) -> Tensor:
        """As `Policy.logprobs`, under the frozen weights."""
        return self._frozen.logprobs(batch)

    def renew(self, step: int) -> None:
        """Freeze the current policy, which has finished `step`. Every rank calls it. Raises CheckpointError if it cannot be written."""
        request = checkpoint.SaveRequest(step=step, state={}, config_yaml=self._session.config_yaml, weights_only=True)
        checkpoint.save(self._folder, self._policy.model, request)
        self._frozen.renew()
        from_rank_0(lambda: remove_unused(self._folder, self._session.directory.checkpoints / POLICY))

    def restore(self, step: int) -> None:
        """Freeze what `renew(step)` wrote. Every rank calls it. Raises CheckpointError if it is not there or damaged."""
        path = files.step_directory(self._folder, step)
        self._frozen.restore(partial(checkpoint.load_same, path=path, verify=self._verify))


def unused(references: Sequence[int], policies: Sequence[int]) -> list[int]:
    """The references (by step, ascending) that no checkpoint of the policy needs: not the last before it, and older than the newest one.

    A checkpoint of the step at which the reference was renewed was saved before that: it needs the one before.
    """
    if not policies:
        return []
    needed = {max((one for one in references if one < step), default=0) for step in policies}
    return [one for one in references if one not in needed and one < max(policies)]


def remove_unused(references: Path, policies: Path) -> None:
    """Remove unused references and leftovers of a killed run from disk. On one rank."""
    files.clean([references])
    for step in unused(list(files.complete_steps(references)), list(files.complete_steps(policies))):
        files.remove_step([references], step)
