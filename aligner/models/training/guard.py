"""The response to a loss, a gradient or a reward that is not finite.

`stop` ends the run after its last whole step. `skip` leaves the update out. `roll_back` ends every component; the restarted run resumes
from the last checkpoint of all components, without the training step of the bad batch. A critic behind a server leaves its update out
whatever the setting, and reports that in its reply: the actor decides for both.

An update with finite loss and gradient that leaves non-finite or absurdly large parameters cannot be taken back, since no copy of main
weights and moments is kept: `skip` acts as `roll_back`, and none of those weights are saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from aligner.errors import AT_LEAST_1, FINITE, NOT_NEGATIVE, ConfigError, RollBack, RunHalted, check_range

UPDATES = "optim/updates"  # that were made
SKIPPED = "optim/skipped"
SKIPPED_IN_A_ROW = "optim/skipped_in_a_row"
OVERFLOWS = "optim/overflows"  # updates left out because a float16 gradient overflowed; only in metrics of such a model, as the scale
LOSS_SCALE = "optim/loss_scale"
SPOILT = "optim/spoilt"  # updates that were made and left parameters that are not sound; only in metrics of a model that has such


class NonFinite(str, Enum):
    """What a loss or a gradient that is not finite leads to."""

    stop = "stop"
    skip = "skip"
    roll_back = "roll_back"


class NonFiniteReward(str, Enum):
    """What a reward that is not finite leads to."""

    stop = "stop"
    skip = "skip"


class LearntNothing(str, Enum):
    """What updates that teach nothing lead to."""

    stop = "stop"
    warn = "warn"


class GapStatistic(str, Enum):
    """Which statistic of a step's |engine log-prob - trainer log-prob| an alarm looks at; all in nats per token."""

    mean = "mean"
    p50 = "p50"
    p90 = "p90"
    p99 = "p99"
    p999 = "p999"
    max = "max"

    @property
    def metric(self) -> str:
        return "rollout/logprob_gap" + ("" if self is GapStatistic.mean else f"_{self.value}")


@dataclass(kw_only=True, slots=True)
class LogprobGapConfig:
    """The alarm over the gap between engine and trainer: see `docs/agreement.md`."""

    statistic: GapStatistic = GapStatistic.mean  # which statistic of |engine log-prob - trainer log-prob| is watched, in nats per token
    warn: float = 0.0  # nats above which the run warns; 0: never
    stop: float = 0.0  # nats above which the run ends, after the step is saved; 0: never
    patience: int = 1  # steps in a row above the bound, before anything happens
    repeat_every: int = 50  # steps until a warning is repeated

    def __post_init__(self) -> None:
        check_range(self, "guard.logprob_gap", FINITE, "warn", "stop", note=" (0 is off)")
        if 0 < self.stop <= self.warn:
            raise ConfigError(f"guard.logprob_gap.stop={self.stop}: must be above warn={self.warn}, or 0")
        check_range(self, "guard.logprob_gap", AT_LEAST_1, "patience", "repeat_every")

    @property
    def is_on(self) -> bool:
        return bool(self.warn or self.stop)


@dataclass(kw_only=True, slots=True)
class GuardConfig:
    """NaN and infinity in losses, gradients and rewards (`docs/running.md`), runs that learn nothing, a gap between engine and trainer."""

    non_finite: NonFinite = NonFinite.stop  # in a loss or gradient: end the run, leave the update out, or restart without the step
    max_skips: int = 3  # updates in a row that may be left out; one more ends the run
    max_roll_backs: int = 3  # roll-backs in the whole run; one more ends it
    max_weight: float = 1e6  # largest magnitude of a trained parameter after an update; 0: any that is finite
    reward: NonFiniteReward = NonFiniteReward.stop  # in a reward: end the run, or skip (such a response gets no weight)
    learnt_nothing: LearntNothing = LearntNothing.stop  # what happens if updates are empty or change no weight: end the run, or warn
    learnt_nothing_steps: int = 10  # updates in a row after which guard.learnt_nothing applies; also at the end of the run
    logprob_gap: LogprobGapConfig = field(default_factory=LogprobGapConfig)

    def __post_init__(self) -> None:
        check_range(self, "guard", NOT_NEGATIVE, "max_skips", "max_roll_backs")
        check_range(self, "guard", FINITE, "max_weight", note=" (0: any finite weight)")
        check_range(self, "guard", AT_LEAST_1, "learnt_nothing_steps")


class Guard:
    """The guard of one model's updates on one rank; every rank's decides the same."""

    def __init__(self, config: GuardConfig) -> None:
        self._config = config
        self.max_weight = config.max_weight
        self.skipped_in_a_row = 0

    def accept(self) -> None:
        """An update was made."""
        self.skipped_in_a_row = 0

    def refuse(self, what: str) -> None:
        """An update was not made. Returns if the run continues without it. Raises RunHalted, or RollBack for the current step."""
        self.skipped_in_a_row += 1
        _leave_out(self._config, what, self.skipped_in_a_row)

    def spoilt(self, what: str) -> None:
        """An update was made and left bad parameters. Raises RunHalted or RollBack."""
        _give_up(self._config, what)


class ReportingGuard(Guard):
    """The guard of a model behind a server: it leaves updates out, counts them, and leaves the decision to its client (`judge_reply`)."""

    def refuse(self, what: str) -> None:
        self.skipped_in_a_row += 1
        print(f"guard: {what}; the update is left out and reported", flush=True)

    def spoilt(self, what: str) -> None:
        self.skipped_in_a_row += 1  # every later update is one of these weights too
        print(f"guard: {what}; this is reported, and these weights are not saved", flush=True)


def _leave_out(config: GuardConfig, what: str, in_a_row: int, step: int | None = None) -> None:
    """Return if the run continues without an update (of training step `step`), the last of `in_a_row` left out."""
    if config.non_finite is NonFinite.roll_back:
        raise RollBack(what, step)
    if config.non_finite is NonFinite.stop:
        raise RunHalted(f"{what} (guard.non_finite=stop)")
    if in_a_row > config.max_skips:
        raise RunHalted(f"{what}: {in_a_row} updates in a row (guard.max_skips={config.max_skips})")


def _give_up(config: GuardConfig, what: str, step: int | None = None) -> None:
    """End the run, or have it go back to its newest checkpoint, after an update (of training step `step`) that cannot be taken back."""
    unsaved = f"{what}; it cannot be taken back: nothing of these weights is saved, the newest checkpoint is from before"
    if config.non_finite is NonFinite.stop:
        raise RunHalted(f"{unsaved} (guard.non_finite=stop)")
    raise RollBack(f"{unsaved}, and the run goes back to it (guard.non_finite={config.non_finite.value})", step)


def judge_reply(config: GuardConfig, metrics: Mapping[str, float], *, step: int) -> None:
    """Decide on a served critic's updates that were left out of training step `step`, or spoilt it, by its reply's metrics.

    Raises RunHalted or RollBack, as a `Guard` would. Every rank calls it with the same metrics.
    """
    if metrics.get(SPOILT, 0.0):
        _give_up(
            config, f"an update of the critic in step {step} left parameters that are not finite or absurd (see the critic's log)", step
        )
    skipped = int(metrics[SKIPPED]) if SKIPPED in metrics else 0
    if not skipped:
        return
    what = f"the critic left out {skipped} updates of step {step}: their losses or gradients were not finite (see the critic's log)"
    _leave_out(config, what, int(metrics[SKIPPED_IN_A_ROW]), step)
