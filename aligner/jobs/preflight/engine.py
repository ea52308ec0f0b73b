"""The rollout engine on the job's own layout: built, refitted once, and its log-probs of a few tokens compared with the policy's."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import cycle, islice

from aligner.errors import EngineError
from aligner.jobs.preflight.items import Context, Finding, Item, Level, Where
from aligner.jobs.preflight.models import used_models
from aligner.jobs.preflight.network import ensure_group
from aligner.jobs.preflight.samples import load_sample
from aligner.jobs.preflight.tokenizers import tokenizer_of
from aligner.schemas import TrainGRPO, TrainPPO
from aligner.types import Rollout

NUM_PROMPTS, NUM_TOKENS = 4, 8
NOTABLE_GAP = 0.1  # nats between the engine's and the policy's log-prob of a token; bfloat16 alone gives about a tenth of this


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What one rank saw; all zero for a run without an engine."""

    build_seconds: float = 0.0
    refit_seconds: float = 0.0
    num_tokens: int = 0
    gap: float = 0.0  # largest difference of log-probs


def _observe(context: Context) -> Trial:
    from aligner.models import create  # Megatron-Core comes with it
    from aligner.parallel import topology
    from aligner.rollout.megatron import MegatronEngine

    config = context.config
    if not isinstance(config, (TrainPPO, TrainGRPO)):
        return Trial()
    ensure_group(context)
    started = time.monotonic()
    tokenizer = tokenizer_of(used_models(config)[0])
    prompts = load_sample(config, config.data.train, tokenizer)[0]
    layout = topology.initialize(config.parallel, seed=config.run.seed)
    architecture = create.read_architecture(config.model, vocab_size=tokenizer.vocab_size)
    training = create.training(config.model, None, temperature=config.rollout.sampling.temperature)
    policy = create.create_policy(config.model, architecture, config.parallel, layout, training)
    engine = MegatronEngine(policy.chunks, config.rollout, eos_id=tokenizer.eos_id)
    built = time.monotonic()
    engine.sleep()
    engine.refit(1)
    engine.wake()
    refitted = time.monotonic()
    count = max(NUM_PROMPTS, layout.dp_size)
    sampling = replace(config.rollout.sampling, max_response_length=NUM_TOKENS)
    rollouts = [one for part in engine.generate(list(islice(cycle(prompts), count)), list(range(count)), sampling) for one in part]
    gap = _gap(policy, _of_first_replica(rollouts), tokenizer.pad_id)
    num_tokens = sum(len(rollout.response) for rollout in rollouts)
    return Trial(build_seconds=built - started, refit_seconds=refitted - built, num_tokens=num_tokens, gap=gap)


def _of_first_replica(own: list[Rollout]) -> list[Rollout]:
    """One set of rollouts on all ranks: replicas may round differently, and so sample differently."""
    from aligner.parallel.collectives import broadcast_object

    return broadcast_object(own)


def _gap(policy: object, rollouts: list[Rollout], pad_id: int) -> float:
    """Largest difference between the sampler's and the policy's log-probs. Collective. Raises EngineError for one that is not finite."""
    from aligner.data.collate import rollout_batch

    batch = rollout_batch(rollouts, pad_id)
    found = policy.logprobs(batch)
    gap = float((found - batch.rollout_logprobs)[batch.loss_mask].abs().max())
    if not math.isfinite(gap):
        raise EngineError("log-probs of the generated tokens are not finite: the weights are damaged, or the precision does not suffice")
    return gap


def judge(context: Context, seen: Mapping[int, Trial]) -> Finding:
    """Warning where sampler and policy disagree by more than rounding explains."""
    slowest = max(seen.values(), key=lambda trial: trial.build_seconds)
    if not slowest.num_tokens:
        return Finding(level=Level.ok, found="this run does not sample")
    gap = max(trial.gap for trial in seen.values())
    figures = {"build_seconds": slowest.build_seconds, "refit_seconds": max(trial.refit_seconds for trial in seen.values()), "gap": gap}
    found = (
        f"built in {slowest.build_seconds:.0f} s, refitted in {figures['refit_seconds']:.2f} s, {slowest.num_tokens} tokens a replica; "
        f"log-probs within {gap:.1e} of the policy's"
    )
    if gap > NOTABLE_GAP:
        advice = "look at rollout/logprob_gap in the run: importance ratios start from this difference"
        return Finding(level=Level.warning, found=found, advice=advice, figures=figures)
    return Finding(level=Level.ok, found=found, figures=figures)


ENGINE = Item(
    name="engine",
    where=Where.every_rank,
    kind=Trial,
    observe=_observe,
    judge=judge,
    timeout_seconds=1800.0,
    needs=("network", "data", "weights", "plan"),
)
