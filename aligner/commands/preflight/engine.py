"""The rollout engine on the job's own layout: built, refitted, and its log-probs of a few tokens compared with the policy's.

Then the engine is refitted with the policy's negated weights, and with the right ones again. Log-probs that follow prove that
the engine samples from the weights it was sent.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import TYPE_CHECKING

from aligner.commands.preflight.items import Context, Finding, Item, Level, Where
from aligner.commands.preflight.network import ensure_group
from aligner.commands.preflight.samples import load_sample
from aligner.commands.preflight.tokenizers import tokenizer_of
from aligner.errors import EngineError
from aligner.online.config import OnlineRun
from aligner.types import LogprobKind, Prompt, Rollout

if TYPE_CHECKING:
    from aligner.models.training.policy import MegatronPolicy
    from aligner.protocols import RolloutEngine

NUM_PROMPTS, NUM_TOKENS = 4, 8
NOTABLE_GAP = 0.1  # nats between the engine's and the policy's log-prob of a token; bfloat16 alone gives about a tenth of this


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One rank's measurements; all zero for a run without an engine."""

    build_seconds: float = 0.0
    refit_seconds: float = 0.0
    num_tokens: int = 0
    gap: float = 0.0  # largest difference of log-probs
    refitted_gap: float = 0.0  # with the weights negated, and with the right ones again


def _observe(context: Context) -> Trial:
    from aligner.models import create  # Megatron-Core comes with it
    from aligner.parallel import topology
    from aligner.rollout.create import create_engine
    from aligner.rollout.engine.verify import negated

    config = context.config
    if not isinstance(config, OnlineRun):
        return Trial()
    ensure_group(context)
    started = time.monotonic()
    tokenizer = tokenizer_of(config.models()[0])
    prompts = load_sample(config, config.data.train, tokenizer)[0]
    layout = topology.initialize(config.parallel, seed=config.run.seed)
    architecture = create.read_architecture(config.model, vocab_size=tokenizer.vocab_size)
    rollout = config.rollout
    training = create.training(config.model, None, temperature=rollout.sampling.temperature, replay_routes=rollout.replays_routes)
    policy = create.create_policy(config.model, architecture, config.parallel, layout, training)
    engine = create_engine(policy, config.rollout, tokenizer=tokenizer)
    built = time.monotonic()
    probe = _Probe(engine, policy, config, list(islice(cycle(prompts), max(NUM_PROMPTS, layout.dp_size))), tokenizer.pad_id)
    refit_seconds, gap = probe.refit_and_compare(1)
    with negated(policy.chunks):
        _, negated_gap = probe.refit_and_compare(2)
    _, restored_gap = probe.refit_and_compare(3)
    engine.shutdown()
    return Trial(
        build_seconds=built - started,
        refit_seconds=refit_seconds,
        num_tokens=probe.num_tokens,
        gap=gap,
        refitted_gap=max(negated_gap, restored_gap),
    )


class _Probe:
    """Samples a few tokens with the engine, as a run would. Collective."""

    def __init__(self, engine: RolloutEngine, policy: MegatronPolicy, config: OnlineRun, prompts: list[Prompt], pad_id: int) -> None:
        self._engine = engine
        self._policy = policy
        self._sampling = replace(config.rollout.sampling, min_response_length=0, max_response_length=NUM_TOKENS)
        self._prompts = prompts
        self._pad_id = pad_id
        self.num_tokens = 0  # of the last sampling, on all replicas

    def refit_and_compare(self, version: int) -> tuple[float, float]:
        """(seconds of the refit, largest difference between the engine's log-probs and the policy's) with the policy's current weights."""
        from aligner.parallel.collectives import gather_objects

        self._engine.sleep()
        started = time.monotonic()
        self._engine.refit(version)
        self._engine.wake()
        seconds = time.monotonic() - started
        own = [one for part in self._engine.generate(self._prompts, list(range(len(self._prompts))), self._sampling) for one in part]
        parts = gather_objects(own if self._engine.replica.is_leader else [])
        self._engine.sleep()  # the policy's turn
        rollouts = sorted((rollout for part in parts for rollout in part), key=lambda rollout: rollout.seed)
        self.num_tokens = sum(len(rollout.response) for rollout in rollouts)
        return seconds, _gap(self._policy, rollouts, self._pad_id)


def _gap(policy: MegatronPolicy, rollouts: list[Rollout], pad_id: int) -> float:
    """Largest difference between the sampler's and the policy's log-probs. Collective. Raises EngineError for one that is not finite."""
    from aligner.data.collate import rollout_batch

    batch = rollout_batch(rollouts, pad_id)
    temperature = policy.temperature
    if rollouts[0].logprob_kind is LogprobKind.raw:
        policy.temperature = 1.0
    found = policy.logprobs(batch)
    policy.temperature = temperature
    gap = float((found - batch.rollout_logprobs)[batch.loss_mask].abs().max())
    if not math.isfinite(gap):
        raise EngineError("log-probs of the generated tokens are not finite: the weights are damaged, or the precision does not suffice")
    return gap


def judge(context: Context, seen: Mapping[int, Trial]) -> Finding:
    """Warning if sampler and policy disagree by more than rounding explains."""
    slowest = max(seen.values(), key=lambda trial: trial.build_seconds)
    if not slowest.num_tokens:
        return Finding(level=Level.ok, found="this run does not sample")
    gap = max(trial.gap for trial in seen.values())
    refitted_gap = max(trial.refitted_gap for trial in seen.values())
    refit_seconds = max(trial.refit_seconds for trial in seen.values())
    figures = {"build_seconds": slowest.build_seconds, "refit_seconds": refit_seconds, "gap": gap, "refitted_gap": refitted_gap}
    found = (
        f"built in {slowest.build_seconds:.0f} s, refitted in {refit_seconds:.2f} s, {slowest.num_tokens} tokens; "
        f"log-probs within {gap:.1e} of the policy's, {refitted_gap:.1e} after refits with negated weights and back"
    )
    if refitted_gap > max(NOTABLE_GAP, 4 * gap):
        advice = "the engine does not sample from the weights that a refit gives it: try rollout.verify_refit=checksum, or another engine"
        return Finding(level=Level.fatal, found=found, advice=advice, figures=figures)
    if gap > NOTABLE_GAP:
        advice = "look at rollout/logprob_gap in the run: importance ratios start from this difference"
        return Finding(level=Level.warning, found=found, advice=advice, figures=figures)
    return Finding(level=Level.ok, found=found, figures=figures)


ENGINE = Item("engine", Where.every_rank, _observe, judge, timeout_seconds=1800.0, needs=("network", "data", "weights", "plan"))
