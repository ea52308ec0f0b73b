"""Failures that spoil a run without ending it: rules over the metrics (`diagnosis_rules.py`), judged per step or afterwards.

A rule compares medians over WINDOW steps, so that one outlier is not a finding. It is judged once its metrics have enough steps.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from aligner.reporting.jsonl import StepMetrics

WINDOW = 10  # steps
REPEAT_EVERY = 100  # steps after which a finding that still holds is repeated
METRIC_AREA = "diagnosis/"


class NotJudged(Exception):
    """Why a rule cannot be judged yet, or not at all in this run."""


class Series:
    """The finite values of one metric, with their steps."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.steps = array("q")
        self.values = array("d")
        self.blocks = array("d")  # the median of every WINDOW values in turn

    def add(self, step: int, value: float) -> None:
        """Steps only grow."""
        self.steps.append(step)
        self.values.append(value)
        if len(self.values) % WINDOW == 0:
            self.blocks.append(self.now)

    @property
    def start(self) -> float:
        return median(self.values[:WINDOW])

    @property
    def now(self) -> float:
        return median(self.values[-WINDOW:])

    @property
    def before(self) -> float:
        """Median of the WINDOW values before those."""
        return median(self.values[-2 * WINDOW : -WINDOW])

    @property
    def rose(self) -> bool:
        """Whether it is now above most of the first values."""
        return self.now > sorted(self.values[:WINDOW])[-2]

    @property
    def last_steps(self) -> str:
        return _span(self.steps[-WINDOW:])

    def course(self, unit: str = "") -> str:
        """`rollout/x went from 1.2 (steps 1-10) to 0.1 nats (steps 41-50)`."""
        unit, first_steps = unit and f" {unit}", _span(self.steps[:WINDOW])
        return f"{self.name} went from {self.start:.3g} (steps {first_steps}) to {self.now:.3g}{unit} (steps {self.last_steps})"


class History:
    """The metrics of a run so far, by name."""

    def __init__(self) -> None:
        self._series: dict[str, Series] = {}

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Steps must increase. Values that are not finite are ignored: they have no median, and another guard handles them."""
        for name, value in metrics.items():
            if math.isfinite(value) and not name.startswith("time/"):
                if name not in self._series:
                    self._series[name] = Series(name)
                self._series[name].add(step, value)

    def of(self, *names: str, least: int = WINDOW) -> Series:
        """The series of the first of these metrics that the run has. Raises NotJudged if it has none of them, or too few values."""
        found = next((self._series[name] for name in names if name in self._series), None)
        if found is None:
            raise NotJudged(f"the run has no {' or '.join(names)}")
        if len(found.values) < least:
            raise NotJudged(f"{found.name} has {len(found.values)} of the required {least} values")
        return found

    def below(self, prefix: str, *, least: int) -> list[Series]:
        """All series with this prefix and enough values. Raises NotJudged as `of` does."""
        names = [name for name in self._series if name.startswith(prefix)]
        if not names:
            raise NotJudged(f"the run has no {prefix}*")
        return [self.of(name, least=least) for name in names]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One failure. `judge` gives the evidence (empty: no failure), or raises NotJudged."""

    name: str
    title: str
    judge: Callable[[History], str]
    cause: str
    remedy: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A rule's finding: the steps after which it held, and the evidence after the last of them."""

    rule: Rule
    steps: Sequence[int]
    evidence: str

    def text(self) -> str:
        return f"{self.rule.title}: {self.evidence}. Likely cause: {self.rule.cause}. Remedy: {self.rule.remedy}"

    def record(self) -> dict[str, object]:
        rule = self.rule
        steps = {"first_step": self.steps[0], "last_step": self.steps[-1], "num_steps": len(self.steps)}
        said = {"evidence": self.evidence, "cause": rule.cause, "remedy": rule.remedy}
        return {"rule": rule.name, "title": rule.title, **steps, **said}


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """The rules' results for a run, which were judged after `num_steps` steps: findings, and for each other rule, by name, why it could
    not be judged."""

    num_steps: int
    last_step: int
    findings: Sequence[Finding]
    not_judged: Mapping[str, str]

    def when(self, finding: Finding) -> str:
        """`31-50 (20 of 120, not at the end)`: the steps of one of the findings."""
        gone = "" if finding.steps[-1] == self.last_step else ", not at the end"
        return f"{_span(finding.steps)} ({len(finding.steps)} of {self.num_steps}{gone})"

    def text(self) -> str:
        lines = [] if self.findings else [f"nothing found in {self.num_steps} steps"]
        for finding in self.findings:
            rule = finding.rule
            parts = {"steps": self.when(finding), "evidence": finding.evidence, "cause": rule.cause, "remedy": rule.remedy}
            lines += [f"{rule.name}: {rule.title}", *(f"  {label:<8}  {text}" for label, text in parts.items()), ""]
        return "\n".join([*lines, *(f"not judged: {name}: {reason}" for name, reason in self.not_judged.items())])

    def record(self) -> dict[str, object]:
        return {
            "num_steps": self.num_steps,
            "findings": [finding.record() for finding in self.findings],
            "not_judged": dict(self.not_judged),
        }


