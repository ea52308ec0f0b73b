"""The root config of every entry point: one dataclass per kind of run, made of the sections that the packages define.

A PPO run has one config for all of its components, so that the actor and its servers cannot disagree. Light: imports no Megatron-Core, no
PyTriton, no Hydra.
"""

from __future__ import annotations

from aligner.schemas.online import (
    OnlineRun,
    TeacherConfig,
    TrainGRPO,
    TrainOnlineDistillation,
    TrainOnlineDPO,
    TrainPPO,
    TrainRejectionSampling,
    TrainSelfRewarding,
    TrainSPIN,
    UnjudgedRun,
)
from aligner.schemas.runs import (
    JobRun,
    RunConfig,
    TrainerRun,
)
from aligner.schemas.trainers import (
    TrainDistillation,
    TrainDPO,
    TrainKTO,
    TrainProcessRewardModel,
    TrainRegressionRewardModel,
    TrainRewardModel,
    TrainSFT,
    TrainSteerLM2,
)
from aligner.schemas.writers import (
    Annotate,
    ConstitutionalAI,
    Generate,
    WriteProposals,
    WriteTeacherLogprobs,
    WritingRun,
)

__all__ = [
    "Annotate",
    "ConstitutionalAI",
    "Generate",
    "JobRun",
    "OnlineRun",
    "RunConfig",
    "TeacherConfig",
    "TrainDPO",
    "TrainDistillation",
    "TrainGRPO",
    "TrainKTO",
    "TrainOnlineDPO",
    "TrainOnlineDistillation",
    "TrainPPO",
    "TrainProcessRewardModel",
    "TrainRegressionRewardModel",
    "TrainRejectionSampling",
    "TrainRewardModel",
    "TrainSFT",
    "TrainSPIN",
    "TrainSelfRewarding",
    "TrainSteerLM2",
    "TrainerRun",
    "UnjudgedRun",
    "WriteProposals",
    "WriteTeacherLogprobs",
    "WritingRun",
]
