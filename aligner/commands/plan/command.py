"""`aligner plan`: a job's resources and step time, before any GPU is allocated."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

from aligner.algorithms.registry import composed, recipe_recorded
from aligner.cluster.component import Placement
from aligner.cluster.run_directory import RunDirectory
from aligner.commands import against as comparison
from aligner.commands.parts import PlanOptions
from aligner.commands.plan.outputs import changes, config_and_overrides, show_explained, write_outputs
from aligner.data.tokenizer import load_tokenizer
from aligner.errors import CheckpointError, ConfigError
from aligner.jobs import parts
from aligner.models import create
from aligner.models.architecture.divisible import check_fp8, fp8_recipe
from aligner.models.config import Architecture, Dtype, ModelConfig
from aligner.parallel.topology import ParallelConfig
from aligner.planner import report, search
from aligner.planner.config import ClusterConfig, Device, PlanConfig
from aligner.planner.estimate import ComponentPlan, again, named, plan_component, with_fitting_cache
from aligner.planner.memory import context_bytes, resting_bytes
from aligner.planner.simulation import Habits, Part, simulate
from aligner.planner.workload import Component, Engine, Head, Phase, ResponseLengths, Work
from aligner.rollout.config import EngineKind, RolloutConfig
from aligner.run.from_hub import fetch_named
from aligner.run.lengths import fill
from aligner.run.settings import JobRun, Server, WritingRun
from aligner.servers.components import in_section
from aligner.settings.compose import from_yaml

MIB = 2**20
LAST_STEPS = 20  # steps of a run whose lengths count

DOES_NOT_FIT = 1  # exit code; a mistake in the config is 2, as everywhere


def plan(name: str, overrides: Sequence[str], options: PlanOptions) -> int:
    """Plan the config `name`; prints tables, returns the exit code. Raises ConfigError if the sizes do not divide."""
    job = plan_job(name, overrides)
    report.show(job, report.console())
    if options.explain:
        show_explained(job, changes(job, lambda settings: plan_job(name, [*overrides, *settings])), report.console())
    if options.json_path is not None:
        options.json_path.write_text(report.to_json(job))
    write_outputs(job, options)
    return DOES_NOT_FIT if job.problems else 0


def plan_job(name: str, overrides: Sequence[str]) -> report.JobPlan:
    """As `plan`, without printing."""
    return plan_config(name, load(name, overrides))


def against(directory: Path) -> comparison.Comparison:
    """The run in this directory beside the plan of its own config. Raises DataError if it has not done two steps, ConfigError if its config
    cannot be planned."""
    return comparison.compare(plan_job(*config_and_overrides("", [], directory)), directory)


def plan_config(name: str, config: JobRun, *, advises: bool = True) -> report.JobPlan:
    """The plan of a composed config. `advises`: problems name settings that help."""
    cluster, plans = config.cluster, planned(config)
    take_turns, problems = any(one.component.turns and one.component.owns_layout for one in plans), []
    together = [one for one in plans if take_turns or one.component.process == plans[0].component.process]
    if len(together) > 1:
        host = {f"{one.component.name}: {part}": size for one in together for part, size in one.host.items()}
        problems += report.host_problems("all components together", host, cluster)
    for one in plans:
        advice = search.advice(one.component, cluster) if advises and not (one.fits or one.component.within) else []
        problems += report.problems(one, cluster, advice)
    parts = [Part(component=one.component, sizes=one.sizes, seconds={time.phase: time.total for time in one.times}) for one in plans]
    run = simulate(parts, cluster, config.plan, habits(config), take_turns=take_turns)
    return report.JobPlan(name=name, cluster=cluster, components=plans, problems=tuple(problems), run=run, take_turns=take_turns)


def planned(config: JobRun) -> tuple[ComponentPlan, ...]:
    """A plan of each component, the training one first."""
    cluster = config.cluster
    found = with_lengths(components(config), config.plan)
    plans = beside(tuple(plan_component(component, cluster) for component in found), cluster)
    return tuple(with_fitting_cache(one, cluster) for one in plans)


def habits(config: JobRun) -> Habits:
    """What the run does besides its steps."""
    if isinstance(config, WritingRun):
        return Habits(max_steps=1)
    ahead = getattr(config, "rollout", RolloutConfig()).asynchronous
    return Habits(
        max_staleness=ahead.max_staleness,
        partial=ahead.partial,
        recompute=ahead.recompute,
        validate_every=config.loop.validate_every,
        save_every=config.loop.save_every,
        saves_in_background=config.checkpoint.asynchronous,
        save_minutes=config.loop.save_minutes,
        max_steps=config.loop.max_steps,
    )


def with_lengths(found: Sequence[Component], assumed: PlanConfig) -> list[Component]:
    """The components with sequences of the mean lengths in `assumed`. Raises ConfigError for lengths that no sequence can have."""
    work = next((component.work for component in found if component.engine is not None), None)
    by_example = work is None and assumed.example_length
    lengths = _example_lengths(found[0].work, assumed) if by_example else _sampled_lengths(work, assumed)
    found = [replace(component, image_tokens=_image_tokens(component, assumed)) for component in found]
    return [replace(component, work=replace(component.work, lengths=lengths)) if lengths else component for component in found]


def _image_tokens(component: Component, assumed: PlanConfig) -> int:
    most = component.work.longest_prompt or component.work.length
    if assumed.image_tokens > most:
        raise ConfigError(f"plan.image_tokens={assumed.image_tokens}: allowed: at most {most}, the longest prompt or example")
    return assumed.image_tokens


def _example_lengths(own: Work, assumed: PlanConfig) -> ResponseLengths:
    if not own.unit <= assumed.example_length <= own.length * own.unit:
        allowed = f"{own.unit} to {own.length * own.unit}, by data.max_length"
        raise ConfigError(f"plan.example_length={assumed.example_length:g}: allowed: {allowed}")
    return ResponseLengths(mean=assumed.example_length / own.unit, spread=assumed.response_spread)


def _sampled_lengths(work: Work | None, assumed: PlanConfig) -> ResponseLengths | None:
    response, prompt, setting = assumed.response_length, assumed.prompt_length, f"plan.response_length={assumed.response_length:g}"
    measured: tuple[int, ...] = ()
    if assumed.lengths_of:
        response, measured = measured_lengths(Path(assumed.lengths_of))
        setting = f"plan.lengths_of={assumed.lengths_of}"
    if not response and not prompt:
        return None
    if work is None:
        raise ConfigError(f"{setting}: this recipe samples no responses; allowed: 0")
    if prompt > work.longest_prompt:
        raise ConfigError(f"plan.prompt_length={prompt:g}: allowed: at most data.max_prompt_length={work.longest_prompt}")
    response, longest = response or work.response_length, work.response_length
    if not 1 <= response <= longest:
        raise ConfigError(f"{setting}: responses of {response:g} tokens; allowed: 1 to rollout.sampling.max_response_length={longest}")
    return ResponseLengths(mean=response, spread=assumed.response_spread, prompt=prompt, measured=measured)


def measured_lengths(path: Path) -> tuple[float, tuple[int, ...]]:
    """(mean, rising lengths) of the responses in a file; of a run the mean of its last steps. Raises ConfigError without any."""
    path = path / "metrics.jsonl" if path.is_dir() else path
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
        if path.suffix != ".jsonl":
            found = sorted(int(line) for line in lines)
            if not found or found[0] < 1:
                raise ConfigError(f"plan.lengths_of={path}: needs a length of at least 1 on each line")
            return sum(found) / len(found), tuple(found)
        steps = [json.loads(line) for line in lines[-LAST_STEPS:]]
    except (OSError, ValueError) as error:
        raise ConfigError(f"plan.lengths_of={path}: {error}") from error
    means = [step["rollout/response_length"] for step in steps if "rollout/response_length" in step]
    if not means:
        raise ConfigError(f"plan.lengths_of={path}: no rollout/response_length in its last {LAST_STEPS} lines")
    return sum(means) / len(means), ()


def beside(plans: Sequence[ComponentPlan], cluster: ClusterConfig) -> tuple[ComponentPlan, ...]:
    """The plans, each with the memory that the others hold on its GPUs while it computes."""
    found = []
    for plan in plans:
        component, held = plan.component, 0
        processes = {component.process}
        for other in plans:
            if other is not plan and other.component.process == component.process:
                held += resting_bytes(other.component, other.sizes)
            elif component.turns and other.component.turns and other.component.process not in processes:
                held += context_bytes(other.component, cluster)
                processes.add(other.component.process)
        found.append(again(plan, cluster, replace(component, beside_bytes=held)) if held else plan)
    return tuple(found)


def load(name: str, overrides: Sequence[str]) -> JobRun:
    """The composed config, or that of the run in the directory `name`, with the configs of models of the Hub. Data need not exist."""
    recorded = RunDirectory(Path(name)).config
    config: JobRun = of_run(recorded, overrides) if recorded.is_file() else composed(name, ["data.train=not-read", *overrides])
    # The files of a model whose sizes are in the config are not needed.
    fetch_named(config, weights=False, data=False, may_fail=lambda one: isinstance(one, ModelConfig) and one.architecture.vocab_size > 0)
    if not config.loop.epochs or (isinstance(config.data.train, str) and not Path(config.data.train).exists()):
        return config
    return replace(config, loop=parts.with_steps(parts.with_lengths(config)).loop)


def of_run(recorded: Path, overrides: Sequence[str]) -> JobRun:
    """The config that a run has recorded in this file, with `overrides`; `cluster=NAME` replaces the recorded machine."""
    text = recorded.read_text()
    recipe = recipe_recorded(text)
    about_cluster = [one for one in overrides if one.startswith(("cluster=", "hydra.searchpath="))]
    config: JobRun = from_yaml(recipe.config, text, [one for one in overrides if one not in about_cluster])
    if not any(one.startswith("cluster=") for one in about_cluster):
        return config
    about_machine = [one for one in overrides if one.startswith(("cluster", "hydra.searchpath="))]
    machine = composed(recipe.name, ["data.train=not-read", *about_machine])
    return replace(config, cluster=machine.cluster)


def components(config: JobRun, *, checked: bool = True) -> list[Component]:
    """The components that a run of this config starts, the training one first, with unset lengths as in the run. Raises ConfigError for
    settings that the run would refuse; layouts and ranks count only if `checked`."""
    models = {key: _own_or_actors(attrgetter(key)(config), config.model) for key in config.readers()}
    contexts = {}
    for key, model in models.items():
        with in_section(key.rpartition(".")[0]):
            contexts[key] = create.context_length(model, _architecture(key, model))
    config = fill(config, contexts)
    found = [_main(config, checked), *(_server(config, server, checked) for server in config.servers() if server.work is not None)]
    guests = ((server.guest, server.name) for server in config.servers() if server.guest is not None)
    found += [replace(_server(config, guest, checked), within=name) for guest, name in guests if guest.work is not None]
    found += [_resident(config, resident, checked) for resident in config.residents()]
    for component in found if checked and config.cluster.device is Device.gpu else ():
        config.cluster.ranks_on_node(component.name, component.num_ranks)
    return found


def _main(config: JobRun, checked: bool) -> Component:
    """The component that trains or writes."""
    traits, architecture = config.traits(), _architecture("model", config.model)
    with named(traits.role):
        if checked:
            config.check(architecture, config.num_processes)
        engine = _engine(config.rollout, config.parallel, config.cluster, config.plan.rollout_ranks) if traits.has_engine else None
    trains = Phase.train in traits.work.phases
    # Phases at whose ends servers on the same GPUs use them.
    turns = frozenset({Phase.generate, *([Phase.train] if any(server.optimizer for server in config.servers()) else [])})
    return Component(
        name=traits.role,
        head=traits.head,
        num_ranks=config.num_processes,
        architecture=architecture,
        model=_model(config.model, architecture, config.parallel, config.cluster),
        parallel=config.parallel,
        optimizer=config.optimizer if trains else None,
        work=traits.work,
        engine=engine,
        has_values=traits.value_head is not None,
        has_reference=traits.has_reference,
        saves_asynchronously=trains and config.checkpoint.asynchronous,
        turns=frozenset() if config.server_placement is Placement.separate else turns,
    )


def _server(config: JobRun, server: Server, checked: bool) -> Component:
    """A server component, which has the trained model unless it has its own."""
    key = f"{server.name}.model"
    model = _own_or_actors(server.model, config.model)
    owns_layout = server not in config.residents()
    with in_section(server.name, own_layout=owns_layout):
        architecture = _architecture(key, model)
        placed = _model(model, architecture, server.parallel, config.cluster)
    if checked:
        with named(server.name, own_layout=owns_layout):
            server.check(model, architecture, server.num_ranks)
    return Component(
        name=server.name,
        head=Head.scalar,
        num_ranks=server.num_ranks,
        architecture=architecture,
        model=placed,
        parallel=server.parallel,
        optimizer=server.optimizer,
        work=server.work,
        saves_asynchronously=server.optimizer is not None and config.checkpoint.asynchronous,
        turns=frozenset() if config.server_placement is Placement.separate else frozenset(server.work.phases),
    )


def _resident(config: JobRun, resident: Server, checked: bool) -> Component:
    """A model that the trainer's processes train too: it stays on the device, or is there in its own phases only."""
    component = _server(config, resident, checked)
    leaves = resident.optimizer is not None and resident.optimizer.offload
    turns = frozenset(component.work.phases) if leaves else frozenset[Phase]()
    return replace(component, within=config.traits().role, turns=turns, rests_on_host=leaves)


