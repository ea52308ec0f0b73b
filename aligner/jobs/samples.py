"""The job of a recipe that learns from its own samples: what its `build` is given, and what is done around it.

`CheckpointedReference` is a reference that follows the trained policy every so many steps, and that a resumed run finds again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from aligner.cluster.component import Placement
from aligner.cluster.run_directory import POLICY, REFERENCE
from aligner.data.collate import SupervisedExample
from aligner.data.config import PretrainingConfig
from aligner.data.order import EpochSampler, order_of
from aligner.data.prompts import load_prompts
from aligner.data.stored import row_counts
from aligner.data.tokenizer import Tokenizer
from aligner.errors import ConfigError, describe_os_error
from aligner.jobs.parts import length_of, load_model_files, load_sets, run_tokenizer, train_to_end, with_lengths
from aligner.jobs.sources import FrozenModels, create_critic, critic_source, pinned, pinned_base
from aligner.loop.loop import Built
from aligner.losses.correction import Correction
from aligner.models import create
from aligner.models.checkpoint import checkpoint, files
from aligner.models.config import Architecture, ModelConfig
from aligner.models.training.guard import Guard
from aligner.models.training.policy import MegatronPolicy, MegatronValueModel, ReferencePolicy
from aligner.online.async_rollout_source import AsyncRolloutSource
from aligner.online.collect import Scorers
from aligner.online.config import OnlineRun
from aligner.online.policy_gradient import PolicyGradientConfig
from aligner.online.task import OnlineTask, Validation
from aligner.parallel import platform
from aligner.parallel.collectives import from_rank_0
from aligner.parallel.progress import WAIT_FOR_SERVERS
from aligner.protocols import Critic, RewardModel
from aligner.reporting.rollout_table import write_rows
from aligner.rewards.config import formula
from aligner.rewards.local import NoReward, function_reward
from aligner.rollout.config import check_ahead, check_cache
from aligner.rollout.create import check_installed, create_engine
from aligner.rollout.engine import Capabilities
from aligner.run.recipe import Recipe
from aligner.run.session import Session, announced, open_session
from aligner.servers.access import Access
from aligner.servers.client import CriticClient, RewardClient, weighted_sum
from aligner.servers.registry import Publication
from aligner.servers.turns import SharedDevice, Turn
from aligner.types import LogprobKind, Prompt, Rollout, SampleRow


class CheckpointedReference:
    """`aligner.algorithms.online_dpo.MovingReference`: every reference but the first is a checkpoint of weights alone, in
    <run>/checkpoints/reference. Those that none of the policy's checkpoints continues with are removed."""

    def __init__(self, session: Session, policy: MegatronPolicy, frozen: ReferencePolicy, *, verify: bool) -> None:
        self._session = session
        self._policy = policy
        self._frozen, self.logprobs = frozen, frozen.logprobs
        self._verify = verify
        self._folder = session.directory.checkpoints / REFERENCE

    def renew(self, step: int) -> None:
        """Freeze the current policy, which has finished `step`. Every rank calls it. Raises CheckpointError if it cannot be written."""
        request = checkpoint.SaveRequest(step=step, state={}, config_yaml=self._session.config_yaml, weights_only=True)
        checkpoint.save(self._folder, self._policy.model, request)
        self._frozen.renew()
        from_rank_0(lambda: remove_unused(self._folder, self._session.directory.checkpoints / POLICY))

    def restore(self, step: int) -> None:
        """Freeze what `renew(step)` wrote. Every rank calls it. Raises CheckpointError if it is not there or damaged."""
        path = files.step_directory(self._folder, step)
        self._frozen.restore(partial(checkpoint.load_same, path=path, verify=self._verify))


def unused(references: Sequence[int], policies: Sequence[int]) -> list[int]:
    """The references (by step, ascending) that no checkpoint of the policy needs: not the last before it (a checkpoint of the step at which
    it was renewed was saved before that), and older than the newest one."""
    if not policies:
        return []
    needed = {max((one for one in references if one < step), default=0) for step in policies}
    return [one for one in references if one not in needed and one < max(policies)]


