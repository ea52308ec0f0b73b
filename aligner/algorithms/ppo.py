"""Proximal policy optimisation with a learned critic (Schulman et al. 2017, 1707.06347; for language models Ziegler et al. 2019).

One step: sample responses; reward and values of finished ones are asked for while others are still being sampled; log-probs of policy and
frozen reference; per-token rewards (minus `kl_coef` times a KL estimate, plus the score on the last token); GAE (1506.02438); advantages
whitened over the whole batch; the critic trains on the returns in its own process while the policy takes its mini-batch updates, or before
it in the same processes, or in the policy's own updates as a head on it (`critic.kind`; `aligner.online.critics`).

A session of several rows (`aligner.endpoint.sessions`) is one episode: its tokens are those that it sampled, each in the row in which it is
the policy's own, and each has one token t' that follows it:

    t' = the next token that the policy sampled in the same row, else the first one of the call that the session sampled next
    delta[t] = r[t] + gamma * V[t'] - V[t];  A[t] = delta[t] + gamma * lambda * A[t']

with V = A = 0 after the last token of the session's last call, which has the score. So a call is followed by the one that continues it, or
by the next one if its branch has ended there (an edited history, a sub-agent), and no end of a branch is taken for that of the session.
However it branches, every token is learnt from once, and its advantage is of the one score (with gamma = lambda = 1: score - V[t], less the
KL to come). Mini-batches, the policy's and the critic's, are of whole sessions.

With `pretraining_coef` this is PPO-ptx (Ouyang et al. 2022, 2203.02155, equation 2): each policy update descends on

    loss = PPO's loss + pretraining_coef * (-sum over the pretraining batch's tokens of log pi(token) / their number)

with the next batch of `pretraining.train`; the number of tokens is that of the whole batch, over all data-parallel replicas, and pi is at
temperature 1. In an update without PPO tokens neither is learnt.

Against GRPO (`grpo.py`): a critic gives every token its own advantage from one response per prompt, and the KL is part of the reward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from aligner.cluster.component import Placement
from aligner.cluster.run_directory import CRITIC, POLICY
from aligner.data.collate import SupervisedExample, supervised_batch
from aligner.data.config import PretrainingConfig
from aligner.data.order import EpochSampler, order_of
from aligner.errors import FINITE, UP_TO_1, ConfigError, check_numbers, check_range
from aligner.loop.learnt import of_rows
from aligner.loop.loop import Built, Clock, StepResult
from aligner.losses.advantages import gae_over_rows, outcome_rewards, whiten
from aligner.losses.kl import adapt_kl_coef, kl_estimate
from aligner.losses.sft import pretraining_loss
from aligner.losses.shaping import Moments
from aligner.losses.value import value_loss
from aligner.models.config import Architecture, ModelConfig
from aligner.models.modules.scalar_head import PolicyHead
from aligner.online.collect import ScoredRollouts, response_metrics, sample_rows
from aligner.online.config import OnlineRun
from aligner.online.critics import CriticRole, HeadCritic, ModelCritic, ServedCritic, ValueTraining
from aligner.online.policy_gradient import (
    PolicyGradientConfig,
    as_episodes,
    finite_rows,
    masked_mean,
    mini_batches,
    sampled_next,
    shaped,
)
from aligner.online.rollout_source import OnlineAlgorithm, RolloutSource
from aligner.online.task import REWARDED, OnlineTask
from aligner.parallel.topology import ParallelConfig
from aligner.planner.workload import Phase, Work
from aligner.protocols import Added, Policy
from aligner.reporting.formats import Column, Goal
from aligner.run.recipe import Recipe
from aligner.run.settings import Server, Traits, UsedModel, check_layout, check_replicas
from aligner.servers.components import CriticConfig, CriticKind, in_section
from aligner.telemetry.metrics import Metric, merge, values
from aligner.types import PolicyBatch, RolloutBatch, ValueBatch
from aligner.types.batches import of_kind

if TYPE_CHECKING:
    from aligner.jobs.samples import OnlineJob


@dataclass(kw_only=True, slots=True)
class PPOConfig(PolicyGradientConfig):
    """Defaults are NeMo-Aligner's if it has the setting."""

    rollouts_per_step: int = 512  # one per prompt
    kl_coef: float = 0.02  # of the KL to the reference, inside the reward
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation: 0 is one step of bootstrapping, 1 the whole return
    critic_warmup_steps: int = 0  # first steps, in which only the critic trains
    pretraining_coef: float = 0.0  # PPO-ptx: weight of the mean negative log-likelihood of pretraining.train's tokens in the loss; 0: off

    def __post_init__(self) -> None:
        PolicyGradientConfig.__post_init__(self)
        check_numbers(self, "algorithm", at_least_1=("rollouts_per_step",), not_negative=("critic_warmup_steps",))
        if self.rollouts_per_step % self.mini_batch_size:
            raise ConfigError(f"algorithm.mini_batch_size={self.mini_batch_size}: must divide rollouts_per_step={self.rollouts_per_step}")
        check_range(self, "algorithm", FINITE, "pretraining_coef", note=" (0: off)")
        check_range(self, "algorithm", UP_TO_1, "gae_lambda")


