"""SteerLM 1 and 2 from beginning to end: an attribute model labels a data set, policies learn from it, and do what is asked of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from builders import load_module
from training_jobs import ROOT, Job, eventually, kill, run_job, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SHOWN = ["logging.tensorboard=false", "logging.progress=plain"]
KILLED = ("labels", "response")  # run directories: of one job of each kind that writes


def launch(recipe: str, directory: Path, settings: Sequence[str]) -> None:
    """One job; those in KILLED are killed when their first part is there, and started again."""
    command, settings = train(recipe), [*settings, *SHOWN]
    if directory.name in KILLED:
        settings.append("algorithm.part_size=20")
        part = directory / "written" / "parts" / "part_000000.jsonl"
        with Job(command, directory, settings) as job:
            assert eventually(lambda: part.exists() or job.process.poll() is not None, 120), job.output()
            for pid in job.processes():
                kill(pid)
            job.process.wait()
        first = part.read_bytes()
        run_job(command, directory, settings)
        assert part.read_bytes() == first
        return
    run_job(command, directory, settings)


def test_the_requested_attribute_moves(tmp_path: Path) -> None:
    """Labels are the rule's for most stories; SteerLM 1 moves the attribute, and SteerLM 2, on what it sampled, moves it further."""
    steerlm = load_module(ROOT / "examples" / "learning" / "steerlm.py", "learning_steerlm")
    found = steerlm.run(tmp_path, launch)
    labelled = [record["conversations"][-1] for record in steerlm.read(tmp_path / "labels" / "written" / "records.jsonl")]
    right = sum(turn["label"] == f"joy:{steerlm.joy(turn['value'])}" for turn in labelled)
    assert len(labelled) == 400 and right >= 300
    groups = steerlm.read(tmp_path / "attributes" / "written" / "records.jsonl")
    assert {len(group["responses"]) for group in groups} == {8}
    assert all(json.dumps(one["log(Q(y|a,x))"]) for group in groups for one in group["responses"])
    assert found.passed, found
