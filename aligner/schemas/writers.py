"""Runs that write a data set instead of training."""

from __future__ import annotations

from dataclasses import dataclass, field

from aligner.algorithms.ai_feedback import JudgeConfig
from aligner.algorithms.chains import ConstitutionConfig, Pairs
from aligner.algorithms.loop import LoopConfig
from aligner.algorithms.proposals import ProposalsConfig
from aligner.algorithms.teacher_pass import TeacherPassConfig
from aligner.algorithms.writing import AnnotateConfig, GenerateConfig
from aligner.data.config import (
    AnnotateDataConfig,
    ConstitutionDataConfig,
    RequestDataConfig,
    SampledDataConfig,
    SFTDataConfig,
)
from aligner.data.proposals import Quantity
from aligner.errors import ConfigError
from aligner.rollout.config import RolloutConfig
from aligner.schemas.runs import JobRun
from aligner.servers.config import ClientConfig


@dataclass(kw_only=True, slots=True)
class WritingRun(JobRun):
    """What every run of one component that writes a data set has."""

    @property
    def loop(self) -> LoopConfig:
        """Its steps are the files to write: only done.json says that all are there."""
        return LoopConfig(max_steps=1)

    @property
    def scores(self) -> bool:
        """Whether `model` is one with a scalar head."""
        return False


@dataclass(kw_only=True, slots=True)
class WriteTeacherLogprobs(WritingRun):
    """A teacher's log-probs of supervised records, for distillation; `model` is the teacher (conf/teacher_logprobs.yaml)."""

    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    algorithm: TeacherPassConfig = field(default_factory=TeacherPassConfig)


@dataclass(kw_only=True, slots=True)
class Generate(WritingRun):
    """Responses to prompts (conf/generate.yaml)."""

    data: RequestDataConfig = field(default_factory=RequestDataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: GenerateConfig = field(default_factory=GenerateConfig)

    def __post_init__(self) -> None:
        if self.rollout.asynchronous.max_staleness:
            raise ConfigError("rollout.asynchronous.max_staleness: nothing is trained here; allowed: 0")


@dataclass(kw_only=True, slots=True)
class ConstitutionalAI(WritingRun):
    """Critiques, revisions and preferences by a model itself (conf/constitution.yaml)."""

    data: ConstitutionDataConfig = field(default_factory=ConstitutionDataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    algorithm: ConstitutionConfig = field(default_factory=ConstitutionConfig)

    def __post_init__(self) -> None:
        if self.rollout.asynchronous.max_staleness:
            raise ConfigError("rollout.asynchronous.max_staleness: nothing is trained here; allowed: 0")
        if self.judge.path and self.algorithm.pairs in (Pairs.none, Pairs.given):
            raise ConfigError(
                f"judge.path={self.judge.path}: with algorithm.pairs={self.algorithm.pairs.value} no second model is needed; allowed: ''"
            )


@dataclass(kw_only=True, slots=True)
class Annotate(WritingRun):
    """Labels for responses by a regression reward model (conf/annotate.yaml)."""

    data: AnnotateDataConfig = field(default_factory=AnnotateDataConfig)
    algorithm: AnnotateConfig = field(default_factory=AnnotateConfig)
    client: ClientConfig = field(default_factory=ClientConfig)

    @property
    def scores(self) -> bool:
        return True


@dataclass(kw_only=True, slots=True)
class WriteProposals(WritingRun):
    """A log-prob for each of several sampled responses, for SteerLM 2 (conf/proposals.yaml)."""

    data: SampledDataConfig = field(default_factory=SampledDataConfig)
    algorithm: ProposalsConfig = field(default_factory=ProposalsConfig)
    client: ClientConfig = field(default_factory=ClientConfig)

    @property
    def scores(self) -> bool:
        return self.algorithm.adds is Quantity.attributes

    def __post_init__(self) -> None:
        adds = self.algorithm.adds
        if self.data.apply_chat_template and adds is not Quantity.response:
            raise ConfigError(f"data.apply_chat_template=true: {adds.field} is of SteerLM's format; allowed: with algorithm.adds=response")