def _engine(rollout: RolloutConfig, parallel: ParallelConfig, cluster: ClusterConfig, own_ranks: int) -> Engine:
    """Raises ConfigError for a replica that is larger than the cluster's nodes."""
    tp, on_gpu = rollout.tp or parallel.tp, cluster.device == Device.gpu
    if rollout.engine == EngineKind.tensorrt_llm and on_gpu and tp > cluster.gpus_per_node:
        raise ConfigError(
            f"rollout.tp={tp}: a replica of rollout.engine=tensorrt_llm must be on one node; allowed: at most "
            f"cluster.gpus_per_node={cluster.gpus_per_node}"
        )
    return Engine(
        tp=tp,
        max_batch_size=rollout.max_batch_size,
        bucket_bytes=rollout.refit_bucket_mib * MIB,
        offload=rollout.offload,
        kv_cache_tokens=rollout.kv_cache_tokens,
        prefill_chunk_tokens=rollout.prefill_chunk_tokens,
        asynchronous=rollout.asynchronous.max_staleness > 0,
        on_gpu=on_gpu,
        settings=rollout,
        own_ranks=own_ranks,
    )


def _own_or_actors(own: ModelConfig, actors: ModelConfig) -> ModelConfig:
    """A server's model if the config names or describes one, else the actor's model."""
    return own if own.path or own.tokenizer or own.architecture.vocab_size else actors


