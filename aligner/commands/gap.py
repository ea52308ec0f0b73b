"""`aligner gap`: one batch of prompts through engine and trainer, and the operation where they diverge.

The engine samples responses, the trainer recomputes their log-probs. Then the engine's decoder (in prefill passes and in decode steps) and
the trainer's modules process the sampled tokens again, and the outputs of every operation are compared. Every rank calls it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path

import torch

from aligner.algorithms.registry import composed, recipe_of, recipes
from aligner.commands.gap_report import NUM_WORST, GapReport, TokenGap, Tolerance, to_json, to_text
from aligner.commands.parts import GapOptions
from aligner.data.collate import rollout_batch
from aligner.data.prompts import load_prompts
from aligner.data.tokenizer import Tokenizer
from aligner.errors import ConfigError
from aligner.jobs.parts import load_model_files
from aligner.losses.correction import gap_metrics
from aligner.models import create
from aligner.models.checkpoint.files import read_marker, resolve
from aligner.models.config import Architecture, Dtype, ModelConfig
from aligner.models.training.policy import MegatronPolicy
from aligner.models.training.probe import trace_model
from aligner.models.training.tracing import Difference, Place, Trace, differences
from aligner.online.config import OnlineRun
from aligner.parallel import launch, platform, topology
from aligner.parallel.collectives import gather_objects
from aligner.rollout.builtin.megatron import MegatronEngine
from aligner.rollout.builtin.probe import SequenceProbe
from aligner.rollout.create import create_engine
from aligner.rollout.engine.lifecycle import PhasedEngine
from aligner.run.from_hub import fetch_named, with_names
from aligner.run.lengths import fill
from aligner.run.session import see_own_gpus
from aligner.run.settings import JobRun
from aligner.settings.compose import fingerprint, from_yaml, schema_of
from aligner.telemetry.metrics import values
from aligner.types import LogprobKind, Prompt, Rollout, RolloutBatch

DIFFERS = 1  # exit code; a mistake in what was asked is 2, as everywhere
RANDOM_PROMPT_TOKENS = (4, 24)
SPREAD_PER_ROLLOUT = 48  # tokens of a traced rollout, evenly spaced: outputs of all layers wait in host memory


def gap(name: str, overrides: Sequence[str], options: GapOptions) -> int:
    """Compare engine and trainer of the config `name` with `overrides`, or of a run directory. Returns 0, or 1 if they differ
    by more than rounding. Raises ConfigError for a recipe that does not sample."""
    config = load(name, overrides, random_prompts=options.random_prompts)
    fetch_named(config)
    world, _ = launch.detect_world(os.environ)
    if world is not None:
        see_own_gpus(config, world.local_rank)
    shared = config.run.ranks_per_gpu
    launch.initialize(
        platform.backend(shared),
        timeout_seconds=config.run.start_timeout_seconds,
        fingerprint=fingerprint(with_names(config)),
        claim_gpu=lambda world: platform.claim_device(world.local_rank, ranks_per_gpu=shared),
    )
    layout = topology.initialize(config.parallel, seed=config.run.seed)
    report = compare(config, layout, options)
    if layout.rank == 0:
        print(to_text(report), flush=True)
        if options.json_path is not None:
            options.json_path.write_text(to_json(report))
    launch.shutdown()
    return 0 if report.agrees else DIFFERS


def load(name: str, overrides: Sequence[str], *, random_prompts: bool) -> OnlineRun:
    """The config from conf/ or from a run directory; the latter's newest policy checkpoint is the model."""
    given = ["data.train=random"] if random_prompts else []
    directory = Path(name)
    if (directory / "config.yaml").is_file():
        text = (directory / "config.yaml").read_text()
        config = from_yaml(_sampling(name, schema_of([recipe.config for recipe in recipes().values()], text)), text, [*overrides, *given])
        newest = directory / "checkpoints" / "policy"
        if newest.is_dir() and not any(override.startswith("model.path=") for override in overrides):
            config.model = _trained(config.model, newest)
        return config
    _sampling(name, recipe_of(name, overrides).config)
    return composed(name, [*overrides, *given])


