"""A run keeps the samples of its validations: rank 0 writes them under the step's number, and a disk in trouble does not end the run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from aligner.cluster.run_directory import RunDirectory
from aligner.jobs.samples import keep_validation
from aligner.reporting.rollout_table import read_rows
from aligner.run.session import Session
from aligner.types import FinishReason, SampleRow

ROWS = [SampleRow(prompt="1+1=", response="2", reward=1.0, finish_reason=FinishReason.stop)]


def make_session(path: Path, rank: int = 0) -> Session:
    return Session(topology=SimpleNamespace(rank=rank), directory=RunDirectory(path).create(), config_yaml="")


def test_rank_0_writes_each_step(tmp_path: Path) -> None:
    session = make_session(tmp_path / "run")
    keep = partial(keep_validation, session)
    keep(ROWS)
    session.progress.at_step(12)
    keep(ROWS)
    assert sorted(path.name for path in session.directory.validation.iterdir()) == ["step_000000.jsonl", "step_000012.jsonl"]
    assert read_rows(session.directory.validation / "step_000012.jsonl") == ROWS
    assert session.directory.validation.stat().st_mode & 0o777 == 0o700


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    session = make_session(tmp_path / "run", rank=1)
    keep_validation(session, ROWS)
    assert not session.directory.validation.exists()


def test_a_directory_that_cannot_be_written_costs_the_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    session = make_session(tmp_path / "run")
    session.directory.validation.write_text("in the way")
    keep_validation(session, ROWS)
    assert "samples of a validation could not be written, the run continues" in capsys.readouterr().out