def remove_unused(references: Path, policies: Path) -> None:
    """Remove unused references and leftovers of a killed run from disk. On one rank."""
    files.clean([references])
    for step in unused(list(files.complete_steps(references)), list(files.complete_steps(policies))):
        files.remove_step([references], step)


C = TypeVar("C", bound=OnlineRun)
Load = Callable[[Tokenizer], tuple[Sequence[Prompt], Sequence[Prompt]]]


@dataclass(kw_only=True)
class OnlineJob(FrozenModels, Generic[C]):
    """The parts from which a recipe builds its algorithm, on one rank. `config` has every length, and with the task the number of steps."""

    session: Session
    config: C
    publication: Publication | None  # of rank 0
    policy: MegatronPolicy = field(init=False, repr=False)  # once there is a task
    tokenizer_files: Path | None = None
    parts: list[Callable[[], None]] = field(default_factory=list)  # how what was opened is closed, in this order
    length: str = ""  # of the whole run, in words, once there is a task

    @cached_property
    def files(self) -> tuple[Tokenizer, Architecture]:
        """The policy's tokenizer and architecture."""
        return load_model_files(self.config.model, self.config.data, self.session)

    @property
    def tokenizer(self) -> Tokenizer:
        """The policy's."""
        return self.files[0]

    @property
    def context(self) -> int:
        """Tokens that the policy can read."""
        return create.context_length(self.config.model, self.files[1])

    def load(self, load: Callable[..., Any], tokenizer: Tokenizer) -> tuple[Sequence[Any], Sequence[Any]]:
        """(training examples, validation examples); says what was left out. Raises DataError listing all bad lines."""
        return load_sets(self.session, load, self.config.data, tokenizer)

    def load_prompts(self, tokenizer: Tokenizer) -> tuple[Sequence[Prompt], Sequence[Prompt]]:
        """The prompts of data.train and data.validation."""
        return load_prompt_sets(self.session, self.config, tokenizer)

    def pretraining(self, settings: PretrainingConfig) -> Sequence[SupervisedExample]:
        """The text that is learnt besides the policy's own samples; says what was left out. Raises DataError listing all bad lines."""
        if settings.max_length > self.context:
            raise ConfigError(f"pretraining.max_length={settings.max_length}: longer than the model's context of {self.context} tokens")
        from aligner.data.supervised import load_supervised

        how = replace(settings, max_length=settings.max_length or self.context).reading(self.config.data)
        examples, report = load_supervised(settings.train, how, self.tokenizer, heartbeat=self.session.progress.heartbeat)
        self.session.trains_on(report)
        return examples

    def task(self, *, with_reference: bool, num_prompts: int, load: Load | None = None) -> OnlineTask:
        """Prompts, engine, rewards and validation; `num_prompts` a step. The policy is in `policy` then. Data first (bad lines are found in
        seconds), then models, then the engine on the policy's own weights. `load` replaces records of prompts."""
        session, sampling = self.session, self.config.rollout.sampling
        if reshaping := sampling.reshaping():
            session.say(f"warning: rollout.sampling: {', '.join(reshaping)}: other than the policy that is trained (docs/rollouts.md)")
        self.config.check_complete()
        check_installed(self.config.rollout)
        model = (pinned if with_reference else pinned_base)(session, "model", self.config.model)
        if model != self.config.model:
            self.files = load_model_files(model, self.config.data, session)
        tokenizer, architecture = self.files
        self.config.check(architecture, session.topology.world_size)
        prompts, held_out, order = self._data(num_prompts, load or partial(load_prompt_sets, session, self.config))
        config = self.config
        self.tokenizer_files = run_tokenizer(session, config, model)
        follow_up, is_played = None, config.environment.asks_endpoint
        if config.environment.is_on and not is_played:
            from aligner.environments.exchange import environment_follow_up  # with the processes of environments

            follow_up = environment_follow_up(config.environment, tokenizer, [*prompts, *held_out])
        judges = self._judges()
        self.policy = self._policy(model, judges.shared)
        engine: Any = create_engine(self.policy, config.rollout, tokenizer=tokenizer, follow_up=follow_up)
        if is_played:
            from aligner.jobs.agents import played  # with the endpoint and what speaks HTTP

            engine = played(engine, session, config, tokenizer, self.tokenizer_files)
        task = OnlineTask(
            engine=engine,
            reference=ReferencePolicy(self.policy) if with_reference else None,
            judges=judges,
            validation=self._validation(held_out),
            topology=session.topology,
            train=prompts,
            order=order,
            decode=tokenizer.decode,
            seed=config.run.seed,
            max_response_length=sampling.max_response_length,
            compares_logprobs=compares_logprobs(config, engine.capabilities, session.say),
            guard=config.guard,
        )
        self.length = length_of(config, order, f"responses of at most {task.max_response_length:,} tokens")
        self.parts += [engine.shutdown, judges.reward.close, *([follow_up.close] if follow_up else [])]
        return task

    def _data(self, num_prompts: int, load: Load) -> tuple[Sequence[Prompt], Sequence[Prompt], EpochSampler]:
        """Training and validation prompts, and the order of the first; `config` then has the number of steps."""
        config = self.config
        if platform.backend() == "nccl":
            check_ahead(config.rollout, tp=config.rollout.tp or config.parallel.tp)
        prompts, held_out = load(self.tokenizer)
        order = order_of(prompts, num_prompts, config.run.seed)
        self.config = replace(config, loop=config.loop.over(order))
        order.check(self.config.loop.max_steps)
        longest = max((int(row_counts(one)[..., 0].max()) for one in (prompts, held_out) if len(one)), default=0)
        check_cache(config.rollout, longest_prompt=longest, context=self.context)
        return prompts, held_out, order

    def _judges(self) -> Scorers:
        session, config, tokenizer = self.session, self.config, self.tokenizer
        reward = _reward(session, config, tokenizer)
        return Scorers(
            reward=reward,
            pad_id=tokenizer.pad_id,
            reward_name=_reward_name(config),
            non_finite=config.guard.reward,
            heartbeat=session.progress.heartbeat,
            shared=_shared_device(session, config),
            compare=getattr(reward, "compare", None),
        )

    def _policy(self, model: ModelConfig, shared: SharedDevice | None) -> MegatronPolicy:
        config = self.config
        updates = max(config.loop.max_steps - config.steps_without_updates, 1) * config.algorithm.updates_per_step
        how = {"total_steps": updates, "temperature": config.rollout.sampling.temperature, "replay_routes": config.rollout.replays_routes}
        how |= {"value_head": config.traits().value_head, "vision": self.tokenizer.vision}
        training = create.training(model, config.optimizer, guard=Guard(config.guard), **how)
        policy = create.create_policy(model, self.files[1], config.parallel, self.session.topology, training)
        if shared is not None:
            shared.model = policy.model
        return policy

    def _validation(self, prompts: Sequence[Prompt]) -> Validation:
        config = self.config
        scorer = config.validation.scorer
        return Validation(
            prompts=prompts,
            sampling=replace(config.rollout.sampling, temperature=0.0),
            scorer=function_reward(scorer, self.tokenizer.decode, "validation.scorer") if scorer.path else None,
            config=config.validation,
            keep_samples=partial(keep_validation, self.session),
        )

    def critic(self, task: OnlineTask) -> CriticClient:
        """The critic behind its server, once that is ready."""
        session, config = self.session, self.config
        critic = CriticClient(
            session.directory.services,
            config=config.server_client,
            access=_access(session, config),
            run=session.directory.run_id(),
            journal=session.directory.journal / "critic" if session.is_first else None,
        )
        if session.is_first:
            session.say("waiting for the critic server")
        with task.given_away():
            if session.is_first:
                with session.progress.phase(WAIT_FOR_SERVERS):
                    critic.wait_until_ready()
        self.parts.insert(1, critic.close)
        return critic

    def value_model(self) -> tuple[MegatronValueModel, Path]:
        """The critic of a run that serves none, and the folder of its tokenizer; once there is a policy."""
        source = critic_source(self.session, self.config)
        self.config.check_critic(source.config, source.architecture, self.session.topology.world_size)
        self.policy.sleep()
        model = create_critic(self.session, self.config, source, steps=self.config.loop.max_steps)
        self.session.say(f"critic: in the actor's processes, starts from {source.config.path or 'random weights'}")
        return model, source.tokenizer_files

    def ready(self) -> None:
        """Tell the others that this component is about to train."""
        if self.publication is not None:
            self.publication.ready()

    def moving_reference(self, task: OnlineTask) -> CheckpointedReference:
        """A reference that follows the policy; a resumed run restores it."""
        return CheckpointedReference(self.session, self.policy, task.reference, verify=self.config.checkpoint.verify)

    def rollout_source(
        self, task: OnlineTask, *, group_size: int = 1, greedy: bool = False, critic: Critic | None = None, takes_more: bool = False
    ) -> AsyncRolloutSource | None:
        """The rounds of an asynchronous run; None for an on-policy run. `greedy`: a response of that kind per prompt is needed too.
        `critic` gives the values. `takes_more`: a step may take several rounds."""
        config, settings = self.config, self.config.rollout.asynchronous
        if not settings.max_staleness:
            return None
        if isinstance(config.algorithm, PolicyGradientConfig) and config.algorithm.correction.kind is Correction.none:
            self.session.say(
                f"warning: algorithm.correction.kind=none with rollout.asynchronous.max_staleness={settings.max_staleness}: what older "
                "weights sampled is learnt from as if the policy had sampled it; tis, icepop or mis correct for it "
                "(docs/asynchronous.md)"
            )
        last = None if takes_more else config.loop.max_steps
        return AsyncRolloutSource(task, group_size, settings, task.engine.gate, greedy=greedy, critic=critic, last=last)


