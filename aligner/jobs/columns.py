"""What the progress view and the final summary show of each kind of run."""

from __future__ import annotations

from aligner.reporting.formats import Column, Goal

_ONLINE = (
    Column("reward", "rollout/reward", ".3f", Goal.highest),
    Column("accuracy", "validation/accuracy", "percent", Goal.highest),
    Column("KL", "policy/kl", ".4f"),
    Column("length", "rollout/response_length", ".1f"),
    Column("gap", "rollout/logprob_gap", ".1e"),
    Column("speed", "rollout/tokens_per_second", "tokens/s"),
)
PPO = (*_ONLINE, Column("value loss", "critic/loss", ".4f", Goal.lowest))
GRPO = tuple(Column("KL", "policy/ref_kl", ".4f") if column.label == "KL" else column for column in _ONLINE)
SFT = (
    Column("loss", "sft/loss", ".4f", Goal.lowest),
    Column("val loss", "validation/loss", ".4f", Goal.lowest),
    Column("grad", "optim/grad_norm", ".2f"),
    Column("lr", "optim/lr", ".1e"),
    Column("speed", "data/tokens_per_second", "tokens/s"),
)
DPO = (
    Column("loss", "preference/loss", ".4f", Goal.lowest),
    Column("accuracy", "preference/accuracy", "percent", Goal.highest),
    Column("margin", "preference/margin", ".3f", Goal.highest),
    Column("val accuracy", "validation/accuracy", "percent", Goal.highest),
    Column("chosen", "preference/chosen_logprob", ".3f"),
    Column("grad", "optim/grad_norm", ".2f"),
    Column("speed", "data/tokens_per_second", "tokens/s"),
)
REWARD_MODEL = (
    Column("loss", "reward/loss", ".4f", Goal.lowest),
    Column("accuracy", "reward/accuracy", "percent", Goal.highest),
    Column("val accuracy", "validation/accuracy", "percent", Goal.highest),
    Column("grad", "optim/grad_norm", ".2f"),
    Column("speed", "data/tokens_per_second", "tokens/s"),
)