def _trained(model: ModelConfig, newest: Path) -> ModelConfig:
    """The newest checkpoint as the model. Adapters stay as in the run: separate in the trainer, merged in the engine."""
    if not model.lora.is_on:
        return replace(model, path=str(newest))
    saved = resolve(newest)
    return replace(model, path=read_marker(saved)["base"], lora=replace(model.lora, path=str(saved)))


def compare(config: OnlineRun, layout: topology.Topology, options: GapOptions) -> GapReport:
    """Build engine and trainer, sample, compare. Collective; the report is the same on every rank."""
    tokenizer, architecture = load_model_files(config.model, config.data)
    config = fill(config, {"model": create.context_length(config.model, architecture)})
    training = create.training(config.model, None, temperature=_temperature(config, options), replay_routes=config.rollout.replays_routes)
    policy = create.create_policy(config.model, architecture, config.parallel, layout, training)
    engine = create_engine(policy, config.rollout, tokenizer=tokenizer)
    prompts = _prompts(config, options, tokenizer, architecture)
    rollouts = _sample(engine, config, prompts, options)
    if rollouts[0].logprob_kind is LogprobKind.raw:
        policy.temperature = 1.0
    batch = rollout_batch(rollouts, tokenizer.pad_id)
    logprobs = policy.logprobs(batch)
    gaps = (logprobs - batch.rollout_logprobs).abs() * batch.loss_mask
    paths = trace_paths(engine, policy, config, most_different(rollouts, batch, gaps, options.num_traced))
    dtype = Dtype(str(policy.chunks[0].config.params_dtype).removeprefix("torch."))
    engine.shutdown()
    return GapReport(
        engine=engine.capabilities.name,
        num_layers=architecture.num_layers,
        tolerance=Tolerance.of(dtype, ulps=options.ulps, gap=options.gap),
        num_rollouts=len(rollouts),
        num_tokens=int(batch.loss_mask.sum()),
        statistics=values(gap_metrics(logprobs, batch.rollout_logprobs, batch.loss_mask)),
        worst=_worst(rollouts, batch, logprobs, gaps, tokenizer),
        paths=paths,
    )


def _sampling(name: str, schema: type[JobRun]) -> type[OnlineRun]:
    if not issubclass(schema, OnlineRun):
        allowed = ", ".join(recipe for recipe, one in recipes().items() if issubclass(one.config, OnlineRun))
        raise ConfigError(f"config {name}: this kind of run does not sample; allowed: {allowed}, or a run directory of one")
    return schema


def _temperature(config: OnlineRun, options: GapOptions) -> float:
    return 1.0 if options.greedy else config.rollout.sampling.temperature  # a greedy engine's log-probs are at temperature 1


def _prompts(config: OnlineRun, options: GapOptions, tokenizer: Tokenizer, architecture: Architecture) -> list[Prompt]:
    if not options.random_prompts:
        found, _ = load_prompts(config.data.train, config.data, tokenizer, first=4 * options.num_prompts)
        return list(islice(cycle(found), options.num_prompts))
    generator = torch.Generator().manual_seed(config.run.seed)
    lengths = torch.randint(*RANDOM_PROMPT_TOKENS, (options.num_prompts,), generator=generator).tolist()
    rows = [torch.randint(architecture.vocab_size, (length,), generator=generator).tolist() for length in lengths]
    return [Prompt(id=number, tokens=tuple(row), source=f"random prompt {number}") for number, row in enumerate(rows)]


