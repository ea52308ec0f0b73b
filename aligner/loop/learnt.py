"""Counts of the data each step learnt from, summable over a run, and two alarms: nothing is learnt; engine and
trainer log-probs differ too much.

`learnt/tokens` counts tokens with a nonzero weight in the loss of this step's updates (policy gradient: a nonzero advantage).
`learnt/tokens_seen` counts every token once. `learnt/samples` counts the samples learnt from, of `learnt/samples_seen`;
`left_out/<reason>` counts the others by reason (see REASONS).

`GapAlarm` warns or ends the run when a statistic of the gap between engine and trainer stays above a threshold. Importance ratios contain
that gap: a run whose gap grows learns from noise long before its reward shows it. In asynchronous mode the gap includes the staleness of
the rollouts, so set wider thresholds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from aligner.loop.loop import Verdict
from aligner.models.training.guard import UPDATES, GuardConfig, LearntNothing, LogprobGapConfig
from aligner.parallel.collectives import gather_objects
from aligner.reporting.summary import LEFT_OUT, SAMPLES, SEEN, TOKENS, TOKENS_SEEN, is_empty, reasons, totals


def of_lengths(lengths: Tensor, seconds: float) -> dict[str, float]:
    """Tokens per second of a data batch that was computed in `seconds`, and the mean and largest length of its rows. `lengths`: int [B]."""
    tokens, longest = int(lengths.sum()), int(lengths.max())
    return {"data/tokens_per_second": tokens / seconds, "data/length": tokens / len(lengths), "data/length_max": float(longest)}


def accounted(*, samples: int, seen: int, **left_out: int) -> dict[str, float]:
    """The metrics of these counts, without reasons whose count is 0."""
    return {SAMPLES: float(samples), SEEN: float(seen)} | {LEFT_OUT + why: float(count) for why, count in left_out.items() if count}


def of_mask(weighs: Tensor, *, unit: int = 1) -> dict[str, float]:
    """Counts of a data batch. `weighs`: bool [B, S]; every `unit` rows are one sample."""
    rows = weighs.any(dim=1).view(-1, unit).any(dim=1)
    samples, tokens = int(rows.sum()), float(weighs.sum())
    return accounted(samples=samples, seen=len(rows), no_token=len(rows) - samples) | {TOKENS: tokens, TOKENS_SEEN: tokens}


def of_rows(weighs: Tensor, written: Tensor, **reasons: Tensor) -> dict[str, float]:
    """Counts of rollouts: `weighs` as in `of_mask`, among the tokens `written` by the policy. Each reason (bool [B])
    counts the rows not learnt from that no earlier reason names.
    """
    left = ~weighs.any(dim=1)
    seen, samples, counts = len(left), int((~left).sum()), {}
    for why, rows in reasons.items():
        counts[why] = int((left & rows).sum())
        left = left & ~rows
    return accounted(samples=samples, seen=seen, **counts) | {TOKENS: float(weighs.sum()), TOKENS_SEEN: float(written.sum())}


class LearntNothingAlarm:
    """`aligner.loop.loop.Alarm` as `guard.learnt_nothing` sets it. `fingerprint()`: numbers that change with any bit of the weights
    that this rank's optimizer updates; empty if unavailable. Every rank has one and makes the same calls.
    """

    def __init__(self, config: GuardConfig, fingerprint: Callable[[], list[int]]) -> None:
        self._config = config
        self._fingerprint = fingerprint
        self._began = self._step = 0
        self._at_start: list[int] | None = None
        self._in_a_row: list[Mapping[str, float]] = []
        self._counts: dict[str, float] = {}
        self._num_updates = 0.0  # of this start, with a learning rate above 0
        self._has_learnt = False

    @property
    def num_steps(self) -> int:
        """Steps since this start."""
        return self._step - self._began

    def begin(self, step: int) -> None:
        """The run continues after this step with the current weights."""
        self._began = self._step = step
        self._at_start = self._fingerprint()

    def judge(self, step: int, metrics: Mapping[str, float]) -> Verdict:
        """A verdict if the last `learnt_nothing_steps` were empty, or no weight changed in that many since the start."""
        self._step, steps = step, self._config.learnt_nothing_steps
        self._counts = totals([self._counts, metrics])
        self._num_updates += metrics.get(UPDATES, 0.0) * (metrics.get("optim/lr", 0.0) > 0)
        if is_empty(metrics):
            self._in_a_row.append(metrics)
        else:
            self._has_learnt, self._in_a_row = True, []
        why = self._unchanged() if self.num_steps == steps else ""
        if len(self._in_a_row) >= steps:
            why = self._nothing_in(f"the last {steps} steps", totals(self._in_a_row))
            self._in_a_row = []
        return self.verdict(why)

    def whole_run(self, *, has_learnt_before: bool) -> str:
        """The problem of a finished run: no step learnt, or no weight changed. Empty if neither.

        `has_learnt_before`: an earlier start has. Collective.
        """
        if not self._has_learnt and not (self._began and has_learnt_before):
            return self._nothing_in("the whole run", self._counts)
        return "" if self._began else self._unchanged()

    def verdict(self, why: str) -> Verdict:
        """The verdict for `why`; none if it is empty."""
        config = self._config
        if why and config.learnt_nothing is LearntNothing.stop:
            return Verdict(halt=f"{why} (guard.learnt_nothing=stop, guard.learnt_nothing_steps={config.learnt_nothing_steps})")
        return Verdict(note=f"warning: {why}" if why else "")

    def _nothing_in(self, where: str, counts: Mapping[str, float]) -> str:
        why = "; ".join(reasons(counts))
        if not why and not counts.get(TOKENS):
            why = "no token had a weight in a loss"
        elif not why:
            why = "the gradient of every update was 0" if counts.get(UPDATES) else "no update was made"
        seen = f"of {counts[SEEN]:,.0f} samples {why}" if counts.get(SEEN) else why
        return f"nothing was learnt in {where}, to step {self._step}: {seen}"

    def _unchanged(self) -> str:
        """Message that no weight changed; empty if one has, or none should."""
        if not self._num_updates:
            return ""
        now = self._fingerprint()
        found = gather_objects((now != self._at_start, bool(now)))
        if any(changed for changed, _ in found) or not any(known for _, known in found):
            return ""
        return f"no weight changed in {self._num_updates:,.0f} updates to step {self._step}: optimizer.lr is too small, or all are frozen"


class GapAlarm:
    """`aligner.loop.loop.Alarm` as `guard.logprob_gap` sets it. Messages name `command`, which attributes a gap to a layer."""

    def __init__(self, config: LogprobGapConfig, *, command: str) -> None:
        self._config = config
        self._command = command
        self._above = {"warn": 0, "stop": 0}  # steps in a row
        self._warned: int | None = None  # the step of the last warning
        self._has_missed = False

    def judge(self, step: int, metrics: Mapping[str, float]) -> Verdict:
        """A note if the gap was above `warn` for `patience` steps (again after `repeat_every`), a halt if above `stop`."""
        config, name = self._config, self._config.statistic.metric
        if not config.is_on:
            return Verdict()
        if name not in metrics:
            missed_before, self._has_missed = self._has_missed, True
            note = f"warning: step {step} reports no {name}: guard.logprob_gap does not watch such steps"
            return Verdict(note="" if missed_before else note)
        value = metrics[name]
        for threshold in self._above:
            limit = getattr(config, threshold)
            self._above[threshold] = self._above[threshold] + 1 if limit and not value <= limit else 0  # NaN is above everything
        if self._above["stop"] >= config.patience:
            return Verdict(halt=self._text(step, value, "stop"))
        if self._above["warn"] >= config.patience and (self._warned is None or step - self._warned >= config.repeat_every):
            self._warned = step
            return Verdict(note=f"warning: {self._text(step, value, 'warn')}")
        return Verdict()

    def _text(self, step: int, value: float, threshold: str) -> str:
        config, count = self._config, self._above[threshold]
        times = f" ({count} steps in a row)" if count > 1 else ""
        return (
            f"the engine's log-probs are not the trainer's: {config.statistic.metric}={value:.3g} in step {step} is above "
            f"guard.logprob_gap.{threshold}={getattr(config, threshold):g}{times}. Which layer and operation it comes from: {self._command}"
        )
