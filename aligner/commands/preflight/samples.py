"""The first records of the data sets, read as the job would read them; the reward function and the rollout engine on a few of them."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice
from typing import Any

from aligner.commands.preflight.cluster import ensure_group
from aligner.commands.preflight.framework import Context, Finding, Where, agree, fatal, item, ok, warning
from aligner.commands.preflight.models import tokenizer_of
from aligner.data.report import LoadReport
from aligner.data.tokenizer import Tokenizer
from aligner.errors import DataError, EngineError
from aligner.online.config import OnlineRun
from aligner.protocols import RewardModel
from aligner.run.settings import JobRun
from aligner.types import FinishReason, Rollout

NUM_RECORDS = 200  # an even number: some formats have pairs of lines
MANY_LEFT_OUT = 0.5  # part of the sample
NUM_SCORED = 4
NUM_PROMPTS, NUM_TOKENS = 4, 8  # for the engine
NOTABLE_GAP = 0.1  # nats between the engine's and the policy's log-prob of a token; bfloat16 alone gives about a tenth of this

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One node's reading of the data sets' first records."""

    summaries: list[str] = field(default_factory=list)
    digest: str = ""
    left_out: float = 0.0  # largest part of a data set's sample that is not used
    num_bad: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Rewards for the sample's own answers and for empty responses; none if the run has no reward function."""

    function: str = ""
    answers: list[float] = field(default_factory=list)
    empty: list[float] = field(default_factory=list)
    num_with_answer: int = 0
    accuracy: str = ""
    judge: str = ""  # the question to a policy that judges itself
    about: list[str] = field(default_factory=list)  # the functions' own descriptions, such as the active sandbox


def fitted(config: JobRun) -> JobRun:
    """The config with the job's lengths filled in. Raises ConfigError for lengths that do not fit the model."""
    from aligner.jobs.parts import with_lengths  # Megatron-Core comes with it

    return with_lengths(config)


def load_sample(config: JobRun, location: str, tokenizer: Tokenizer, first: int | None = NUM_RECORDS) -> tuple[Sequence[Any], LoadReport]:
    """The usable records among the first ones (None: all), and the report. Raises DataError listing the bad lines."""
    return config.read(location, tokenizer.chatting(config.data), first=first)


@item("data", Where.every_node, seconds=300.0, needs=("tokenizer",), advice="correct the data, or the settings data.*")
def data(context: Context) -> Sample:
    tokenizer = tokenizer_of(context.config.models()[0])
    config = fitted(context.config)
    summaries, content, left_out, num_bad = [], hashlib.sha256(), 0.0, 0
    for location in filter(None, (config.data.train, config.data.validation)):
        examples, report = load_sample(config, location, tokenizer)
        content.update(repr(list(examples)).encode())
        used = report.num_kept / max(1, report.num_records)
        left_out, num_bad = max(left_out, 1 - used), num_bad + report.num_bad
        summaries.append(report.summary())
    return Sample(summaries=summaries, digest=content.hexdigest()[:16], left_out=left_out, num_bad=num_bad)


@data.judged
def judge_data(context: Context, seen: Mapping[int, Sample]) -> Finding:
    """Bad lines have already raised, unless they are skipped."""
    first, text = seen[0], f": other records under the same name than on {context.allocation.node_of(0)}"
    advice = "put data on a file system that all nodes share"
    if different := agree(context, seen, lambda theirs, ours: text, advice, of=lambda sample: sample.digest):
        return different
    found = "\n".join(first.summaries) + f"\n(of the first {NUM_RECORDS} records)"
    if first.num_bad:
        return warning(found, "data.bad_lines=skip leaves them out; correct them if they are errors")
    if first.left_out > MANY_LEFT_OUT:
        return warning(f"{found}: {first.left_out:.0%} are left out", "raise data.max_prompt_length or data.max_length, or use other data")
    return ok(found)