def _sample(engine: PhasedEngine, config: OnlineRun, prompts: list[Prompt], options: GapOptions) -> list[Rollout]:
    """One response per prompt, in their order, on every rank."""
    sampling = replace(config.rollout.sampling, min_response_length=0, max_response_length=options.num_tokens, stop_strings=[])
    sampling = replace(sampling, temperature=0.0) if options.greedy else sampling
    engine.wake()
    own = [one for part in engine.generate(prompts, list(range(len(prompts))), sampling) for one in part]
    parts = gather_objects(own if engine.replica.is_leader else [])
    engine.sleep()  # the policy's turn
    return sorted((rollout for part in parts for rollout in part), key=lambda rollout: rollout.seed)


def _worst(
    rollouts: Sequence[Rollout], batch: RolloutBatch, logprobs: torch.Tensor, gaps: torch.Tensor, tokenizer: Tokenizer
) -> list[TokenGap]:
    found = []
    for flat in gaps.nan_to_num(nan=float("inf")).flatten().topk(min(NUM_WORST, int(batch.loss_mask.sum()))).indices.tolist():
        row, column = divmod(flat, gaps.shape[1])
        token = int(batch.tokens[row, column])
        found.append(
            TokenGap(
                rollout=row,
                position=column - len(rollouts[row].prompt.tokens),
                token=token,
                text=tokenizer.decode([token], skip_special=False),
                engine=float(batch.rollout_logprobs[row, column]),
                trainer=float(logprobs[row, column]),
            )
        )
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Traced:
    """Rollouts to trace, as a batch, and their tokens to trace (bool [B, S])."""

    rollouts: list[Rollout]
    batch: RolloutBatch
    wanted: torch.Tensor


def most_different(rollouts: Sequence[Rollout], batch: RolloutBatch, gaps: torch.Tensor, count: int) -> Traced:
    """The rollouts with the largest gaps: evenly spaced tokens of each, and those around its own largest gap."""
    gaps = gaps.nan_to_num(nan=float("inf"))
    rows = gaps.amax(dim=1).topk(min(count, len(rollouts))).indices.tolist()
    chosen = [rollouts[row] for row in rows]
    small = rollout_batch(chosen, 0)
    wanted = torch.zeros_like(small.loss_mask)
    for own, row in zip(wanted, rows, strict=True):
        length, worst = int(batch.lengths[row]), int(gaps[row].argmax())
        own[torch.linspace(0, length - 1, min(length, SPREAD_PER_ROLLOUT)).long()] = True
        own[max(worst - 1, 0) : worst + 1] = True  # the one before predicts it
    return Traced(rollouts=chosen, batch=small, wanted=wanted)


def trace_paths(engine: PhasedEngine, policy: MegatronPolicy, config: OnlineRun, traced: Traced) -> dict[str, list[Difference]]:
    """The differences of all operations by path; none unless the engine is the built-in one. Collective."""
    built_in = engine.engine
    if not isinstance(built_in, MegatronEngine):
        return {}
    engine.wake()
    sequences = [rollout.tokens for rollout in traced.rollouts]
    probe = SequenceProbe(built_in.decoder, sequences, chunk_tokens=config.rollout.prefill_chunk_tokens)
    ours = {"prefill": Trace(traced.wanted), "decode": Trace(traced.wanted)}
    probe.prefill(ours["prefill"])
    probe.decode([len(rollout.prompt.tokens) for rollout in traced.rollouts], ours["decode"])
    engine.sleep()
    theirs = Trace(traced.wanted)
    trace_model(policy.model, traced.batch, theirs)
    return {path: _over_ranks(differences(trace, theirs)) for path, trace in ours.items()}


def _over_ranks(own: list[Difference]) -> list[Difference]:
    """The largest difference at every place over all ranks: each has its stage's layers and its part of the sequences."""
    largest: dict[Place, Difference] = {}
    for found in gather_objects(own):
        for one in found:
            if one.place not in largest or largest[one.place].relative < one.relative:
                largest[one.place] = one
    return [largest[place] for place in sorted(largest, key=lambda place: place.rank)]