def train(recipe: Recipe, config: OnlineRun) -> int:
    """Run a recipe that learns from its own samples; the exit code. Every rank calls it."""
    opened = open_session(config, config.run, config.parallel, component="actor", recipe=recipe.name)
    with opened as session, announced(session, "actor") as publication:
        job = OnlineJob(session=session, config=with_lengths(config), publication=publication)
        built: Built = recipe.build(job)
        code = train_to_end(session, job.config, built, tokenizer=job.tokenizer_files, shown=recipe.columns, length=job.length)
        for close in job.parts:
            close()
    return code


def load_prompt_sets(session: Session, config: OnlineRun, tokenizer: Tokenizer) -> tuple[Sequence[Prompt], Sequence[Prompt]]:
    """The prompts of data.train and data.validation; says what was left out. Raises DataError listing all bad lines."""
    train, validation = load_sets(session, partial(load_prompts, columns=config.columns()), config.data, tokenizer)
    return train, validation[: config.data.num_validation_prompts]


def compares_logprobs(config: OnlineRun, capabilities: Capabilities, say: Callable[[str], None]) -> bool:
    """Whether the engine's log-probs are of the same distribution as the policy's; prints once if not. Raises ConfigError if a correction
    by them is asked for."""
    temperature = config.rollout.sampling.temperature
    if capabilities.logprobs is LogprobKind.sampled or temperature == 1:
        return True
    kind = config.algorithm.correction.kind if isinstance(config.algorithm, PolicyGradientConfig) else Correction.none
    if kind is not Correction.none:
        raise ConfigError(
            f"algorithm.correction.kind={kind.value}: rollout.engine={capabilities.name} gives log-probs at temperature 1, which are not "
            f"those of rollout.sampling.temperature={temperature}; allowed: none, or temperature 1"
        )
    if config.guard.logprob_gap.is_on:
        raise ConfigError(
            f"guard.logprob_gap: rollout.engine={capabilities.name} gives log-probs at temperature 1, not those of "
            f"rollout.sampling.temperature={temperature}; allowed: warn=0 and stop=0, or temperature 1"
        )
    say(f"warning: {capabilities.name} gives log-probs at temperature 1, not {temperature}: rollout/logprob_gap is not reported")
    return False