@item("reward", Where.every_node, seconds=180.0, needs=("data",))
def reward(context: Context) -> Scores:
    config = context.config
    if not isinstance(config, OnlineRun):
        return Scores()
    named, judge = local_rewards(config), config.describe_judge(partial(_judged, config))
    if not named:
        return Scores(judge=judge)
    tokenizer = tokenizer_of(config.models()[0])
    prompts = load_sample(fitted(config), config.data.train, tokenizer)[0][:NUM_SCORED]
    scores: dict[str, list[list[float]]] = {}
    about = []
    for key, (_, build) in named.items():
        model = build(tokenizer.decode)
        about += filter(None, [getattr(model, "about", "")])
        try:
            scores[key] = [
                _score(model, prompts, [tokenizer.encode(prompt.answer or "") for prompt in prompts], tokenizer),
                _score(model, prompts, [[]] * len(prompts), tokenizer),
            ]
        finally:
            model.close()
    answers, empty = scores.get("reward", [[], []])
    return Scores(
        function=named["reward"][0] if "reward" in named else "",
        answers=answers,
        empty=empty,
        num_with_answer=sum(prompt.answer is not None for prompt in prompts),
        accuracy=config.validation.scorer.path,
        judge=judge,
        about=about,
    )


def _judged(config: OnlineRun) -> tuple[OnlineRun, Sequence[Any], Tokenizer, int]:
    """The arguments of `OnlineRun.describe_judge`."""
    from aligner.models.create import context_length, read_architecture  # Megatron-Core comes with it

    model = config.models()[0]
    tokenizer = tokenizer_of(model)
    config = fitted(config)
    context = context_length(model.config, read_architecture(model.config, vocab_size=tokenizer.vocab_size))
    return config, load_sample(config, config.data.train, tokenizer)[0], tokenizer, context


def local_rewards(config: OnlineRun) -> dict[str, tuple[str, Callable[[Decode], RewardModel]]]:
    """Setting, name and builder of every reward without a server: all but a reward model."""
    from aligner.rewards.compose import composed_reward
    from aligner.rewards.config import formula
    from aligner.rewards.local import function_reward

    functions = {name: part for name, part in config.reward.functions.items() if not part.served}
    found: dict[str, tuple[str, Callable[[Decode], RewardModel]]] = {}
    if functions:
        found["reward"] = formula(functions), partial(composed_reward, functions)
    elif config.reward.function.path:
        found["reward"] = config.reward.function.path, partial(function_reward, config.reward.function)
    if config.validation.scorer.path:
        found["accuracy"] = config.validation.scorer.path, partial(function_reward, config.validation.scorer)
    return found


def _score(reward: Any, prompts: Sequence[Any], responses: Sequence[list[int]], tokenizer: Tokenizer) -> list[float]:
    """Rewards of responses (the end token for an empty one). Raises RewardError, or DataError for one that is not finite."""
    rollouts = []
    for prompt, tokens in zip(prompts, responses, strict=True):
        response = tuple(tokens) or (tokenizer.eos_id,)
        logprobs, reason = (0.0,) * len(response), FinishReason.stop
        rollouts.append(Rollout(prompt=prompt, response=response, logprobs=logprobs, finish_reason=reason, policy_version=0, seed=0))
    found = reward.score(rollouts).result()
    silent = [False] * len(prompts) if found.silent is None else found.silent.tolist()
    scored = zip(prompts, found.rewards.tolist(), silent, strict=True)
    heard = [(prompt, score) for prompt, score, is_silent in scored if not is_silent]
    if bad := [(prompt, score) for prompt, score in heard if not math.isfinite(score)]:  # NaN even if a failure only marks the sample
        raise DataError(f"the reward function returned {bad[0][1]} for an answer to {bad[0][0].source}; expected a finite number")
    return [score for _, score in heard]


@reward.judged
def judge_reward(context: Context, seen: Mapping[int, Scores]) -> Finding:
    """Warning if an empty response scores as high as the answers."""
    first = seen[0]
    about = dict.fromkeys(text for scores in seen.values() for text in scores.about)  # nodes may differ
    accuracy = "\n".join([f"; {first.accuracy} judges validation" if first.accuracy else "", *about])
    if first.judge:
        return ok(f"{first.judge}{accuracy}")
    if not first.function and not first.accuracy:
        return ok("no reward function: a reward model scores" if isinstance(context.config, OnlineRun) else "this run has no rewards")
    if not first.function:
        return ok(f"a reward model scores{accuracy}")
    if not first.answers or not first.empty:
        return warning(f"{first.function} returned None for each of the first samples{accuracy}")
    empty = sum(first.empty) / len(first.empty)
    if not first.num_with_answer:
        return ok(f"{first.function}: {empty:.3g} for an empty response (the prompts have no answers){accuracy}")
    answers = sum(first.answers) / len(first.answers)
    found = f"{first.function}: mean {answers:.3g} for the answers themselves, {empty:.3g} for empty ones{accuracy}"
    if answers > empty:
        return ok(found)
    return warning(found, "fine if the reward is about form; else check data.answer_field and the function")


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One rank's measurements; all zero for a run without an engine."""

    build_seconds: float = 0.0
    refit_seconds: float = 0.0
    num_tokens: int = 0
    gap: float = 0.0  # largest difference of log-probs
    refitted_gap: float = 0.0  # with the weights negated, and with the right ones again


