"""The findings and the verdict of `aligner gap`, as text and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aligner.models.config import Dtype
from aligner.models.training.tracing import ORDER, Difference, Operation, Place

ULPS = {Dtype.float32: 128.0, Dtype.bfloat16: 16.0, Dtype.float16: 16.0}  # of the precision; all add up in float32
GAPS = {Dtype.float32: 1e-4, Dtype.bfloat16: 0.05, Dtype.float16: 0.01}  # nats, the mean over tokens
MOST_OF_ONE_TOKEN = 20.0  # times as large the gap of a single token may be
EPSILON = {Dtype.float32: 2.0**-23, Dtype.bfloat16: 2.0**-7, Dtype.float16: 2.0**-10}
NUM_WORST = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """Differences explained by rounding. Per operation: `ulps` of the precision, growing with the square root of the layers before it."""

    dtype: Dtype
    ulps: float
    gap: float

    @classmethod
    def of(cls, dtype: Dtype, *, ulps: float = 0.0, gap: float = 0.0) -> Tolerance:
        """0: the precision's own."""
        return cls(dtype=dtype, ulps=ulps or ULPS[dtype], gap=gap or GAPS[dtype])

    def at(self, place: Place) -> float:
        """The relative tolerance at a place."""
        return self.ulps * EPSILON[self.dtype] * math.sqrt(1 + max(place.layer, 0))


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenGap:
    """One sampled token with both log-probs."""

    rollout: int
    position: int  # in the response, from 0
    token: int
    text: str
    engine: float
    trainer: float

    @property
    def gap(self) -> float:
        return abs(self.engine - self.trainer)


@dataclass(frozen=True, kw_only=True, slots=True)
class GapReport:
    """The gap of one batch, and the differences between operations of the engine's decoder and the trainer, by path of the tokens."""

    engine: str
    num_layers: int
    tolerance: Tolerance
    num_rollouts: int
    num_tokens: int
    statistics: Mapping[str, float]  # metrics of `losses.gap`
    worst: Sequence[TokenGap]
    paths: Mapping[str, Sequence[Difference]] = field(default_factory=dict)  # empty: layers cannot be seen

    @property
    def gap_is_explained(self) -> bool:
        """Whether rounding explains the log-probs."""
        mean, most = self.statistics["rollout/logprob_gap"], self.statistics["rollout/logprob_gap_max"]
        return mean <= self.tolerance.gap and most <= MOST_OF_ONE_TOKEN * self.tolerance.gap

    @property
    def first(self) -> tuple[str, Difference] | None:
        """The first operation beyond the tolerance, and its path; of two, the one computed earlier."""
        beyond = [(one.place.rank, path, one) for path, found in self.paths.items() for one in found if self.is_beyond(one)]
        return min(beyond, key=lambda entry: entry[0])[1:] if beyond else None

    def is_beyond(self, one: Difference) -> bool:
        """Whether more differs than rounding explains."""
        return not one.relative <= self.tolerance.at(one.place)

    @property
    def agrees(self) -> bool:
        """Whether all is within the tolerances."""
        return self.gap_is_explained and self.first is None

    def hidden_before(self, path: str, place: Place) -> list[Operation]:
        """Operations between this one and the previous one of the path that only another path shows."""
        seen = {one.place for one in self.paths[path]}
        known = {one.place for found in self.paths.values() for one in found}
        earlier = [one for one in sorted(known, key=lambda p: p.rank) if one.rank < place.rank]
        hidden: list[Operation] = []
        for one in reversed(earlier):
            if one in seen:
                break
            hidden.append(one.operation)
        return sorted(hidden, key=ORDER.__getitem__)

    def verdict(self) -> str:
        """Where the two diverge, in one or two sentences."""
        found = self.first
        if found is not None:
            path, one = found
            hidden = [operation.value.replace("_", " ") for operation in self.hidden_before(path, one.place)]
            before = f" (or {', '.join(hidden)} before it, which compiled kernels do not show: try rollout.kernels=torch)" if hidden else ""
            return (
                f"first difference beyond rounding: {one.place.describe(self.num_layers)}{before}, in {path} passes: relative "
                f"{one.relative:.2e}, allowed {self.tolerance.at(one.place):.2e}"
            )
        if not self.paths:
            within = "within" if self.gap_is_explained else "beyond"
            return f"the gap is {within} what rounding explains; the layers of engine {self.engine} cannot be seen from here"
        if self.gap_is_explained:
            return "engine and trainer agree within rounding, in every operation and every log-prob"
        return (
            "every operation of the decoder agrees with the trainer's when it is given the sampled tokens, and the log-probs that came "
            "with them do not: look at the sampler (temperature), at generation's cache, or at the version of its weights"
        )


