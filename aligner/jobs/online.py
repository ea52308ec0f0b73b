"""The actors of online reinforcement learning: PPO and GRPO."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from aligner.algorithms.grpo import GRPO
from aligner.algorithms.objective import ObjectiveConfig
from aligner.algorithms.online import OnlineTask
from aligner.algorithms.ppo import PPO
from aligner.data.loader import EpochSampler
from aligner.data.prompts import load_prompts
from aligner.data.tokenizer import Tokenizer
from aligner.environments.load import environment_follow_up
from aligner.environments.reward import EnvironmentReward
from aligner.errors import ConfigError
from aligner.jobs import columns
from aligner.jobs.announce import announced
from aligner.jobs.checks import check_actor
from aligner.jobs.kept_samples import validation_samples
from aligner.jobs.lengths import with_lengths
from aligner.jobs.parts import load_model_files, load_sets, tokenizer_directory
from aligner.jobs.sampling_ahead import rounds_ahead
from aligner.jobs.session import Session, session
from aligner.jobs.sources import pinned, pinned_base
from aligner.jobs.training import train_to_end
from aligner.losses.correction import Correction
from aligner.models import create
from aligner.models.guard import Guard
from aligner.models.policy import MegatronPolicy, ReferencePolicy
from aligner.parallel.progress import WAIT_FOR_SERVERS
from aligner.protocols import RewardModel
from aligner.rewards.compose import composed_reward, formula
from aligner.rewards.local import function_reward
from aligner.rewards.unjudged import Unjudged
from aligner.rollout.config import check_cache
from aligner.rollout.create import create_engine
from aligner.rollout.engine import Capabilities
from aligner.schemas import OnlineRun, TrainGRPO, TrainPPO
from aligner.servers.access import Access
from aligner.servers.client import CriticClient, RewardClient, weighted_sum
from aligner.types import LogprobKind, Prompt, Rollout

Load = Callable[[Tokenizer], tuple[list[Prompt], list[Prompt]]]


def train_ppo_actor(config: TrainPPO) -> int:
    """The actor of a PPO run; its critic (and reward) servers are found through the run directory. Every rank calls it.

    Returns the exit code, as the other jobs do: 0, or 75 where a signal or the end of its time stopped it before the last step.
    """
    with session(config, config.run, config.parallel, component="actor") as here, announced(here, "actor") as publication:
        config = with_lengths(config)
        task, policy, tokenizer = build_task(here, config, with_reference=True, num_prompts=config.algorithm.rollouts_per_step)
        critic = CriticClient(
            here.directory.services,
            config=config.client,
            access=_access(here, config),
            run=here.directory.run_id(),
            journal=here.directory.journal / "critic" if here.is_first else None,
        )
        if publication is not None:
            here.say("waiting for the critic server")
            with here.progress.phase(WAIT_FOR_SERVERS):
                critic.wait_until_ready()
            publication.ready()
        algorithm = PPO(config.algorithm, policy, task, critic, rounds_ahead(here, config, task, critic=critic))
        code = train_to_end(here, config, algorithm, policy.model, tokenizer=tokenizer, shown=columns.PPO, critic=critic)
        task.engine.shutdown()
        critic.close()
        task.reward.close()
    return code


def train_grpo(config: TrainGRPO) -> int:
    """GRPO: one component, with reward functions in its processes or a reward server. Every rank calls it."""
    with session(config, config.run, config.parallel, component="actor") as here, announced(here, "actor") as publication:
        config = with_lengths(config)
        settings = config.algorithm
        for doubt in settings.doubts:
            here.say(f"warning: {doubt}")
        task, policy, tokenizer = build_task(here, config, with_reference=settings.needs_reference, num_prompts=settings.prompts_per_step)
        if publication is not None:
            publication.ready()
        rounds = rounds_ahead(here, config, task, group_size=settings.group_size, greedy=settings.greedy_per_round > 0)
        algorithm = GRPO(config.algorithm, policy, task, rounds)
        code = train_to_end(here, config, algorithm, policy.model, tokenizer=tokenizer, shown=columns.GRPO)
        task.engine.shutdown()
        task.reward.close()
    return code


def build_task(
    here: Session, config: OnlineRun, *, with_reference: bool, num_prompts: int, load: Load | None = None
) -> tuple[OnlineTask, MegatronPolicy, Path]:
    """Data first (bad lines are found in seconds), then models, then the engine on the policy's own weights.

    `load`: where training and validation prompts come from, if not from records of prompts.
    """
    sampling = config.rollout.sampling
    if reshaping := sampling.reshaping():
        here.say(f"warning: rollout.sampling: {', '.join(reshaping)}: other than the policy that is trained (docs/sampling.md)")
    config.check_rewarded()
    model = (pinned if with_reference else pinned_base)(here, "model", config.model)
    tokenizer, architecture = load_model_files(model)
    check_actor(config, architecture, here.topology.world_size)
    prompts, validation = (load or partial(load_prompt_sets, here, config))(tokenizer)
    longest = max((len(prompt.tokens) for prompt in (*prompts, *validation)), default=0)
    check_cache(config.rollout, longest_prompt=longest, context=create.context_length(config.model, architecture))
    follow_up = None
    if config.environment.function:
        follow_up = environment_follow_up(config.environment, tokenizer, [*prompts, *validation])
    reward = _reward(here, config, tokenizer)
    updates = config.loop.max_steps * config.algorithm.updates_per_step
    guard = Guard(config.guard)
    training = create.training(model, config.optimizer, total_steps=updates, temperature=sampling.temperature, guard=guard)
    policy = create.create_policy(model, architecture, config.parallel, here.topology, training)
    decode = partial(tokenizer.decode, skip_special=False)
    engine = create_engine(policy, config.rollout, eos_id=tokenizer.eos_id, decode=decode, follow_up=follow_up)
    task = OnlineTask(
        engine=engine,
        reference=ReferencePolicy(policy) if with_reference else None,
        reward=reward,
        topology=here.topology,
        train=prompts,
        order=EpochSampler(len(prompts), num_prompts, config.run.seed),
        validation=validation,
        validation_sampling=replace(sampling, temperature=0.0),
        accuracy=function_reward(config.accuracy, tokenizer.decode) if config.accuracy.function else None,
        decode=tokenizer.decode,
        pad_id=tokenizer.pad_id,
        seed=config.run.seed,
        max_response_length=sampling.max_response_length,
        compares_logprobs=compares_logprobs(config, engine.capabilities, here.say),
        reward_name=_reward_name(config),
        guard=config.guard,
        validation_config=config.validation,
        beat=here.progress.beat,
        keep_samples=validation_samples(here),
    )
    return task, policy, tokenizer_directory(model)


def load_prompt_sets(here: Session, config: OnlineRun, tokenizer: Tokenizer) -> tuple[list[Prompt], list[Prompt]]:
    """The prompts of data.train and data.validation; says what was left out. Raises DataError listing all bad lines."""
    train, validation = load_sets(here, load_prompts, config.data, tokenizer)
    return list(train), list(validation[: config.data.num_validation_prompts])


def compares_logprobs(config: OnlineRun, capabilities: Capabilities, say: Callable[[str], None]) -> bool:
    """Whether the engine's log-probs are those of the distribution that the policy's are of; where they are not, it is said once.

    Raises ConfigError where a correction by them is asked for.
    """
    temperature = config.rollout.sampling.temperature
    if capabilities.logprobs is LogprobKind.sampled or temperature == 1:
        return True
    kind = config.algorithm.correction.kind if isinstance(config.algorithm, ObjectiveConfig) else Correction.none
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


def _reward(here: Session, config: OnlineRun, tokenizer: Tokenizer) -> RewardModel:
    if config.environment.function:
        return EnvironmentReward(_scorer(here, config, tokenizer) if config.has_scorer else None)
    return _scorer(here, config, tokenizer) if config.has_scorer else Unjudged()


def _scorer(here: Session, config: OnlineRun, tokenizer: Tokenizer) -> RewardModel:
    functions = config.reward.functions
    if not config.reward.serve:
        return composed_reward(functions, tokenizer.decode) if functions else function_reward(config.reward.function, tokenizer.decode)
    texts = _texts(tokenizer) if config.reward.function.function else None
    weights = config.reward.attribute_weights
    reduce = weighted_sum(weights) if weights else None
    client = RewardClient(here.directory.services, config=config.client, access=_access(here, config), texts=texts, reduce=reduce)
    scorer = composed_reward(functions, tokenizer.decode, client) if functions else client
    if here.is_first:
        here.say("waiting for the reward server")
        with here.progress.phase(WAIT_FOR_SERVERS):
            client.wait_until_ready()
    return scorer


def _reward_name(config: OnlineRun) -> str:
    """Where rewards come from, for messages."""
    if config.environment.function and not config.has_scorer:
        return f"environment {config.environment.function}"
    if config.reward.functions:
        return f"reward {formula(config.reward.functions)}"
    if config.reward.function.function:
        return f"reward function {config.reward.function.function}"
    return f"reward model {config.reward.model.path}"


def _access(here: Session, config: OnlineRun) -> Access:
    return Access.for_client(here.directory.secret, config.client)


def _texts(tokenizer: Tokenizer) -> Callable[[Rollout], tuple[str, str, str | None]]:
    """What a served reward function is sent of a rollout."""

    def texts(rollout: Rollout) -> tuple[str, str, str | None]:
        prompt = rollout.prompt.text or tokenizer.decode(rollout.prompt.tokens)
        return prompt, tokenizer.decode(rollout.response), rollout.prompt.answer

    return texts
