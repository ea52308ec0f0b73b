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
ONLINE_DPO = (
    *(column for column in _ONLINE if column.label != "KL"),
    Column("KL", "pairs/ref_kl", ".4f"),
    Column("pref accuracy", "preference/accuracy", "percent", Goal.highest),
    Column("margin", "preference/margin", ".3f", Goal.highest),
)
REJECTION_SAMPLING = (
    *(column for column in _ONLINE if column.label != "KL"),
    Column("kept reward", "kept/reward", ".3f"),
    Column("kept", "kept/fraction", "percent"),
    Column("loss", "sft/loss", ".4f", Goal.lowest),
)
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
KTO = (
    Column("loss", "kto/loss", ".4f", Goal.lowest),
    Column("accuracy", "kto/accuracy", "percent", Goal.highest),
    Column("KL", "kto/kl", ".3f"),
    Column("val accuracy", "validation/accuracy", "percent", Goal.highest),
    Column("desirable", "kto/desirable_reward", ".3f"),
    Column("undesirable", "kto/undesirable_reward", ".3f"),
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
# Those of every kind of run, each metric once: a table shows the ones that the run has.
ANY = tuple(
    {
        column.metric: column for group in (PPO, GRPO, ONLINE_DPO, REJECTION_SAMPLING, SFT, DPO, KTO, REWARD_MODEL) for column in group
    }.values()
)