@item("engine", Where.every_rank, seconds=1800.0, needs=("network", "data", "weights", "plan"))
def engine(context: Context) -> Trial:
    """Build the engine; refit it with the policy's weights, negated ones and the right ones: log-probs prove what it samples from."""
    from aligner.commands.gap import built, recomputed, samples  # Megatron-Core comes with it
    from aligner.jobs.parts import load_model_files
    from aligner.parallel import topology
    from aligner.rollout.builtin.refit import negated

    config = context.config
    if not isinstance(config, OnlineRun):
        return Trial()
    ensure_group(context)
    started = time.monotonic()
    tokenizer, architecture = load_model_files(config.model)
    records = load_sample(config, config.data.train, tokenizer)[0]
    layout = topology.initialize(config.parallel, seed=config.run.seed)
    prompts = list(islice(cycle(records), max(NUM_PROMPTS, layout.dp_size)))
    sampling = replace(config.rollout.sampling, min_response_length=0, max_response_length=NUM_TOKENS)
    policy, sampler = built(config, layout, tokenizer, architecture, sampling.temperature)
    build_seconds = time.monotonic() - started

    def refitted(version: int) -> tuple[float, int, float]:
        """(seconds of a refit with the policy's current weights, sampled tokens, largest difference between both sides' log-probs)."""
        sampler.sleep()
        started = time.monotonic()
        sampler.refit(version)
        sampler.wake()
        seconds = time.monotonic() - started
        rollouts = samples(sampler, prompts, sampling)
        batch, logprobs = recomputed(policy, rollouts, tokenizer.pad_id)
        gap = float((logprobs - batch.rollout_logprobs)[batch.loss_mask].abs().max())
        if not math.isfinite(gap):
            raise EngineError("log-probs of the generated tokens are not finite: the weights are damaged, or the precision is too low")
        return seconds, sum(len(rollout.response) for rollout in rollouts), gap

    refit_seconds, _, gap = refitted(1)
    with negated(policy.chunks):
        _, _, negated_gap = refitted(2)
    _, num_tokens, restored_gap = refitted(3)
    sampler.shutdown()
    refitted_gap = max(negated_gap, restored_gap)
    return Trial(build_seconds=build_seconds, refit_seconds=refit_seconds, num_tokens=num_tokens, gap=gap, refitted_gap=refitted_gap)


@engine.judged
def judge_engine(context: Context, seen: Mapping[int, Trial]) -> Finding:
    """Warning if sampler and policy disagree by more than rounding explains."""
    slowest = max(seen.values(), key=lambda trial: trial.build_seconds)
    if not slowest.num_tokens:
        return ok("this run does not sample")
    gap = max(trial.gap for trial in seen.values())
    refitted_gap = max(trial.refitted_gap for trial in seen.values())
    refit_seconds = max(trial.refit_seconds for trial in seen.values())
    figures = {"build_seconds": slowest.build_seconds, "refit_seconds": refit_seconds, "gap": gap, "refitted_gap": refitted_gap}
    found = (
        f"built in {slowest.build_seconds:.0f} s, refitted in {refit_seconds:.2f} s, {slowest.num_tokens} tokens; "
        f"log-probs within {gap:.1e} of the policy's, {refitted_gap:.1e} after refits with negated weights and back"
    )
    if refitted_gap > max(NOTABLE_GAP, 4 * gap):
        advice = "the engine does not sample from the weights of a refit: try rollout.verify_refit=checksum, or another engine"
        return fatal(found, advice, figures)
    if gap > NOTABLE_GAP:
        return warning(found, "watch rollout/logprob_gap in the run: importance ratios start from this difference", figures)
    return ok(found, figures=figures)
