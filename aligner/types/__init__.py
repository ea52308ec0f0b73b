"""The typed records that flow between the stages of a run.

One alignment rule holds everywhere: every `[B, S]` tensor describes *token t itself*, and position 0 is 0 (or False). `logprobs[b, t]` is
log pi(tokens[b, t] | tokens[b, :t]); `values[b, t]` is the value of the state in which token t was chosen. Only
`models/training/forward.py` shifts. `loss_mask` is True on response tokens, on the end-of-sequence token that the policy produced, and
False on prompt and padding.
"""

from __future__ import annotations

from aligner.types.batches import (
    Batch,
    DistillationBatch,
    LabeledBatch,
    LossOutput,
    MaskedBatch,
    PolicyBatch,
    PreferenceBatch,
    RolloutBatch,
    StepBatch,
    TokenBatch,
    TokenOutputs,
    ValueBatch,
)
from aligner.types.extras import Images, Routes, RowTensor, no_expert, route_dtype
from aligner.types.rollouts import (
    EpisodeRows,
    FinishReason,
    LogprobKind,
    Prompt,
    Rollout,
    SampleRow,
    SampleTurn,
    SamplingConfig,
    Scores,
    TokenTable,
    TurnMark,
)

__all__ = [
    "Batch",
    "DistillationBatch",
    "EpisodeRows",
    "FinishReason",
    "Images",
    "LabeledBatch",
    "LogprobKind",
    "LossOutput",
    "MaskedBatch",
    "PolicyBatch",
    "PreferenceBatch",
    "Prompt",
    "Rollout",
    "RolloutBatch",
    "Routes",
    "RowTensor",
    "SampleRow",
    "SampleTurn",
    "SamplingConfig",
    "Scores",
    "StepBatch",
    "TokenBatch",
    "TokenOutputs",
    "TokenTable",
    "TurnMark",
    "ValueBatch",
    "no_expert",
    "route_dtype",
]