def _shared_device(session: Session, config: OnlineRun) -> SharedDevice | None:
    """The GPUs that the servers compute on too, which are this component's from now on; None where they have their own."""
    if config.placement is Placement.separate:
        return None
    timeout = config.server_client.train_timeout_seconds
    shared = SharedDevice(Turn(session.directory.turn, "actor"), session.progress, timeout_seconds=timeout)
    shared.take()
    return shared


def _reward(session: Session, config: OnlineRun, tokenizer: Tokenizer) -> RewardModel:
    scorer = _scorer(session, config, tokenizer) if config.has_scorer else None
    if config.environment.is_on:
        from aligner.environments.exchange import EnvironmentReward

        return EnvironmentReward(scorer, is_optional=config.environment.asks_endpoint)
    return NoReward() if scorer is None else scorer


def _scorer(session: Session, config: OnlineRun, tokenizer: Tokenizer) -> RewardModel:
    functions, answers = config.reward.functions, session.directory.judges / str(session.topology.rank)
    if not config.reward.serve and not functions:
        return function_reward(config.reward.function, tokenizer.decode)
    if functions:
        from aligner.rewards.compose import composed_reward  # with what asks endpoints and judges
    if not config.reward.serve:
        return composed_reward(functions, tokenizer.decode, answers=answers)
    weights = config.reward.attribute_weights
    client = RewardClient(
        session.directory.services,
        config=config.server_client,
        access=_access(session, config),
        name=config.reward_service,
        texts=partial(_texts, tokenizer) if config.reward.function.path else None,
        reduce=weighted_sum(weights) if weights else None,
    )
    scorer = composed_reward(functions, tokenizer.decode, client, answers=answers) if functions else client
    if session.is_first:
        session.say("waiting for the reward server")
        with session.progress.phase(WAIT_FOR_SERVERS):
            client.wait_until_ready()
    return scorer


