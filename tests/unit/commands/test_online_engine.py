"""What an online run makes of an engine whose log-probs are of another distribution than the policy's."""

from __future__ import annotations

import pytest

from aligner.algorithms.grpo import GRPOConfig, TrainGRPO
from aligner.errors import ConfigError
from aligner.jobs.samples import compares_logprobs
from aligner.losses.correction import Correction, CorrectionConfig
from aligner.rollout.config import RolloutConfig
from aligner.rollout.engine import Capabilities
from aligner.types import LogprobKind, SamplingConfig


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
