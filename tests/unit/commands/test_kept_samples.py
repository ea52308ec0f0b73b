"""What an online run keeps of its samples, and compares of their log-probs: a run's validations, and engines of other distributions."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from aligner.algorithms.grpo import GRPOConfig, TrainGRPO
from aligner.cluster.run_directory import RunDirectory
from aligner.errors import ConfigError
from aligner.jobs.samples import compares_logprobs, keep_validation
from aligner.losses.correction import Correction, CorrectionConfig
from aligner.reporting.rollout_table import read_rows
from aligner.rollout.config import RolloutConfig
from aligner.rollout.engine import Capabilities
from aligner.run.session import Session
from aligner.types import FinishReason, LogprobKind, SampleRow, SamplingConfig

ROWS = [SampleRow(prompt="1+1=", response="2", reward=1.0, finish_reason=FinishReason.stop)]


def make_session(path: Path, rank: int = 0) -> Session:
    return Session(topology=SimpleNamespace(rank=rank), directory=RunDirectory(path).create(), config_yaml="")


def test_rank_0_alone_writes_and_a_directory_that_cannot_be_written_costs_the_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, session = make_session(tmp_path / "other", rank=1), make_session(tmp_path / "run")
    keep_validation(other, ROWS)
    assert not other.directory.validation.exists()
    session.progress.at_step(12)
    keep_validation(session, ROWS)
    assert [path.name for path in session.directory.validation.iterdir()] == ["step_000012.jsonl"]
    assert read_rows(session.directory.validation / "step_000012.jsonl") == ROWS
    assert session.directory.validation.stat().st_mode & 0o777 == 0o700
    other.directory.validation.write_text("in the way")
    keep_validation(make_session(tmp_path / "other"), ROWS)
    assert "samples of a validation could not be written, the run continues" in capsys.readouterr().out


def capabilities(kind: LogprobKind) -> Capabilities:
    return Capabilities(name="tensorrt_llm", logprobs=kind)


def run_of(temperature: float, correction: Correction = Correction.none) -> TrainGRPO:
    algorithm = GRPOConfig(correction=CorrectionConfig(kind=correction))
    return TrainGRPO(algorithm=algorithm, rollout=RolloutConfig(sampling=SamplingConfig(temperature=temperature)))


@pytest.mark.parametrize(("kind", "temperature"), [(LogprobKind.sampled, 0.7), (LogprobKind.raw, 1.0)])
def test_those_of_the_same_distribution_are_compared(kind, temperature) -> None:
    said: list[str] = []
    assert compares_logprobs(run_of(temperature, Correction.icepop), capabilities(kind), said.append) and not said


def test_others_are_left_out_and_cannot_correct() -> None:
    said: list[str] = []
    assert not compares_logprobs(run_of(0.7), capabilities(LogprobKind.raw), said.append)
    assert said == ["warning: tensorrt_llm gives log-probs at temperature 1, not 0.7: rollout/logprob_gap is not reported"]
    with pytest.raises(ConfigError, match=r"algorithm.correction.kind=tis: rollout.engine=tensorrt_llm gives log-probs at temperature 1"):
        compares_logprobs(run_of(0.7, Correction.tis), capabilities(LogprobKind.raw), said.append)
