"""Settings and checks of every run that learns from the policy's own samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from aligner.cluster.component import LocalLauncherConfig, Placement
from aligner.data.config import PromptDataConfig
from aligner.data.prompts import load_prompts
from aligner.data.report import LoadReport
from aligner.data.tokenizer import Tokenizer
from aligner.environments.config import EnvironmentConfig
from aligner.errors import NOT_NEGATIVE, POSITIVE, SHARE, ConfigError, check_range
from aligner.models.config import Architecture, ModelConfig
from aligner.models.training.guard import GuardConfig
from aligner.models.training.optimizer import OptimizerConfig
from aligner.planner.workload import Phase, Work
from aligner.rewards.config import RewardFunctionConfig
from aligner.rewards.forms import columns_read
from aligner.rewards.load import load_reward_function
from aligner.rollout.config import EngineKind, RolloutConfig, check_engine, check_precision, check_untrained
from aligner.run import lengths
from aligner.run.settings import (
    CheckpointConfig,
    JobRun,
    Kind,
    LoopConfig,
    Server,
    Traits,
    UsedModel,
    check_best_metric,
    check_layout,
    check_replicas,
)
from aligner.servers.components import ActorConfig, RewardConfig, in_section
from aligner.servers.config import ClientConfig
from aligner.types import Prompt

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(kw_only=True, slots=True)
class ValidationConfig:
    """How a validation is judged, and what it samples besides one greedy response per prompt."""

    scorer: RewardFunctionConfig = field(default_factory=RewardFunctionConfig)  # judges responses; without a path: no accuracy
    num_samples: int = 0  # sampled responses per prompt; 0: none
    temperature: float = 1.0  # of the sampled responses
    top_p: float = 1.0  # of the sampled responses: the likeliest tokens with this share of the probability; 1: off
    k: list[int] = field(default_factory=list)  # of pass@k and best@k; empty: 1, 2, 4, ... up to num_samples
    pass_threshold: float = 0.5  # smallest score of `scorer` with which a response counts as right

    def __post_init__(self) -> None:
        check_range(self, "validation", NOT_NEGATIVE, "num_samples", note=" (0 is off)")
        check_range(self, "validation", POSITIVE, "temperature", note=" (one greedy response is made anyway)")
        check_range(self, "validation", SHARE, "top_p", note=" (1 is off)")
        for k in self.k:
            if not 1 <= k <= self.num_samples:
                raise ConfigError(f"validation.k={self.k}: {k} must be from 1 to num_samples={self.num_samples}")

    @property
    def ks(self) -> list[int]:
        """The numbers of responses that pass@k and best@k are of."""
        return self.k or [2**power for power in range(self.num_samples.bit_length())]

    def reports(self) -> list[str]:
        """The names of the metrics that a validation with these settings gives."""
        has_accuracy = bool(self.scorer.path)
        names = ["reward", "response_length", "truncated_fraction"] + ["accuracy"] * has_accuracy
        if self.num_samples:
            n = self.num_samples
            names += [f"reward_mean@{n}", f"truncated@{n}", *(f"reward_best@{k}" for k in self.ks)]
            names += [f"mean@{n}", *(f"pass@{k}" for k in self.ks)] * has_accuracy
        return [f"validation/{name}" for name in names]


@dataclass(kw_only=True, slots=True)
class OnlineRun(JobRun):
    """A run that learns from its own samples. `build(job: OnlineJob)` returns a `Built`."""

    kind: ClassVar[Kind] = Kind.samples
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)  # what NaN, empty updates and a gap between engine and trainer lead to
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)  # how checkpoints are written, verified and kept
    data: PromptDataConfig = field(default_factory=PromptDataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)  # the engine that samples responses, and how it draws them
    actor: ActorConfig = field(default_factory=ActorConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)  # responses are then episodes of several turns
    server_client: ClientConfig = field(default_factory=ClientConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)  # how validation responses are sampled and judged
    local_launcher: LocalLauncherConfig = field(default_factory=LocalLauncherConfig)
    placement: Placement = Placement.separate  # of the servers: on GPUs of their own, or on the actor's, on which all then take turns
    plays_sessions: ClassVar[bool] = False  # whether it learns from episodes of several rows, as programs at the endpoint make them
    batch_setting: ClassVar[str] = "mini_batch_size"  # what the setting is called that `algorithm.mini_batch_size` says

    def __post_init__(self) -> None:
        JobRun.__post_init__(self)
        if self.rollout.sampling.temperature == 0:
            raise ConfigError("rollout.sampling.temperature=0: training rollouts need a positive temperature")
        self.check_sessions()
        if self.placement is Placement.colocated:
            self._check_colocated()
            self.rollout.offload = True  # what the next phase does not need has to make room anyway
            for optimizer in (self.optimizer, *(server.optimizer for server in self.servers())):
                if optimizer is not None:
                    optimizer.offload = True
        reports = self.validation.reports()
        missing = "" if self.validation.scorer.path else "; accuracy, mean@n and pass@k need validation.scorer.path"
        check_best_metric(self.checkpoint, self.loop, reports=reports, validation=self.data.validation, missing=missing)

    def check_sessions(self) -> None:
        """Raise ConfigError for sessions in a run that does not learn from them, or whose engine cannot play them."""
        if self.environment.asks_endpoint and not self.plays_sessions:
            raise ConfigError(
                f"environment.kind={self.environment.kind.value}: a session may be several rows, which this recipe does not learn from; "
                "allowed: with grpo, ppo, rejection_sampling"
            )
        if self.environment.asks_endpoint and self.rollout.engine == EngineKind.tensorrt_llm:
            raise ConfigError(
                f"rollout.engine={EngineKind.tensorrt_llm.value}: answers no requests from outside, as environment.kind="
                f"{self.environment.kind.value} makes them; allowed: megatron, vllm, auto"
            )

    def _check_colocated(self) -> None:
        if self.rollout.asynchronous.max_staleness:
            raise ConfigError(
                f"placement=colocated: rollout.asynchronous.max_staleness={self.rollout.asynchronous.max_staleness} samples while the "
                "policy trains, and here all take turns; allowed: 0, or placement=separate"
            )
        if not self.servers():
            raise ConfigError("placement=colocated: this run has no servers; allowed: separate, or reward.serve=true")
        for server in self.servers():
            if server.num_ranks > self.num_processes:
                raise ConfigError(
                    f"placement=colocated: {server.name}.num_processes={server.num_ranks} is more than the actor's "
                    f"num_processes={self.num_processes}, whose GPUs it shares; allowed: at most so many, or placement=separate"
                )

    def read(self, location: str, tokenizer: Tokenizer, *, first: int | None = None) -> tuple[Sequence[Any], LoadReport]:
        return load_prompts(location, self.data, tokenizer, first=first, columns=self.columns())

    def columns(self) -> frozenset[str] | None:
        """The fields of the prompts' records that reward functions read; None: any may be read. Raises ConfigError for a lost function."""
        named = [one for one in (self.reward.function, self.validation.scorer, *self.reward.functions.values()) if one.path]
        read = [None if one.arguments else columns_read(load_reward_function(one.path)) for one in named]
        asks = any(one.judge.template for one in self.reward.functions.values())
        return None if self.environment.is_on or asks or None in read else frozenset(name for one in read for name in one or ())

    def models(self) -> list[UsedModel]:
        found = [UsedModel(component="actor", key="model", config=self.model)]
        if self.reward.serve and not self.reward.function.path:
            found.append(UsedModel(component="reward", key="reward.model", config=self.reward.model, is_scalar=True, needs_head=True))
        return found

    def readers(self) -> dict[str, ModelConfig]:
        served = {"reward.model": self.reward.model.or_else(self.model)} if self.reward.serve else {}
        return {"model": self.model} | served

    def servers(self) -> Sequence[Server]:
        if not self.reward.serve:
            return ()
        reward = self.reward
        prompt, response = self.data.max_prompt_length, self.rollout.sampling.max_response_length
        rows = self.algorithm.rollouts_per_step
        work = Work(phases=(Phase.scores,), rows=rows, length=prompt + response, response_length=response)
        return (
            Server(
                name="reward",
                num_ranks=reward.num_processes,
                parallel=reward.parallel,
                settings=reward.server,
                work=None if reward.function.path else work,
                model=reward.model,
                check=self.check_reward,
            ),
        )

    @property
    def sampler(self) -> RolloutConfig:
        return self.rollout

    @property
    def server_placement(self) -> Placement:
        return self.placement

    @property
    def steps_without_updates(self) -> int:
        """Training steps at the beginning that leave the policy unchanged."""
        return 0

    @property
    def reward_service(self) -> str:
        """The component that serves the reward."""
        return "reward"

    def check_reward(self, model: ModelConfig, architecture: Architecture, num_ranks: int) -> None:
        """Raise ConfigError if the reward model, whose config is `model`, cannot be laid out."""
        with in_section("reward"):
            check_layout(model, self.reward.parallel, architecture, num_ranks)

    def with_lengths(self, context: lengths.Context) -> Self:
        return lengths.sampled(self, context)

    def check(self, architecture: Architecture, num_ranks: int) -> None:
        check_layout(self.model, self.parallel, architecture, num_ranks)
        self.check_engine(architecture, num_ranks)
        check_replicas(self.batch_setting, self.algorithm.mini_batch_size, num_ranks // self.parallel.replica_size)

    def check_engine(self, architecture: Architecture, num_ranks: int) -> None:
        """Raise ConfigError if the engine cannot do what `rollout` asks of it on `num_ranks` ranks."""
        check_engine(self.rollout, architecture, tp=self.rollout.tp or self.parallel.tp, world_size=num_ranks)
        check_precision(self.rollout, self.model, self.parallel)
        if self.rollout.engine == EngineKind.tensorrt_llm and self.rollout.sampling.raw_logprobs:
            raise ConfigError(
                "rollout.sampling.raw_logprobs=true: rollout.engine=tensorrt_llm gives log-probs of one kind, and validation and greedy "
                "baselines sample at temperature 0; allowed: false (at temperature=1 both kinds are the same)"
            )

    def check_complete(self) -> None:
        """Raise ConfigError if nothing gives rewards, or a setting of another part is missing."""
        JobRun.check_complete(self)
        if self.has_scorer or not self.environment.is_on:
            self.reward.check_named()
        if self.environment.is_on and "environment" in self.reward.functions:
            raise ConfigError("reward.functions.environment: so the environment's own reward is named; give it another name")

    def check_given_rewards(self) -> None:
        """`check_complete` of a run that learns without rewards, and reports those that are configured."""
        check = OnlineRun if self.has_scorer or self.environment.is_on else JobRun
        check.check_complete(self)

    def describe_judge(self, load: Callable[[], tuple[Any, Sequence[Prompt], Tokenizer, int]]) -> str:
        """For the preflight: how the policy judges itself, '' if it does not. `load` gives the config with its lengths, the first prompts,
        the tokenizer and the model's context."""
        return ""

    @property
    def has_scorer(self) -> bool:
        """Whether a reward function or a reward model scores whole responses, besides an environment."""
        return self.reward.serve or self.reward.has_functions

    def actor_traits(self, *, phases: Sequence[Phase] = (), unit: int = 1, extra_rows: int = 0, has_reference: bool = False) -> Traits:
        """Traits of an actor that samples, makes the passes of `phases`, and trains on `unit` rows for each of a mini-batch's examples."""
        algorithm, response = self.algorithm, self.rollout.sampling.max_response_length
        reference = (Phase.ref_logprobs,) if has_reference else ()
        return Traits(
            role="actor",
            work=Work(
                phases=(Phase.generate, *phases, *reference, Phase.train),
                rows=algorithm.rollouts_per_step,
                length=self.data.max_prompt_length + response,
                response_length=response,
                update_rows=algorithm.mini_batch_size * unit,
                num_updates=algorithm.updates_per_step,
                unit=unit,
                prompts=getattr(algorithm, "prompts_per_step", 0),
                extra_rows=extra_rows,
            ),
            has_reference=has_reference,
            has_engine=True,
        )


def check_iterated(config: OnlineRun) -> None:
    """Raise ConfigError for what training in iterations, on pairs of single responses, cannot be combined with."""
    check_untrained(config.rollout, "an iteration is sampled before it is trained on, as text")
    if config.environment.is_on:
        raise ConfigError(f"{config.environment.title}: single responses are compared; allowed: none")
