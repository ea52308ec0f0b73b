"""One planned training step as spans of time, in the form in which runs are recorded (`aligner.spans`)."""

from __future__ import annotations

from dataclasses import replace

from aligner.planner.report import JobPlan
from aligner.spans import Span

ENGINE = "engine"  # whose spans the simulation gives the engine


def planned_spans(job: JobPlan) -> list[Span]:
    """The last simulated step. An engine on the GPUs of the component that trains is part of that one, as in a run."""
    main = job.components[0].component
    apart = main.engine is not None and main.engine.own_ranks > 0
    return [replace(span, component=main.name) if span.component == ENGINE and not apart else span for span in job.run.spans]
