"""Where a run's rollouts come from where they are sampled while the policy trains (`rollout.asynchronous`)."""

from __future__ import annotations

from aligner.algorithms.asynchronous import AsyncRounds
from aligner.algorithms.objective import ObjectiveConfig
from aligner.algorithms.online import OnlineTask
from aligner.jobs.session import Session
from aligner.losses.correction import Correction
from aligner.protocols import Critic
from aligner.schemas import OnlineRun, TrainGRPO


def rounds_ahead(
    here: Session, config: OnlineRun, task: OnlineTask, *, group_size: int = 1, greedy: bool = False, critic: Critic | None = None
) -> AsyncRounds | None:
    """The rounds of an asynchronous run; None where a run is on-policy: its algorithm samples when it needs rollouts.

    `greedy`: a response of that kind per prompt is needed too. `critic` gives the values where there is one.
    """
    settings = config.rollout.asynchronous
    if not settings.max_staleness:
        return None
    if isinstance(config.algorithm, ObjectiveConfig) and config.algorithm.correction.kind is Correction.none:
        here.say(
            f"warning: algorithm.correction.kind=none with rollout.asynchronous.max_staleness={settings.max_staleness}: what older weights "
            "sampled is learnt from as if the policy had sampled it; truncate, band or mask correct for it (docs/asynchronous.md)"
        )
    takes_more = isinstance(config, TrainGRPO) and config.algorithm.dynamic_sampling
    last = None if takes_more else config.loop.max_steps
    return AsyncRounds(task, group_size, settings, task.engine.gate, greedy=greedy, critic=critic, last=last)
