"""`aligner plan`: what a job will need and how long a step will take, before any GPU is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

from aligner.algorithms.ai_feedback import ROWS
from aligner.algorithms.chains import Pairs
from aligner.config import compose
from aligner.errors import CheckpointError, ConfigError
from aligner.jobs import checks
from aligner.jobs.lengths import fill, readers
from aligner.jobs.programs import RECIPES, Job, Trainer, recipe_of
from aligner.models import create
from aligner.models.config import Architecture, Dtype, ModelConfig
from aligner.parallel.topology import ParallelConfig
from aligner.planner import report, search
from aligner.planner.config import ClusterConfig, Device
from aligner.planner.estimate import Scales, named, plan_component
from aligner.planner.workload import Component, Engine, Head, Phase, Work
from aligner.rollout.config import RolloutConfig
from aligner.schemas import (
    ConstitutionalAI,
    Generate,
    OnlineRun,
    TrainDPO,
    TrainGRPO,
    TrainKTO,
    TrainOnlineDistillation,
    TrainOnlineDPO,
    TrainPPO,
    TrainProcessRewardModel,
    TrainRegressionRewardModel,
    TrainRewardModel,
    TrainSelfRewarding,
    TrainSPIN,
    TrainSteerLM2,
    WriteTeacherLogprobs,
    WritingRun,
)

MIB = 2**20

DOES_NOT_FIT = 1  # exit code; a mistake in the config is 2, as everywhere


def plan(name: str, overrides: Sequence[str], *, searches: bool = False, top: int = 5, json_path: Path | None = None) -> int:
    """Plan `conf/<name>.yaml`; prints tables, returns the exit code. Raises ConfigError where the sizes do not divide."""
    job = plan_job(name, overrides, searches=searches, top=top)
    report.show(job, report.console())
    if json_path is not None:
        json_path.write_text(report.to_json(job))
    return DOES_NOT_FIT if job.problems else 0


def plan_job(name: str, overrides: Sequence[str], *, searches: bool = False, top: int = 5) -> report.JobPlan:
    """As `plan`, without printing."""
    config = load(name, overrides)
    cluster, scales = config.cluster, Scales(config.cluster.device)
    found = components(config)
    plans = tuple(plan_component(component, cluster, scales) for component in found)
    problems = []
    for one in plans:
        problems += report.problems(one, cluster, [] if one.fits else search.advice(one.component, cluster, scales))
    return report.JobPlan(
        name=name,
        cluster=cluster,
        components=plans,
        alternatives={part.name: search.search(part, cluster, scales, top=top) for part in found} if searches else {},
        problems=tuple(problems),
    )


def load(name: str, overrides: Sequence[str]) -> Job:
    """The composed config; data need not be named."""
    schema, _ = RECIPES[recipe_of(name)]
    return compose(schema, name, ["data.train=not-read", *overrides])


def components(config: Job) -> list[Component]:
    """The components that a run of this config starts, the training one first. Lengths that are not set are as long as in the run.

    Raises ConfigError for settings that it would refuse at its start (`aligner.jobs.lengths`, `aligner.jobs.checks`).
    """
    models = {key: _own_or_actors(attrgetter(key)(config), config.model) for key in readers(config)}
    config = fill(config, {key: create.context_length(model, _architecture(key, model)) for key, model in models.items()})
    if isinstance(config, OnlineRun):
        found = [_actor(config)]
        if isinstance(config, TrainPPO):
            found.append(_critic(config))
        return found + ([_reward(config)] if config.reward.serve and not config.reward.function.function else [])
    if isinstance(config, ConstitutionalAI):
        return [_constitutional(config)]
    return [_writer(config)] if isinstance(config, WritingRun) else [_trainer(config)]


def _actor(config: OnlineRun) -> Component:
    algorithm = config.algorithm
    has_reference = isinstance(config, (TrainPPO, TrainSPIN, TrainSelfRewarding, TrainOnlineDistillation)) or (
        isinstance(config, (TrainGRPO, TrainOnlineDPO)) and algorithm.needs_reference
    )
    phases = {
        Phase.generate: True,
        Phase.logprobs: isinstance(config, TrainPPO) or (isinstance(config, TrainGRPO) and algorithm.needs_old_logprobs),
        Phase.ref_logprobs: has_reference,
        Phase.train: True,
    }
    unit = 2 if isinstance(config, (TrainOnlineDPO, TrainSPIN, TrainSelfRewarding)) else 1
    length, response = _rollout_length(config)
    architecture = _architecture("model", config.model)
    with named("actor"):
        checks.check_actor(config, architecture, config.num_processes)
    return Component(
        name="actor",
        head=Head.language,
        num_ranks=config.num_processes,
        architecture=architecture,
        model=_model(config.model, config.cluster),
        parallel=config.parallel,
        optimizer=config.optimizer,
        work=Work(
            phases=tuple(phase for phase, wanted in phases.items() if wanted),
            rows=algorithm.rollouts_per_step,
            length=length,
            response_length=response,
            update_rows=algorithm.mini_batch_size * unit,
            num_updates=algorithm.updates_per_step,
            unit=unit,
            extra_rows=_extra_rows(config),
        ),
        engine=_engine(config.rollout, config.parallel),
        has_reference=has_reference,
        saves_asynchronously=config.checkpoint.asynchronous,
    )


def _extra_rows(config: OnlineRun) -> int:
    """Sequences that are sampled in a step besides those that are learnt from."""
    if isinstance(config, TrainSelfRewarding):
        return config.algorithm.judgements_per_step
    return config.algorithm.greedy_per_round if isinstance(config, TrainGRPO) else 0


def _critic(config: TrainPPO) -> Component:
    critic, rows = config.critic, config.algorithm.rollouts_per_step
    model = _own_or_actors(critic.model, config.model)
    length, response = _rollout_length(config)
    architecture = _architecture("critic.model", model)
    with named("critic"):
        checks.check_critic(config, model, architecture, critic.num_processes)
    return Component(
        name="critic",
        head=Head.scalar,
        num_ranks=critic.num_processes,
        architecture=architecture,
        model=_model(model, config.cluster),
        parallel=critic.parallel,
        optimizer=critic.optimizer,
        work=Work(
            phases=(Phase.values, Phase.train),
            rows=rows,
            length=length,
            response_length=response,
            update_rows=min(rows, critic.mini_batch_size),
            num_updates=-(-rows // critic.mini_batch_size) * critic.num_epochs,
        ),
        saves_asynchronously=config.checkpoint.asynchronous,
    )


def _reward(config: OnlineRun) -> Component:
    reward = config.reward
    model = _own_or_actors(reward.model, config.model)
    length, response = _rollout_length(config)
    architecture = _architecture("reward.model", model)
    with named("reward"):
        checks.check_reward_model(config, model, architecture, reward.num_processes)
    return Component(
        name="reward",
        head=Head.scalar,
        num_ranks=reward.num_processes,
        architecture=architecture,
        model=_model(model, config.cluster),
        parallel=reward.parallel,
        optimizer=None,
        work=Work(phases=(Phase.scores,), rows=config.algorithm.rollouts_per_step, length=length, response_length=response),
    )


def _writer(config: WritingRun) -> Component:
    engine, response = None, 0
    if isinstance(config, Generate):
        engine, response = _engine(config.rollout, config.parallel), config.rollout.sampling.max_response_length
    length = (config.data.max_prompt_length if isinstance(config, Generate) else config.data.max_length) + response
    phase = Phase.generate if engine else Phase.scores if config.scores else Phase.logprobs
    rows = config.algorithm.shard_size if isinstance(config, WriteTeacherLogprobs) else config.algorithm.part_size
    architecture = _architecture("model", config.model)
    with named("writer"):
        checks.check_writer(config, architecture, config.num_processes)
    return Component(
        name="writer",
        head=Head.scalar if config.scores else Head.language,
        num_ranks=config.num_processes,
        architecture=architecture,
        model=_model(config.model, config.cluster),
        parallel=config.parallel,
        optimizer=None,
        work=Work(phases=(phase,), rows=rows, length=length, response_length=response or length),
        engine=engine,
    )


def _constitutional(config: ConstitutionalAI) -> Component:
    """A model that samples and compares; a judge with weights of its own takes their place as a reference does."""
    algorithm, response = config.algorithm, config.rollout.sampling.max_response_length
    samples, has_judge = algorithm.samples_per_chain, bool(config.judge.path)
    phases = {
        Phase.generate: samples > 0,
        Phase.logprobs: algorithm.pairs is not Pairs.none and not has_judge,
        Phase.ref_logprobs: has_judge,
    }
    length = max(config.data.max_prompt_length, config.data.max_history_length) + (response if samples else 0)
    architecture = _architecture("model", config.model)
    with named("writer"):
        checks.check_writer(config, architecture, config.num_processes)
    return Component(
        name="writer",
        head=Head.language,
        num_ranks=config.num_processes,
        architecture=architecture,
        model=_model(config.model, config.cluster),
        parallel=config.parallel,
        optimizer=None,
        work=Work(
            phases=tuple(phase for phase, wanted in phases.items() if wanted),
            rows=algorithm.part_size * algorithm.num_chains * (samples or ROWS * algorithm.num_questions),
            length=length,
            response_length=response,
        ),
        engine=_engine(config.rollout, config.parallel) if samples else None,
        has_reference=has_judge,
    )


def _engine(rollout: RolloutConfig, parallel: ParallelConfig) -> Engine:
    return Engine(
        tp=rollout.tp or parallel.tp,
        max_batch_size=rollout.max_batch_size,
        bucket_bytes=rollout.refit_bucket_mib * MIB,
        offload=rollout.offload,
        kv_cache_tokens=rollout.kv_cache_tokens,
        prefill_chunk_tokens=rollout.prefill_chunk_tokens,
        asynchronous=rollout.asynchronous.max_staleness > 0,
        settings=rollout,
    )


def _trainer(config: Trainer) -> Component:
    pairs = isinstance(config, (TrainRewardModel, TrainDPO)) and not isinstance(
        config, (TrainRegressionRewardModel, TrainProcessRewardModel)
    )
    rows = config.algorithm.batch_size * (2 if pairs else (config.data.num_responses or 4) if isinstance(config, TrainSteerLM2) else 1)
    has_reference = isinstance(config, (TrainDPO, TrainKTO)) and config.algorithm.keeps_reference
    needs_kl = isinstance(config, TrainKTO) and config.algorithm.loss.needs_kl  # of rows that are not trained on, and shorter
    phases = {
        Phase.ref_logprobs: has_reference,
        Phase.logprobs: needs_kl or isinstance(config, TrainSteerLM2),
        Phase.train: True,
    }
    architecture = _architecture("model", config.model)
    with named("trainer"):
        checks.check_trainer(config, architecture, config.num_processes)
    return Component(
        name="trainer",
        head=Head.scalar if isinstance(config, TrainRewardModel) else Head.language,
        num_ranks=config.num_processes,
        architecture=architecture,
        model=_model(config.model, config.cluster),
        parallel=config.parallel,
        optimizer=config.optimizer,
        work=Work(
            phases=tuple(phase for phase, wanted in phases.items() if wanted),
            rows=rows,
            length=config.data.max_length,
            response_length=config.data.max_length,
            update_rows=rows,
            num_updates=1,
            unit=2 if pairs else 1,
        ),
        has_reference=has_reference,
        saves_asynchronously=config.checkpoint.asynchronous,
    )


def _rollout_length(config: OnlineRun) -> tuple[int, int]:
    response = config.rollout.sampling.max_response_length
    return config.data.max_prompt_length + response, response


def _own_or_actors(own: ModelConfig, actors: ModelConfig) -> ModelConfig:
    """A server's model where the config names or describes one, else the actor's."""
    return own if own.path or own.tokenizer or own.architecture.vocab_size else actors


def _model(model: ModelConfig, cluster: ClusterConfig) -> ModelConfig:
    """The model with the dtype that it will have on this cluster's ranks. Raises ConfigError where they have no FP8 and it is asked for."""
    if model.fp8 and not cluster.fp8_tflops:
        raise ConfigError("model.fp8=true: the cluster's GPUs have no 8-bit matrix products (cluster.fp8_tflops=0)")
    if model.dtype != Dtype.auto:
        return model
    return replace(model, dtype=Dtype.bfloat16 if cluster.device == Device.gpu else Dtype.float32)


def _architecture(key: str, model: ModelConfig) -> Architecture:
    """The sizes of `model.path` where that is here, else those that the config describes."""
    described = model.architecture.vocab_size > 0
    try:
        found = create.read_architecture(model, vocab_size=0)
    except (CheckpointError, ConfigError):
        if not described or Path(model.path).is_dir():  # else the model may be elsewhere: on the cluster
            raise
        found = create.read_architecture(replace(model, path=""), vocab_size=0)
    if found.vocab_size < 1:
        raise ConfigError(f"{key}.path='': a plan needs a model: give {key}.path, or choose one of conf/model, such as {key}=llama3_8b")
    return found
