"""`aligner plan`: what a job will need and how long a step will take, before any GPU is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from aligner.config import compose
from aligner.errors import CheckpointError, ConfigError
from aligner.jobs.programs import RECIPES, Job, recipe_of
from aligner.models import create
from aligner.models.config import Architecture, Dtype, ModelConfig
from aligner.planner import report, search
from aligner.planner.config import ClusterConfig, Device
from aligner.planner.estimate import Scales, check, plan_component
from aligner.planner.workload import Component, Engine, Head, Phase, Work
from aligner.schemas import OnlineRun, TrainDPO, TrainGRPO, TrainKTO, TrainOnlineDPO, TrainPPO, TrainRewardModel, TrainSFT

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
    for component in found:
        check(component)
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
    """The composed config; data need not be named. A layout without tensor parallelism is planned without sequence parallelism."""
    schema, _ = RECIPES[recipe_of(name)]
    implied = [
        override.replace("parallel.tp=1", "parallel.sequence_parallel=false")
        for override in overrides
        if override.endswith("parallel.tp=1") and not any("sequence_parallel=" in other for other in overrides)
    ]
    return compose(schema, name, ["data.train=not-read", *implied, *overrides])


def components(config: Job) -> list[Component]:
    """The components that a run of this config starts, the training one first. Raises ConfigError where sequences do not fit a model."""
    if isinstance(config, OnlineRun):
        found = [_actor(config)]
        if isinstance(config, TrainPPO):
            found.append(_critic(config))
        return found + ([_reward(config)] if config.reward.serve and not config.reward.function.function else [])
    return [_trainer(config)]


def _actor(config: OnlineRun) -> Component:
    algorithm = config.algorithm
    has_reference = isinstance(config, TrainPPO) or (isinstance(config, (TrainGRPO, TrainOnlineDPO)) and algorithm.needs_reference)
    phases = {
        Phase.generate: True,
        Phase.logprobs: isinstance(config, TrainPPO) or (isinstance(config, TrainGRPO) and algorithm.needs_old_logprobs),
        Phase.ref_logprobs: has_reference,
        Phase.train: True,
    }
    unit = 2 if isinstance(config, TrainOnlineDPO) else 1
    length, response = _rollout_length(config)
    return Component(
        name="actor",
        head=Head.language,
        num_ranks=config.num_processes,
        architecture=_architecture("model", config.model, length),
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
            extra_rows=algorithm.greedy_per_round if isinstance(config, TrainGRPO) else 0,
        ),
        engine=Engine(
            tp=config.rollout.tp or config.parallel.tp,
            max_batch_size=config.rollout.max_batch_size,
            bucket_bytes=config.rollout.refit_bucket_mib * MIB,
            offload=config.rollout.offload,
            kv_cache_tokens=config.rollout.kv_cache_tokens,
            prefill_chunk_tokens=config.rollout.prefill_chunk_tokens,
            asynchronous=config.rollout.asynchronous.max_staleness > 0,
        ),
        has_reference=has_reference,
        saves_asynchronously=config.checkpoint.asynchronous,
    )


def _critic(config: TrainPPO) -> Component:
    critic, rows = config.critic, config.algorithm.rollouts_per_step
    model = _own_or_actors(critic.model, config.model)
    length, response = _rollout_length(config)
    return Component(
        name="critic",
        head=Head.scalar,
        num_ranks=critic.num_processes,
        architecture=_architecture("critic.model", model, length),
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
    return Component(
        name="reward",
        head=Head.scalar,
        num_ranks=reward.num_processes,
        architecture=_architecture("reward.model", model, length),
        model=_model(model, config.cluster),
        parallel=reward.parallel,
        optimizer=None,
        work=Work(phases=(Phase.scores,), rows=config.algorithm.rollouts_per_step, length=length, response_length=response),
    )


def _trainer(config: TrainSFT | TrainRewardModel | TrainDPO | TrainKTO) -> Component:
    pairs = not isinstance(config, (TrainSFT, TrainKTO))
    rows = config.algorithm.batch_size * (2 if pairs else 1)
    has_reference = isinstance(config, TrainKTO) or (isinstance(config, TrainDPO) and config.algorithm.loss.needs_reference)
    phases = {
        Phase.ref_logprobs: has_reference,
        Phase.logprobs: isinstance(config, TrainKTO) and config.algorithm.loss.needs_kl,  # of rows that are not trained on, and shorter
        Phase.train: True,
    }
    return Component(
        name="trainer",
        head=Head.scalar if isinstance(config, TrainRewardModel) else Head.language,
        num_ranks=config.num_processes,
        architecture=_architecture("model", config.model, config.data.max_length),
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


def _architecture(key: str, model: ModelConfig, length: int) -> Architecture:
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
    context = create.context_length(model, found)
    if length > context:
        raise ConfigError(f"sequences of {length} tokens are longer than the {context} of {key}: give {key}.seq_length, or shorten data")
    return found