class Watch:
    """Judges the rules step by step, and remembers what was reported."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = rules
        self._history = History()
        self._said: dict[str, int] = {}  # step of the last time, by rule
        self.not_judged: dict[str, str] = {}  # why, after the last step

    def follow(self, records: Iterable[StepMetrics]) -> None:
        """Continue after these steps of an earlier start; their findings were reported then."""
        for record in records:
            self._history.add(record.step, record.values)
            for rule in self._rules:
                if METRIC_AREA + rule.name in record.values:
                    self._is_due(rule.name, record.step)

    def pass_over(self, step: int, metrics: Mapping[str, float]) -> None:
        """Remember a step without judging it; steps increase."""
        self._history.add(step, metrics)

    def step(self, step: int, metrics: Mapping[str, float]) -> list[Finding]:
        """Findings after a step; steps increase."""
        self.pass_over(step, metrics)
        self.not_judged = {}
        found = []
        for rule in self._rules:
            try:
                if evidence := rule.judge(self._history):
                    found.append(Finding(rule=rule, steps=[step], evidence=evidence))
            except NotJudged as reason:
                self.not_judged[rule.name] = str(reason)
        return found

    def to_say(self, findings: Iterable[Finding]) -> list[str]:
        """One line for each that is new, or was reported long ago."""
        return [
            f"warning: {finding.text()} ({finding.rule.name} in docs/diagnosis.md)"
            for finding in findings
            if self._is_due(finding.rule.name, finding.steps[-1])
        ]

    def _is_due(self, name: str, step: int) -> bool:
        due = name not in self._said or step - self._said[name] >= REPEAT_EVERY
        if due:
            self._said[name] = step
        return due


def metrics_of(findings: Iterable[Finding]) -> dict[str, float]:
    """The metrics of findings: 1 under each name."""
    return {METRIC_AREA + finding.rule.name: 1.0 for finding in findings}


def diagnose(records: Iterable[StepMetrics], rules: Sequence[Rule], *, most: int = 0) -> Diagnosis:
    """The findings of a watch over these steps; of several lines of one step the last counts. With `most` the rules are judged after about
    that many of them, evenly spread, and after the last."""
    watch = Watch(rules)
    stood: dict[str, list[int]] = {}
    last: dict[str, Finding] = {}
    steps = {record.step: record for record in records}
    stride = max(len(steps) // most, 1) if most else 1
    for left, step in zip(range(len(steps) - 1, -1, -1), sorted(steps), strict=True):
        if left % stride:
            watch.pass_over(step, steps[step].values)
            continue
        for finding in watch.step(step, steps[step].values):
            stood.setdefault(finding.rule.name, []).append(step)
            last[finding.rule.name] = finding
    findings = [Finding(rule=rule, steps=stood[rule.name], evidence=last[rule.name].evidence) for rule in rules if rule.name in stood]
    not_judged = {name: reason for name, reason in watch.not_judged.items() if name not in stood}
    return Diagnosis(num_steps=-(-len(steps) // stride), last_step=max(steps, default=0), findings=findings, not_judged=not_judged)


def _span(steps: Sequence[int]) -> str:
    return f"{steps[0]}-{steps[-1]}" if steps[0] != steps[-1] else f"{steps[0]}"
