"""`aligner gap`: one batch of prompts through engine and trainer, and the operation where they diverge.

The engine samples responses, the trainer recomputes their log-probs. Then the engine's decoder (in prefill passes and in decode steps) and
the trainer's modules process the sampled tokens again, and the outputs of every operation are compared. Every rank calls it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import cycle, islice, takewhile
from pathlib import Path
from typing import Any

import torch

from aligner.algorithms.registry import composed, recipe_of, recipe_recorded, recipes
from aligner.commands.parts import GapOptions
from aligner.data.collate import rollout_batch
from aligner.data.images import images_in
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
from aligner.models.training.tracing import ORDER, Difference, Operation, Place, Trace, differences
from aligner.online.config import OnlineRun
from aligner.parallel import launch, platform, topology
from aligner.parallel.collectives import gather_objects
from aligner.protocols import RolloutEngine
from aligner.rollout.builtin.megatron import MegatronEngine
from aligner.rollout.builtin.probe import SequenceProbe
from aligner.rollout.create import create_engine
from aligner.rollout.engine.lifecycle import PhasedEngine
from aligner.run.from_hub import fetch_named, with_names
from aligner.run.lengths import fill
from aligner.run.session import see_own_gpus
from aligner.run.settings import JobRun
from aligner.settings.compose import fingerprint, from_yaml, to_yaml
from aligner.telemetry.metrics import values
from aligner.types import LogprobKind, Prompt, Rollout, RolloutBatch, SamplingConfig

DIFFERS = 1  # exit code; a mistake in what was asked is 2, as everywhere
RANDOM_PROMPT_TOKENS = (4, 24)
ULPS = {Dtype.float32: 128.0, Dtype.bfloat16: 16.0, Dtype.float16: 16.0}  # of the precision; all add up in float32
GAPS = {Dtype.float32: 1e-4, Dtype.bfloat16: 0.05, Dtype.float16: 0.01}  # nats, the mean over tokens
MOST_OF_ONE_TOKEN = 20.0  # times as large the gap of a single token may be
EPSILON = {Dtype.float32: 2.0**-23, Dtype.bfloat16: 2.0**-7, Dtype.float16: 2.0**-10}
NUM_WORST = 5
SPREAD_PER_ROLLOUT = 48  # tokens of a traced rollout, evenly spaced: outputs of all layers wait in host memory


def gap(name: str, overrides: Sequence[str], options: GapOptions) -> int:
    """Compare engine and trainer of a config, or of a run directory. Returns 0, or 1 if they differ by more than rounding."""
    config = load(name, overrides, random_prompts=options.random_prompts)
    fetch_named(config)
    world, _ = launch.detect_world(os.environ)
    if world is not None:
        see_own_gpus(config, world.local_rank)
    shared = config.run.ranks_per_gpu
    launch.initialize(
        platform.backend(shared),
        timeout_seconds=config.run.start_timeout_seconds,
        fingerprint=fingerprint(to_yaml(with_names(config))),
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
        config = from_yaml(_sampling(name, recipe_recorded(text).config), text, [*overrides, *given])
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
    temperature = 1.0 if options.greedy else config.rollout.sampling.temperature  # a greedy engine's log-probs are at temperature 1
    policy, engine = built(config, layout, tokenizer, architecture, temperature)
    sampling = replace(config.rollout.sampling, min_response_length=0, max_response_length=options.num_tokens, stop_strings=[])
    sampling = replace(sampling, temperature=0.0) if options.greedy else sampling
    engine.wake()
    rollouts = samples(engine, _prompts(config, options, tokenizer, architecture), sampling)
    batch, logprobs = recomputed(policy, rollouts, tokenizer.pad_id)
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
    """Raises ConfigError for a recipe that does not sample."""
    if not issubclass(schema, OnlineRun):
        allowed = ", ".join(recipe for recipe, one in recipes().items() if issubclass(one.config, OnlineRun))
        raise ConfigError(f"config {name}: this kind of run does not sample; allowed: {allowed}, or a run directory of one")
    return schema


def _prompts(config: OnlineRun, options: GapOptions, tokenizer: Tokenizer, architecture: Architecture) -> list[Prompt]:
    if not options.random_prompts:
        found, _ = load_prompts(config.data.train, config.data, tokenizer, first=4 * options.num_prompts)
        return list(islice(cycle(found), options.num_prompts))
    generator = torch.Generator().manual_seed(config.run.seed)
    lengths = torch.randint(*RANDOM_PROMPT_TOKENS, (options.num_prompts,), generator=generator).tolist()
    rows = [torch.randint(architecture.vocab_size, (length,), generator=generator).tolist() for length in lengths]
    return [Prompt(id=number, tokens=tuple(row), source=f"random prompt {number}") for number, row in enumerate(rows)]


def samples(engine: RolloutEngine, prompts: list[Prompt], sampling: SamplingConfig) -> list[Rollout]:
    """One response per prompt of an awake engine, in their order, on every rank; the engine sleeps afterwards. Collective."""
    own = [one for part in engine.generate(prompts, list(range(len(prompts))), sampling) for one in part]
    parts = gather_objects(own if engine.replica.is_leader else [])
    engine.sleep()  # the policy's turn
    return sorted((rollout for part in parts for rollout in part), key=lambda rollout: rollout.seed)


def built(
    config: OnlineRun, layout: topology.Topology, tokenizer: Tokenizer, architecture: Architecture, temperature: float
) -> tuple[MegatronPolicy, PhasedEngine]:
    """The policy, frozen, and the engine on its weights."""
    how = {"replay_routes": config.rollout.replays_routes, "vision": tokenizer.vision}
    training = create.training(config.model, None, temperature=temperature, **how)
    policy = create.create_policy(config.model, architecture, config.parallel, layout, training)
    return policy, create_engine(policy, config.rollout, tokenizer=tokenizer)


def recomputed(policy: MegatronPolicy, rollouts: Sequence[Rollout], pad_id: int) -> tuple[RolloutBatch, torch.Tensor]:
    """The rollouts as a batch, and the policy's log-probs from then on at the engine's temperature. Collective."""
    if rollouts[0].logprob_kind is LogprobKind.raw:
        policy.temperature = 1.0
    batch = rollout_batch(rollouts, pad_id)
    return batch, policy.logprobs(batch)


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
    """The differences of all operations by path; none unless the engine is the built-in one and no row has images. Collective."""
    built_in = engine.engine
    if not isinstance(built_in, MegatronEngine) or any(images_in(rollout.all_extras) for rollout in traced.rollouts):
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """Differences explained by rounding. Per operation: `ulps` of the precision, growing with the square root of the layers before it."""

    dtype: Dtype
    ulps: float
    gap: float

    @classmethod
    def of(cls, dtype: Dtype, *, ulps: float = 0.0, gap: float = 0.0) -> Tolerance:
        """0: the precision's own."""
        return cls(dtype=dtype, ulps=ulps or ULPS[dtype], gap=gap or GAPS[dtype])

    def at(self, place: Place) -> float:
        return self.ulps * EPSILON[self.dtype] * math.sqrt(1 + max(place.layer, 0))


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenGap:
    """One sampled token with both log-probs."""

    rollout: int
    position: int  # in the response, from 0
    token: int
    text: str
    engine: float
    trainer: float


