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
DISTILLATION = (
    Column("loss", "distillation/loss", ".4f", Goal.lowest),
    Column("agreement", "distillation/agreement", "percent", Goal.highest),
    Column("val loss", "validation/loss", ".4f", Goal.lowest),
    Column("grad", "optim/grad_norm", ".2f"),
    Column("lr", "optim/lr", ".1e"),
    Column("speed", "data/tokens_per_second", "tokens/s"),
)
ONLINE_DISTILLATION = (
    Column("loss", "distillation/loss", ".4f", Goal.lowest),
    Column("reverse KL", "distillation/reverse_kl", ".4f", Goal.lowest),
    Column("val reverse KL", "validation/reverse_kl", ".4f", Goal.lowest),
    Column("agreement", "distillation/agreement", "percent", Goal.highest),
    Column("length", "rollout/response_length", ".1f"),
    Column("gap", "rollout/logprob_gap", ".1e"),
    Column("speed", "rollout/tokens_per_second", "tokens/s"),
)
SPIN = (
    Column("iteration", "spin/iteration", ".0f"),
    Column("loss", "preference/loss", ".4f", Goal.lowest),
    Column("accuracy", "preference/accuracy", "percent", Goal.highest),
    Column("margin", "preference/margin", ".3f", Goal.highest),
    Column("val loss", "validation/loss", ".4f", Goal.lowest),
    Column("same", "spin/identical", "percent"),
    Column("grad", "optim/grad_norm", ".2f"),
)
SELF_REWARDING = (
    Column("iteration", "self_rewarding/iteration", ".0f"),
    Column("reward", "rollout/reward", ".3f", Goal.highest),
    Column("val reward", "validation/reward", ".3f", Goal.highest),
    Column("loss", "preference/loss", ".4f", Goal.lowest),
    Column("pref accuracy", "preference/accuracy", "percent", Goal.highest),
    Column("margin", "preference/margin", ".3f", Goal.highest),
    Column("pairs", "pairs/count", ".0f"),
    Column("ties", "pairs/ties", ".0f"),
    Column("unparsed", "judge/unparsed", ".0f"),
    Column("length", "rollout/response_length", ".1f"),
)
STEERLM2 = (
    Column("KL", "steerlm/kl", ".4f", Goal.lowest),
    Column("val KL", "validation/kl", ".4f", Goal.lowest),
    Column("effective", "steerlm/effective_responses", ".2f"),
    Column("grad", "optim/grad_norm", ".2f"),
    Column("lr", "optim/lr", ".1e"),
    Column("speed", "data/tokens_per_second", "tokens/s"),
)
WRITING = (
    Column("records", "data/records", ".0f"),
    Column("length", "rollout/response_length", ".1f"),
    Column("truncated", "rollout/truncated_fraction", "percent"),
    Column("speed", "data/tokens_per_second", "tokens/s"),
)
PROPOSALS = (
    Column("records", "data/records", ".0f"),
    Column("log-prob", "proposals/log_prob", ".2f"),
    Column("spread", "proposals/spread", ".2f"),
)
CONSTITUTION = (
    Column("supervised", "constitution/supervised", ".0f"),
    Column("pairs", "preference/pairs", ".0f"),
    Column("length", "rollout/response_length", ".1f"),
    Column("truncated", "rollout/truncated_fraction", "percent"),
    Column("entropy", "preference/entropy", ".3f"),
    Column("revised", "preference/revision_chosen", "percent"),
    Column("position", "preference/position_bias", ".2f"),
)
TEACHER = (Column("mass", "teacher/mass", "percent"), Column("speed", "data/tokens_per_second", "tokens/s"))
REWARD_MODEL = (
    Column("loss", "reward/loss", ".4f", Goal.lowest),
    Column("accuracy", "reward/accuracy", "percent", Goal.highest),
    Column("val accuracy", "validation/accuracy", "percent", Goal.highest),
    Column("grad", "optim/grad_norm", ".2f"),
    Column("speed", "data/tokens_per_second", "tokens/s"),
)
REGRESSION = (
    Column("loss", "reward/loss", ".4f", Goal.lowest),
    Column("error", "reward/absolute_error", ".3f", Goal.lowest),
    Column("val mse", "validation/mse", ".4f", Goal.lowest),
    Column("grad", "optim/grad_norm", ".2f"),
    Column("speed", "data/tokens_per_second", "tokens/s"),
)
# Those of every kind of run, each metric once: a table shows the ones that the run has.
_GROUPS = (
    PPO,
    GRPO,
    ONLINE_DPO,
    REJECTION_SAMPLING,
    SFT,
    DPO,
    KTO,
    DISTILLATION,
    ONLINE_DISTILLATION,
    SPIN,
    SELF_REWARDING,
    STEERLM2,
    TEACHER,
    WRITING,
    CONSTITUTION,
    PROPOSALS,
    REWARD_MODEL,
    REGRESSION,
)
ANY = tuple({column.metric: column for group in _GROUPS for column in group}.values())