@dataclass(frozen=True, kw_only=True, slots=True)
class Pretraining:
    """The text of PPO-ptx, in batches."""

    examples: Sequence[SupervisedExample]
    order: EpochSampler
    pad_id: int
    coef: float

    def batch(self, number: int) -> Added:
        """The batch of policy update `number` (from 0), counted over the whole run."""
        rows = [self.examples[row] for row in self.order.indices(number)]
        return Added(batch=supervised_batch(rows, self.pad_id), loss=pretraining_loss, coef=self.coef)


class PPO(OnlineAlgorithm[PPOConfig]):
    """The algorithm over its parts, on every rank. `rollout_source` gives rollouts with values; None: sampled when needed."""

    def __init__(
        self,
        config: PPOConfig,
        policy: Policy,
        task: OnlineTask,
        critic: CriticRole,
        rollout_source: RolloutSource | None = None,
        *,
        pretraining: Pretraining | None = None,
    ) -> None:
        super().__init__(config, policy, task, rollout_source, group_size=1, critic=critic.asked)
        self.critic = critic
        self.kl_coef = config.kl_coef
        self.moments = Moments()  # of the scores so far
        self.pretraining = pretraining
        self.pretraining_batches = 0  # taken in the steps so far
        self.loss = config.loss(max_response_length=task.max_response_length)

    def step(self, step: int, clock: Clock) -> StepResult:
        task = self.task
        with clock.phase("critic_wait"):
            critic_metrics = self.critic.begin_step()
        collected, batch = self.sample(step, clock)
        collected, found = self.critic.evaluate(collected, batch, self.policy, clock)
        old_logprobs = found["logprobs"]
        with clock.phase("ref_logprobs"):
            assert task.reference is not None  # `build` asks for one
            ref_logprobs = task.reference.logprobs(batch)
        kl = kl_estimate(old_logprobs, ref_logprobs, self.config.kl_estimator)
        rewarded = shaped(collected, batch, self.config.shaping, self.moments, max_length=task.max_response_length)
        policy_batch, value_batch = self.experience(batch, rewarded.collected, old_logprobs, kl)
        if value_batch.loss_mask.any():  # else every response was cut and is masked: nothing to learn from
            self.critic.train(value_batch, step, clock)
        with clock.phase("train"):
            epochs = 0 if self._is_warming_up(step) else self.config.num_epochs
            key, episodes = f"{task.seed}/{step}", collected.episodes
            parts = mini_batches(policy_batch, self.config.mini_batch_size, epochs, key=key, episodes=episodes)
            policy_metrics = merge([self._update(part, number) for number, part in enumerate(parts, self.pretraining_batches)])
            policy_metrics = self.critic.learnt(policy_metrics)
        self.sample_again()
        self.moments = rewarded.moments
        self.pretraining_batches += len(parts) if self.pretraining else 0
        used_kl_coef, mean_kl = self.kl_coef, masked_mean(kl, batch.loss_mask)
        if self.config.kl_target and not self._is_warming_up(step) and math.isfinite(mean_kl):
            self.kl_coef = adapt_kl_coef(self.kl_coef, mean_kl, self.config.kl_target, self.config.kl_horizon, len(collected.episodes))
        metrics = response_metrics(collected, clock.seconds["time/generate"]) | values(policy_metrics) | critic_metrics
        metrics |= {"policy/kl": mean_kl, "policy/kl_coef": used_kl_coef} | dict(rewarded.metrics) | task.shares(collected.rollouts)
        # The critic's batch: while it warms up it is the only one that learns.
        metrics |= of_rows(value_batch.loss_mask, batch.loss_mask, no_reward=~collected.valid, truncated=batch.truncated)
        self.critic.end_step()
        known = {"trainer": old_logprobs, "entropy": found["entropy"], "reference": ref_logprobs}
        known |= {"advantage": policy_batch.advantages, "value": value_batch.old_values}
        return StepResult(metrics=metrics, samples=sample_rows(collected, task.decode, per_token=known))

    def experience(
        self, batch: RolloutBatch, collected: ScoredRollouts, old_logprobs: Tensor, kl: Tensor
    ) -> tuple[PolicyBatch, ValueBatch]:
        """Advantages and returns of one batch of rollouts with shaped rewards. `kl` is the per-token estimate, float32 [B, S]."""
        config, mask = self.config, batch.loss_mask
        old_values = torch.zeros_like(old_logprobs)
        assert collected.values is not None  # the critic's
        for row, own in enumerate(collected.values):
            old_values[row, : own.shape[0]] = own
        rows = collected.episodes
        scores = outcome_rewards(rows.per_episode(collected.rewards), rows.joined(mask), rows.per_episode(collected.valid))
        rewards = rows.split(scores) - self.kl_coef * kl * mask
        following = sampled_next(collected.rollouts, rows, mask.shape[1])
        advantages, returns = gae_over_rows(rewards, old_values, mask, following, config.gamma, config.gae_lambda)
        finite = finite_rows(returns, self.task.guard, "the returns")
        advantages, returns = (torch.where(finite[:, None], x, 0.0) for x in (advantages, returns))
        mask = mask & (collected.valid & finite)[:, None]
        if config.mask_truncated:
            mask = mask & ~batch.truncated[:, None]
        policy_batch = of_kind(
            PolicyBatch,
            batch,
            loss_mask=mask,
            old_logprobs=old_logprobs,
            advantages=whiten(advantages, mask),
            old_values=old_values,
            returns=returns,
            rollout_logprobs=batch.rollout_logprobs if self.task.compares_logprobs else None,
        )
        value_batch = of_kind(ValueBatch, batch, loss_mask=mask, old_values=old_values, returns=returns)
        return as_episodes(policy_batch, rows), value_batch if rows.are_single else replace(value_batch, episodes=rows.owner)

    def finish(self) -> None:
        """Wait for the critic; raises its error on every rank."""
        self.critic.finish()

    def state(self) -> dict[str, Any]:
        taken = {"pretraining_batches": self.pretraining_batches} if self.pretraining else {}
        return {"kl_coef": self.kl_coef, "shaping": asdict(self.moments), **taken, **self.critic.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.kl_coef = state["kl_coef"]
        self.moments = Moments(**state["shaping"])
        self.pretraining_batches = state.get("pretraining_batches", 0)  # a run may begin with PPO alone
        self.critic.load_state(state)
        self.rollout_source.load_state({}, self.policy.version)  # every step takes one round

    def _update(self, part: PolicyBatch, number: int) -> dict[str, Metric]:
        """One update of the policy, with what the critic adds, and the pretraining batch of that number if there is such text."""
        text = [self.pretraining.batch(number)] if self.pretraining else []
        return self.policy.train_step(part, self.loss, [*self.critic.added, *text])

    def _is_warming_up(self, step: int) -> bool:
        """Whether only the critic trains: what the KL of a policy that stands still is, says nothing about its coefficient."""
        return step <= self.config.critic_warmup_steps


COLUMNS = (
    *REWARDED,
    Column("KL", "policy/kl", ".4f"),
    Column("value loss", "critic/loss", ".4f", Goal.lowest),
)


@dataclass(kw_only=True, slots=True)
class TrainPPO(OnlineRun):
    """PPO with its critic and reward components (conf/ppo/ppo.yaml)."""

    plays_sessions: ClassVar[bool] = True
    algorithm: PPOConfig = field(default_factory=PPOConfig)  # settings of PPO; defaults are NeMo-Aligner's where it has them
    critic: CriticConfig = field(default_factory=CriticConfig)
    pretraining: PretrainingConfig = field(default_factory=PretrainingConfig)  # text for algorithm.pretraining_coef

    @property
    def steps_without_updates(self) -> int:
        return self.algorithm.critic_warmup_steps

    def __post_init__(self) -> None:
        self.critic.check_served(self.parallel, self.num_processes)
        if self.critic.kind is CriticKind.head:
            self.critic.check_head(self.model, self.optimizer, self.algorithm)
            if steps := self.algorithm.critic_warmup_steps:
                raise ConfigError(f"algorithm.critic_warmup_steps={steps}: critic.kind=head learns in the policy's updates; allowed: 0")
        if self.critic.with_reward and not self.reward.serve:
            raise ConfigError("critic.with_reward=true: needs reward.serve=true: a reward that the actor computes is in no server")
        if self.critic.optimizer.ema_decay:
            raise ConfigError(f"critic.optimizer.ema_decay={self.critic.optimizer.ema_decay}: no critic is exported; allowed: 0")
        coef, text = self.algorithm.pretraining_coef, self.pretraining.train
        if coef and not text:
            raise ConfigError(f"algorithm.pretraining_coef={coef}: needs pretraining.train, the text that it weighs; or 0")
        if text and not coef:
            raise ConfigError(f"pretraining.train={text}: nothing learns it with algorithm.pretraining_coef=0; allowed: ''")
        OnlineRun.__post_init__(self)
        if self.placement is Placement.colocated and self.critic.kind is CriticKind.model:
            self.critic.optimizer.offload = True  # as of every model whose GPUs others use
        self.algorithm.shaping.check_length(self.rollout.sampling.longest)

    def traits(self) -> Traits:
        traits = self.actor_traits(phases=(Phase.logprobs,), has_reference=True)
        if self.critic.kind is CriticKind.head:
            own = self.critic.optimizer
            traits = replace(traits, value_head=PolicyHead(gradient=self.critic.head.gradient, lr=own.lr, min_lr=own.min_lr))
        else:
            traits = replace(traits, checkpoints=(POLICY, CRITIC))
        work, text = traits.work, self.pretraining
        if not (self.algorithm.pretraining_coef and work.length):
            return traits
        added = math.ceil(text.batch_size * (text.max_length or work.length) / work.length)  # as many sequences of the rollouts' length
        return replace(traits, work=replace(work, update_rows=work.update_rows + added))

    def models(self) -> list[UsedModel]:
        actor, *others = OnlineRun.models(self)
        own = UsedModel(component="critic", key="critic.model", config=self.critic.model.or_else(self.model), is_scalar=True)
        return [actor, *([] if self.critic.kind is CriticKind.head else [own]), *others]

    def readers(self) -> dict[str, ModelConfig]:
        own = OnlineRun.readers(self)
        critic = {} if self.critic.kind is CriticKind.head else {"critic.model": self.critic.model.or_else(self.model)}
        return {"model": own.pop("model")} | critic | own

    def servers(self) -> Sequence[Server]:
        others = OnlineRun.servers(self)
        if not self.critic.is_served:
            return others
        own = self._critic_component(self.critic.num_processes, self.critic.parallel)
        if not self.critic.with_reward:
            return (own, *others)
        guest = replace(others[0], num_ranks=own.num_ranks, parallel=own.parallel, settings=own.settings)
        return (replace(own, guest=guest),)

    def residents(self) -> Sequence[Server]:
        return (self._critic_component(self.num_processes, self.parallel),) if self.critic.kind is CriticKind.model else ()

    def _critic_component(self, num_ranks: int, parallel: ParallelConfig) -> Server:
        critic, rows = self.critic, self.algorithm.rollouts_per_step
        actor = self.traits().work
        work = Work(
            phases=(Phase.values, Phase.train),
            rows=rows,
            length=actor.length,
            response_length=actor.response_length,
            update_rows=min(rows, critic.mini_batch_size),
            num_updates=-(-rows // critic.mini_batch_size) * critic.num_epochs,
        )
        return Server(
            name="critic",
            num_ranks=num_ranks,
            parallel=parallel,
            settings=critic.server,
            work=work,
            model=critic.model,
            optimizer=critic.optimizer,
            check=self.check_critic,
        )

    @property
    def critic_parallel(self) -> ParallelConfig:
        """The critic's layout."""
        return self.critic.parallel if self.critic.is_served else self.parallel

    @property
    def reward_service(self) -> str:
        return "critic" if self.critic.with_reward else "reward"

    def check(self, architecture: Architecture, num_ranks: int) -> None:
        OnlineRun.check(self, architecture, num_ranks)
        if self.algorithm.pretraining_coef:
            dp = num_ranks // self.parallel.replica_size
            check_replicas("batch_size", self.pretraining.batch_size, dp, section="pretraining")

    def check_reward(self, model: ModelConfig, architecture: Architecture, num_ranks: int) -> None:
        with in_section(self.reward_service):
            check_layout(model, self.critic.parallel if self.critic.with_reward else self.reward.parallel, architecture, num_ranks)

    def check_critic(self, model: ModelConfig, architecture: Architecture, num_ranks: int) -> None:
        """Raise ConfigError if the critic, whose model is `model`, cannot be laid out, or has too few rollouts for its replicas."""
        with in_section("critic", own_layout=self.critic.is_served):
            check_layout(model, self.critic_parallel, architecture, num_ranks)
        rows, size, dp = self.algorithm.rollouts_per_step, self.critic.mini_batch_size, num_ranks // self.critic_parallel.replica_size
        smallest = rows % size or size  # the last one may be smaller
        if smallest < dp:
            raise ConfigError(
                f"critic.mini_batch_size={size}: the last mini-batch of {rows} rollouts has {smallest}, "
                f"fewer than the critic's {dp} data-parallel replicas"
            )


def build(job: OnlineJob[TrainPPO]) -> Built:
    """The actor; servers are found through the run directory."""
    settings, text = job.config.algorithm, job.config.pretraining
    examples = job.pretraining(text) if settings.pretraining_coef else None
    task = job.task(with_reference=True, num_prompts=settings.rollouts_per_step)
    critic = create_critic(job, task)
    job.ready()
    pretraining = None
    if examples is not None:
        order = order_of(examples, text.batch_size, job.config.run.seed)
        pretraining = Pretraining(examples=examples, order=order, pad_id=job.tokenizer.pad_id, coef=settings.pretraining_coef)
    source = job.rollout_source(task, critic=critic.asked)
    algorithm = PPO(settings, job.policy, task, critic, source, pretraining=pretraining)
    resident = critic if isinstance(critic, ModelCritic) else None
    return Built(algorithm=algorithm, model=job.policy.model, critic=critic.asked, resident=resident, given_away=task.given_away)


def create_critic(job: OnlineJob[TrainPPO], task: OnlineTask) -> CriticRole:
    """The critic of `critic.kind`, with its first weights."""
    config = job.config.critic
    loss = partial(value_loss, clip=config.clip or None)
    if config.kind is CriticKind.server:
        return ServedCritic(task, job.critic(task))
    if config.kind is CriticKind.head:
        return HeadCritic(task, loss, coef=config.head.coef)
    model, tokenizer = job.value_model()
    training = ValueTraining(loss=loss, mini_batch_size=config.mini_batch_size, num_epochs=config.num_epochs)
    return ModelCritic(task, model, training, tokenizer=tokenizer, takes_turns=config.optimizer.offload)


RECIPE = Recipe(name="ppo", config=TrainPPO, build=build, columns=COLUMNS)