@dataclass(frozen=True, kw_only=True, slots=True)
class GapReport:
    """The gap of one batch, and the differences between operations of the engine's decoder and the trainer, by path of the tokens."""

    engine: str
    num_layers: int
    tolerance: Tolerance
    num_rollouts: int
    num_tokens: int
    statistics: Mapping[str, float]  # metrics of `losses.gap`
    worst: Sequence[TokenGap]
    paths: Mapping[str, Sequence[Difference]] = field(default_factory=dict)  # empty: layers cannot be seen

    @property
    def gap_is_explained(self) -> bool:
        mean, most = self.statistics["rollout/logprob_gap"], self.statistics["rollout/logprob_gap_max"]
        return mean <= self.tolerance.gap and most <= MOST_OF_ONE_TOKEN * self.tolerance.gap

    @property
    def first(self) -> tuple[str, Difference] | None:
        """The first operation beyond the tolerance, and its path; of two, the one computed earlier."""
        beyond = [(one.place.rank, path, one) for path, found in self.paths.items() for one in found if self.is_beyond(one)]
        return min(beyond, key=lambda entry: entry[0])[1:] if beyond else None

    def is_beyond(self, one: Difference) -> bool:
        """Whether more differs than rounding explains."""
        return not one.relative <= self.tolerance.at(one.place)

    @property
    def agrees(self) -> bool:
        return self.gap_is_explained and self.first is None

    def hidden_before(self, path: str, place: Place) -> list[Operation]:
        """Operations between this one and the previous one of the path that only another path shows."""
        seen = {one.place for one in self.paths[path]}
        known = {one.place for found in self.paths.values() for one in found if one.place.rank < place.rank}
        hidden = takewhile(lambda one: one not in seen, sorted(known, key=lambda one: one.rank, reverse=True))
        return sorted((one.operation for one in hidden), key=ORDER.__getitem__)

    def verdict(self) -> str:
        """Where the two diverge, in one or two sentences."""
        found = self.first
        if found is not None:
            path, one = found
            hidden = [operation.value.replace("_", " ") for operation in self.hidden_before(path, one.place)]
            before = f" (or {', '.join(hidden)} before it, which compiled kernels do not show: try rollout.kernels=torch)" if hidden else ""
            return (
                f"first difference beyond rounding: {one.place.describe(self.num_layers)}{before}, in {path} passes: relative "
                f"{one.relative:.2e}, allowed {self.tolerance.at(one.place):.2e}"
            )
        if not self.paths:
            within = "within" if self.gap_is_explained else "beyond"
            return f"the gap is {within} what rounding explains; the layers of engine {self.engine} are not compared here"
        if self.gap_is_explained:
            return "engine and trainer agree within rounding, in every operation and every log-prob"
        return (
            "every operation of the decoder agrees with the trainer's when it is given the sampled tokens, and the log-probs that came "
            "with them do not: look at the sampler (temperature), at generation's cache, or at the version of its weights"
        )