def _model(model: ModelConfig, architecture: Architecture, parallel: ParallelConfig, cluster: ClusterConfig) -> ModelConfig:
    """The model with its dtype on this cluster's ranks. Raises ConfigError for FP8 that these ranks or the sizes refuse."""
    if model.fp8 and not cluster.fp8_tflops:
        raise ConfigError("model.fp8=true: the cluster's GPUs have no 8-bit matrix products (cluster.fp8_tflops=0)")
    if model.fp8:
        check_fp8(architecture, model, parallel, fp8_recipe(model, cluster.compute_capability))
    if model.dtype != Dtype.auto:
        return model
    return replace(model, dtype=Dtype.bfloat16 if cluster.device == Device.gpu else Dtype.float32)


def _architecture(key: str, model: ModelConfig) -> Architecture:
    """The sizes of `model.path` if it exists here, else the sizes in the config."""
    described, vocabulary = model.architecture.vocab_size > 0, 0
    if not model.path and not described and model.tokenizer and Path(model.tokenizer).is_dir():  # a local tokenizer, and no weights
        vocabulary = load_tokenizer(model.tokenizer).vocab_size
    try:
        found = create.read_architecture(model, vocab_size=vocabulary)
    except (CheckpointError, ConfigError):
        if not described or Path(model.path).exists():  # else the model may be elsewhere: on the cluster
            raise
        found = create.read_architecture(replace(model, path=""), vocab_size=vocabulary)
    if found.vocab_size < 1:
        raise ConfigError(f"{key}.path='': a plan needs a model: give {key}.path, or choose one of conf/model, such as {key}=llama3_8b")
    return found
