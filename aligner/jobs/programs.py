"""Which programs a run consists of: one for each component, all with the same settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from aligner.config import belongs_to
from aligner.errors import ConfigError
from aligner.schemas import (
    Annotate,
    ConstitutionalAI,
    Generate,
    OnlineRun,
    TrainDistillation,
    TrainDPO,
    TrainGRPO,
    TrainKTO,
    TrainOnlineDistillation,
    TrainOnlineDPO,
    TrainPPO,
    TrainProcessRewardModel,
    TrainRegressionRewardModel,
    TrainRejectionSampling,
    TrainRewardModel,
    TrainSelfRewarding,
    TrainSFT,
    TrainSPIN,
    TrainSteerLM2,
    WriteProposals,
    WriteTeacherLogprobs,
)

Trainer = TrainSFT | TrainRewardModel | TrainDPO | TrainKTO | TrainDistillation | TrainSteerLM2  # of one component
Job = (
    Trainer
    | WriteTeacherLogprobs
    | WriteProposals
    | Generate
    | Annotate
    | ConstitutionalAI
    | TrainGRPO
    | TrainPPO
    | TrainOnlineDPO
    | TrainRejectionSampling
    | TrainOnlineDistillation
    | TrainSPIN
    | TrainSelfRewarding
)

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "examples" / "nlp"
RECIPES = {
    "sft": (TrainSFT, "train_sft.py"),
    "reward_model": (TrainRewardModel, "train_reward_model.py"),
    "regression_reward_model": (TrainRegressionRewardModel, "train_regression_reward_model.py"),
    "process_reward_model": (TrainProcessRewardModel, "train_process_reward_model.py"),
    "dpo": (TrainDPO, "train_dpo.py"),
    "kto": (TrainKTO, "train_kto.py"),
    "steerlm": (TrainSFT, "train_steerlm.py"),
    "grpo": (TrainGRPO, "train_grpo.py"),
    "ppo": (TrainPPO, "train_ppo_actor.py"),
    "online_dpo": (TrainOnlineDPO, "train_online_dpo.py"),
    "rejection_sampling": (TrainRejectionSampling, "train_rejection_sampling.py"),
    "steerlm2": (TrainSteerLM2, "train_steerlm2.py"),
    "distill": (TrainDistillation, "distill.py"),
    "teacher_logprobs": (WriteTeacherLogprobs, "write_teacher_logprobs.py"),
    "generate": (Generate, "generate.py"),
    "annotate": (Annotate, "annotate.py"),
    "constitution": (ConstitutionalAI, "constitution.py"),
    "proposals": (WriteProposals, "write_proposals.py"),
    "online_distill": (TrainOnlineDistillation, "train_online_distill.py"),
    "spin": (TrainSPIN, "train_spin.py"),
    "self_rewarding": (TrainSelfRewarding, "train_self_rewarding.py"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """One component: a script of examples/nlp with its arguments, on `num_ranks` ranks."""

    component: str
    script: Path
    arguments: tuple[str, ...]
    num_ranks: int


def recipe_of(name: str) -> str:
    """The recipe that a file of conf/ belongs to: `ppo_70b` to `ppo`. Raises ConfigError for a name of none."""
    for recipe in RECIPES:
        if belongs_to(name, recipe):
            return recipe
    raise ConfigError(f"config {name!r}: its name must begin with one of {', '.join(RECIPES)}")


def programs(name: str, config: Job, overrides: Sequence[str], *, num_processes: int = 0) -> list[Program]:
    """The programs of a run, the one that trains first; the others are its servers.

    `config` is what `conf/<name>.yaml` and `overrides` give; `num_processes` overrides its number of actor processes. Raises ConfigError
    where a layout does not fit its ranks.
    """
    recipe = recipe_of(name)
    overrides = (f"config={name}", *overrides)
    num_ranks = num_processes or config.num_processes
    config.parallel.check_world(num_ranks)
    is_online = isinstance(config, OnlineRun)
    found = [_program("actor" if is_online else recipe, RECIPES[recipe][1], overrides, num_ranks)]
    if isinstance(config, TrainPPO):
        config.critic.parallel.check_world(config.critic.num_processes)
        found.append(_program("critic", "serve_critic.py", overrides, config.critic.num_processes))
    if is_online and config.reward.serve:
        config.reward.parallel.check_world(config.reward.num_processes)
        found.append(_program("reward", "serve_reward_model.py", (f"recipe={recipe}", *overrides), config.reward.num_processes))
    return found


def _program(component: str, script: str, arguments: Sequence[str], num_ranks: int) -> Program:
    return Program(component=component, script=SCRIPTS / script, arguments=tuple(arguments), num_ranks=num_ranks)