def to_text(report: GapReport) -> str:
    numbers = report.statistics
    name = "rollout/logprob_gap"
    lines = [
        f"{report.engine}, {report.tolerance.dtype.value}: {report.num_tokens} tokens in {report.num_rollouts} responses",
        f"|engine - trainer| log-prob, nats: mean {numbers[name]:.2e}  p50 {numbers[name + '_p50']:.2e}  p90 {numbers[name + '_p90']:.2e}  "
        f"p99 {numbers[name + '_p99']:.2e}  max {numbers[name + '_max']:.2e}  (allowed: mean {report.tolerance.gap:.0e})",
        f"KL(engine || trainer) {numbers['rollout/logprob_kl']:.2e}, effective sample size {numbers['rollout/effective_sample_size']:.4f}",
        "worst tokens (response, position, token, engine, trainer):",
    ]
    lines += [f"  {t.rollout:>4} {t.position:>5}  {t.text!r:<14} {t.engine:10.5f} {t.trainer:10.5f}" for t in report.worst]
    for path, found in report.paths.items():
        lines += _table(report, path, found)
    return "\n".join([*lines, report.verdict()])


def to_json(report: GapReport) -> str:
    first = report.first
    return json.dumps(
        {
            "engine": report.engine,
            "dtype": report.tolerance.dtype.value,
            "agrees": report.agrees,
            "verdict": report.verdict(),
            "first": None if first is None else {"path": first[0], **_plain(report, first[1])},
            "num_rollouts": report.num_rollouts,
            "num_tokens": report.num_tokens,
            "tolerance": {"ulps": report.tolerance.ulps, "gap": report.tolerance.gap},
            "statistics": dict(report.statistics),
            "worst": [asdict(token) for token in report.worst],
            "paths": {path: [_plain(report, one) for one in found] for path, found in report.paths.items()},
        },
        indent=1,
    )


def _plain(report: GapReport, one: Difference) -> dict[str, Any]:
    in_layers = 0 <= one.place.layer < report.num_layers
    return {
        "layer": one.place.layer if in_layers else None,
        "operation": one.place.operation.value,
        "absolute": one.absolute,
        "relative": one.relative,
        "allowed": report.tolerance.at(one.place),
        "num_tokens": one.num_tokens,
    }


def _table(report: GapReport, path: str, found: Sequence[Difference]) -> list[str]:
    """The largest difference of each layer; all operations of the first layer beyond the tolerance."""
    beyond = next((one for one in found if report.is_beyond(one)), None)
    lines = [f"{path} passes ({max((one.num_tokens for one in found), default=0)} tokens), largest relative difference:"]
    layers: dict[int, list[Difference]] = {}
    for one in found:
        layers.setdefault(one.place.layer, []).append(one)
    for layer, ones in layers.items():
        shown = ones if beyond is not None and layer == beyond.place.layer else [max(ones, key=lambda one: one.relative)]
        for one in shown:
            mark = "  <-- first beyond rounding" if one is beyond else "  *" if report.is_beyond(one) else ""
            lines.append(f"  {one.place.describe(report.num_layers):<28} {one.relative:.1e}  (absolute {one.absolute:.1e}){mark}")
    return lines
