"""What `aligner plan --explain` says of a step."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))

from planned import planned_ppo

from aligner.commands.plan import outputs
from aligner.errors import ConfigError
from aligner.planner.report import JobPlan


def test_causes_add_up_to_a_step():
    """The phases' parts by their share; sampling and waiting as they are."""
    job = planned_ppo()
    found = outputs.causes(job)
    assert sum(found.values()) == pytest.approx(job.step_seconds) and list(found.values()) == sorted(found.values(), reverse=True)
    # Half of log-probs, reference and training is in layers.
    assert found["layers"] == pytest.approx((1 + 2 + 4) / 2) and found["generate"] == 9.5 and found["waiting for scores"] == 1.5


def test_settings_that_shorten_a_step():
    job = planned_ppo()
    tried: list[tuple[str, ...]] = []

    def planned(settings: Sequence[str]) -> JobPlan:
        tried.append(tuple(settings))
        if settings[0].startswith("rollout.max_batch_size"):
            return replace(job, run=replace(job.run, phases={"generate": 15.0}))
        if settings[0].startswith("num_processes"):
            return replace(job, run=replace(job.run, phases={"generate": 10.0}))
        if settings[0].startswith("critic."):
            return replace(job, run=replace(job.run, phases={"generate": 5.0}), problems=("does not fit",))
        if settings[0].startswith("reward."):
            raise ConfigError("refused")
        return job

    found = outputs.changes(job, planned)
    assert [change.step_seconds for change in found] == [10.0, 15.0]
    assert {name.partition("=")[0] for settings in tried for name in settings} >= {"critic.num_processes", "reward.num_processes"}
    out = Console(width=140, record=True, highlight=False)
    outputs.show_explained(job, found, out)
    lines = out.export_text().splitlines()
    assert any(line.startswith("what a step is made of: generate 38%, layers 14%") for line in lines)
    assert any("num_processes=" in line and "10 s, 60% less" in line for line in lines)
    out = Console(width=140, record=True, highlight=False)
    outputs.show_explained(job, [], out)
    assert "no single setting that was tried" in out.export_text()
