"""One planned training step as spans of time, in the form in which runs are recorded (`aligner.spans`)."""

from __future__ import annotations

from collections.abc import Sequence

from aligner.planner.report import JobPlan
from aligner.planner.timing import PhaseTime
from aligner.planner.workload import Phase
from aligner.spans import Span

LANE = "all ranks"


def planned_spans(job: JobPlan) -> list[Span]:
    """The phases of one step of every component, from second 0; they end with `job.step_seconds`.

    Phases follow one another, as in `aligner.planner.timing.step_seconds`: servers score while the main component generates, and train
    while it does. Where the components take turns, all phases follow each other.
    """
    times: dict[str, list[tuple[str, PhaseTime]]] = {}
    for plan in job.components:
        component = plan.component
        times.setdefault(component.process, []).extend((component.name, time) for time in plan.times)
    if job.take_turns:
        return _after_each_other([one for own in times.values() for one in own], 0.0)
    main, *servers = times.values()
    spans = [span for own in (main, *servers) for span in _after_each_other(_of(own, scoring=own is not main), 0.0)]
    now = max((span.end for span in spans), default=0.0)
    spans += _after_each_other([one for one in main if one[1].phase not in (Phase.generate, Phase.train)], now)
    now = max((span.end for span in spans), default=0.0)
    return spans + [span for own in times.values() for span in _after_each_other([one for one in own if one[1].phase is Phase.train], now)]


def _of(own: Sequence[tuple[str, PhaseTime]], *, scoring: bool) -> list[tuple[str, PhaseTime]]:
    """What a process does while responses are sampled: the main one samples, a server scores."""
    return [one for one in own if (one[1].phase is not Phase.train if scoring else one[1].phase is Phase.generate)]


def _after_each_other(times: Sequence[tuple[str, PhaseTime]], start: float) -> list[Span]:
    found = []
    for component, time in times:
        arguments = {cause: round(seconds, 6) for cause, seconds in time.parts.items()}
        found.append(Span(time.phase.value, component, LANE, start, time.total, arguments))
        start += time.total
    return found