def _reward_name(config: OnlineRun) -> str:
    """Where rewards come from, for messages."""
    if config.environment.is_on and not config.has_scorer:
        return config.environment.title
    if config.reward.functions:
        return f"reward {formula(config.reward.functions)}"
    if config.reward.function.path:
        return f"reward function {config.reward.function.path}"
    return f"reward model {config.reward.model.path}"


def _access(session: Session, config: OnlineRun) -> Access:
    return Access.for_client(session.directory.secret, config.server_client, own_tls=config.run.server_tls)


def _texts(tokenizer: Tokenizer, rollout: Rollout) -> tuple[str, str, str | None]:
    """What a served reward function is sent of a rollout."""
    prompt = rollout.prompt.text or tokenizer.decode(rollout.prompt.tokens)
    return prompt, tokenizer.decode(rollout.response), rollout.prompt.answer


def keep_validation(session: Session, rows: Sequence[SampleRow]) -> None:
    """Write the rows of a validation to the run's `validation/step_%06d.jsonl`, on rank 0. A full disk costs the file, not the run."""
    directory = session.directory.validation
    try:
        if session.is_first:
            directory.mkdir(mode=0o700, exist_ok=True)
            write_rows(directory, session.progress.step, rows)
    except OSError as error:
        session.say(f"warning: samples of a validation could not be written, the run continues: {describe_os_error(error, directory)}")
