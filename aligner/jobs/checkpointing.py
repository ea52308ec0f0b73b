"""Where the checkpoints of a run are, and how the actor's and the critic's stay a pair.

<run>/checkpoints/policy/step_000030, latest      the component that runs the loop (reward_model for a reward-model run)
<run>/checkpoints/critic/step_000030, latest      written first: where the policy has a step, so has the critic
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aligner.jobs.session import Session
from aligner.models import checkpoint
from aligner.models.trainable import TrainableModel
from aligner.parallel.collectives import broadcast_object, from_rank_0
from aligner.protocols import Critic

POLICY, CRITIC, REWARD_MODEL = "policy", "critic", "reward_model"


class RunCheckpointer:
    """`aligner.algorithms.loop.Checkpointer` for one model in a run directory, with a critic behind a server where there is one."""

    def __init__(self, session: Session, model: TrainableModel, *, name: str, tokenizer: Path, critic: Critic | None = None) -> None:
        self._session = session
        self._model = model
        self._folder = session.directory.checkpoints / name
        self._tokenizer = tokenizer
        self._critic = critic

    def load(self) -> tuple[int, dict[str, Any]]:
        """Restore the newest checkpoint of this run, if there is one."""
        latest = checkpoint.find_latest(self._folder)
        if latest is None:
            return 0, {}
        return checkpoint.read_marker(latest)["step"], checkpoint.load(self._model, latest)

    def save(self, step: int, state: dict[str, Any]) -> None:
        """The critic's checkpoint of this step, then this component's."""
        critic = self._critic
        if critic is not None:
            from_rank_0(lambda: critic.save(step).result())
        self.rescue(step, state)

    def rescue(self, step: int, state: dict[str, Any]) -> None:
        """This component's checkpoint alone."""
        request = checkpoint.SaveRequest(step=step, state=state, config_yaml=self._session.config_yaml, tokenizer=self._tokenizer)
        checkpoint.save(self._folder, self._model, request)

    def version(self) -> int:
        """How many optimizer steps made the weights."""
        return self._model.version


def load_critic(session: Session, model: TrainableModel) -> int:
    """Restore the critic's checkpoint that belongs to the policy's newest one; 0 where the run starts anew.

    Where that step is missing (the critic died before it could save) the newest older one is taken, or where there is none the critic
    starts anew; both are said. The actor's `loop.save_every` bounds how far behind it can be.
    """
    policy = checkpoint.find_latest(session.directory.checkpoints / POLICY)
    if policy is None:
        return 0
    step = checkpoint.read_marker(policy)["step"]
    folder = session.directory.checkpoints / CRITIC
    found = broadcast_object(_newest_up_to(folder, step) if session.is_first else None)
    if found is None:
        session.say(f"warning: the policy resumes after step {step}, there is no critic checkpoint up to it: the critic starts anew")
        return 0
    critic_step = checkpoint.read_marker(found)["step"]
    if critic_step != step:
        session.say(f"warning: the policy resumes after step {step}, the newest critic checkpoint is of step {critic_step}: it is behind")
    checkpoint.load(model, found)
    return critic_step


def _newest_up_to(folder: Path, step: int) -> Path | None:
    complete = [marker.parent for marker in folder.glob(f"step_*/{checkpoint.MARKER}")]
    steps = {checkpoint.read_marker(path)["step"]: path for path in complete}
    usable = [number for number in steps if number <= step]
    return steps[max(usable)] if usable else None