def to_text(report: GapReport) -> str:
    """For people."""
    numbers = report.statistics
    name = "rollout/logprob_gap"
    lines = [
        f"{report.engine}, {report.tolerance.dtype.value}: {report.num_tokens} tokens in {report.num_rollouts} responses",
        f"|engine - trainer| log-prob, nats: mean {numbers[name]:.2e}  p50 {numbers[name + '_p50']:.2e}  p90 {numbers[name + '_p90']:.2e}  "
        f"p99 {numbers[name + '_p99']:.2e}  max {numbers[name + '_max']:.2e}  (allowed: mean {report.tolerance.gap:.0e})",
        f"KL(engine || trainer) {numbers['rollout/logprob_kl']:.2e}, effective sample size {numbers['rollout/effective_sample_size']:.4f}",
        "worst tokens (response, position, token, engine, trainer):",
    ]
    lines += [f"  {t.rollout:>4} {t.position:>5}  {t.text!r:<14} {t.engine:10.5f} {t.trainer:10.5f}" for t in report.worst]
    for path, found in report.paths.items():
        lines += _table(report, path, found)
    return "\n".join([*lines, report.verdict()])


def to_json(report: GapReport) -> str:
    """Everything."""
    first = report.first
    return json.dumps(
        {
            "engine": report.engine,
            "dtype": report.tolerance.dtype.value,
            "agrees": report.agrees,
            "verdict": report.verdict(),
            "first": None if first is None else {"path": first[0], **_plain(report, first[1])},
            "num_rollouts": report.num_rollouts,
            "num_tokens": report.num_tokens,
            "tolerance": {"ulps": report.tolerance.ulps, "gap": report.tolerance.gap},
            "statistics": dict(report.statistics),
            "worst": [
                {name: getattr(t, name) for name in ("rollout", "position", "token", "text", "engine", "trainer")} for t in report.worst
            ],
            "paths": {path: [_plain(report, one) for one in found] for path, found in report.paths.items()},
        },
        indent=1,
    )


def _plain(report: GapReport, one: Difference) -> dict[str, Any]:
    in_layers = 0 <= one.place.layer < report.num_layers
    return {
        "layer": one.place.layer if in_layers else None,
        "operation": one.place.operation.value,
        "absolute": one.absolute,
        "relative": one.relative,
        "allowed": report.tolerance.at(one.place),
        "num_tokens": one.num_tokens,
    }


def _table(report: GapReport, path: str, found: Sequence[Difference]) -> list[str]:
    """The largest difference of each layer; all operations of the first layer beyond the tolerance."""
    beyond = next((one for one in found if report.is_beyond(one)), None)
    lines = [f"{path} passes ({max((one.num_tokens for one in found), default=0)} tokens), largest relative difference:"]
    layers: dict[int, list[Difference]] = {}
    for one in found:
        layers.setdefault(one.place.layer, []).append(one)
    for layer, ones in layers.items():
        shown = ones if beyond is not None and layer == beyond.place.layer else [max(ones, key=lambda one: one.relative)]
        for one in shown:
            mark = "  <-- first beyond rounding" if one is beyond else "  *" if report.is_beyond(one) else ""
            lines.append(f"  {one.place.describe(report.num_layers):<28} {one.relative:.1e}  (absolute {one.absolute:.1e}){mark}")
    return lines
