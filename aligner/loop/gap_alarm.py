"""The alarm over the gap between engine and trainer: says so, or ends the run, where a statistic of it stays above a threshold.

Importance ratios start from that gap, and a run whose gap grows learns from noise long before its reward shows it. With rollouts of older
weights (asynchronous mode) the gap has their age in it too, so thresholds are to be wider there.
"""

from __future__ import annotations

from collections.abc import Mapping

from aligner.loop.loop import Verdict
from aligner.models.guard import LogprobGapConfig


class GapAlarm:
    """`aligner.loop.loop.Alarm` as `guard.logprob_gap` sets it. `command` is what attributes a gap to a layer, for messages."""

    def __init__(self, config: LogprobGapConfig, *, command: str) -> None:
        self._config = config
        self._command = command
        self._above = {"warn": 0, "stop": 0}  # steps in a row
        self._warned: int | None = None  # the step of the last warning
        self._has_missed = False

    def judge(self, step: int, metrics: Mapping[str, float]) -> Verdict:
        """A note where the gap has been above `warn` for `patience` steps (again after `repeat_every`), a halt where above `stop`."""
        config, name = self._config, self._config.statistic.metric
        if not config.is_on:
            return Verdict()
        if name not in metrics:
            return self._missed(step, name)
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

    def _missed(self, step: int, name: str) -> Verdict:
        """Said once: a step without the metric is not watched."""
        if self._has_missed:
            return Verdict()
        self._has_missed = True
        return Verdict(note=f"warning: step {step} reports no {name}: guard.logprob_gap does not watch such steps")
