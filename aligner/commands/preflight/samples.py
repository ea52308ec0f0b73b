"""The beginnings of the data sets, read as the job would read them, and the reward function on a few of them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from aligner.commands.preflight.items import Context, Finding, Item, Level, Where, who
from aligner.commands.preflight.tokenizers import tokenizer_of
from aligner.data.report import LoadReport
from aligner.data.tokenizer import Tokenizer
from aligner.errors import DataError
from aligner.online.config import OnlineRun
from aligner.protocols import RewardModel
from aligner.run.settings import JobRun

NUM_RECORDS = 200  # an even number: some formats have pairs of lines
MANY_LEFT_OUT = 0.5  # part of the sample
NUM_SCORED = 4

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
    judge: str = ""  # what the policy is asked where it judges itself
    about: list[str] = field(default_factory=list)  # what the functions say of themselves: the sandbox that is in force


def fitted(config: JobRun) -> JobRun:
    """The config with the job's lengths filled in. Raises ConfigError if some do not fit the model."""
    from aligner.jobs.parts import with_lengths  # Megatron-Core comes with it

    return with_lengths(config)


def load_sample(config: JobRun, location: str, tokenizer: Tokenizer, first: int | None = NUM_RECORDS) -> tuple[Sequence[Any], LoadReport]:
    """The usable ones of the first records (None: of all), and the report. Raises DataError listing the bad lines."""
    return config.read(location, tokenizer.chatting(config.data), first=first)


def _observe_data(context: Context) -> Sample:
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


def judge_data(context: Context, seen: Mapping[int, Sample]) -> Finding:
    """Bad lines have already raised, unless they are skipped."""
    first = seen[0]
    if others := [rank for rank, sample in seen.items() if sample.digest != first.digest]:
        text = f"{who(context.allocation, others)}: other records under the same name than on {context.allocation.node_of(0)}"
        return Finding(level=Level.fatal, found=text, advice="put data on a file system that all nodes share")
    found = "\n".join(first.summaries) + f"\n(of the first {NUM_RECORDS} records)"
    if first.num_bad:
        return Finding(
            level=Level.warning, found=found, advice="data.bad_lines=skip leaves them out; mend them if they are not meant to be"
        )
    if first.left_out > MANY_LEFT_OUT:
        advice = "raise data.max_prompt_length or data.max_length, or use other data"
        return Finding(level=Level.warning, found=f"{found}: {first.left_out:.0%} are left out", advice=advice)
    return Finding(level=Level.ok, found=found)


def _observe_reward(context: Context) -> Scores:
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
        reward = build(tokenizer.decode)
        about += filter(None, [getattr(reward, "about", "")])
        try:
            scores[key] = [
                _score(reward, prompts, [tokenizer.encode(prompt.answer or "") for prompt in prompts], tokenizer),
                _score(reward, prompts, [[]] * len(prompts), tokenizer),
            ]
        finally:
            reward.close()
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
    from aligner.rewards.compose import composed_reward, formula
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
    from aligner.types import FinishReason, Rollout

    rollouts = []
    for prompt, tokens in zip(prompts, responses, strict=True):
        response = tuple(tokens) or (tokenizer.eos_id,)
        logprobs, reason = (0.0,) * len(response), FinishReason.stop
        rollouts.append(Rollout(prompt=prompt, response=response, logprobs=logprobs, finish_reason=reason, policy_version=0, seed=0))
    found = reward.score(rollouts).result()
    silent = [False] * len(prompts) if found.silent is None else found.silent.tolist()
    scored = zip(prompts, found.rewards.tolist(), silent, strict=True)
    heard = [(prompt, score) for prompt, score, is_silent in scored if not is_silent]
    if bad := [(prompt, score) for prompt, score in heard if not math.isfinite(score)]:  # NaN also where a failure only marks the sample
        raise DataError(f"the reward function returned {bad[0][1]} for an answer to {bad[0][0].source}; expected a finite number")
    return [score for _, score in heard]


def judge_reward(context: Context, seen: Mapping[int, Scores]) -> Finding:
    """Warning if an empty response scores as high as the answers."""
    first = seen[0]
    about = dict.fromkeys(text for scores in seen.values() for text in scores.about)  # nodes may differ
    accuracy = "\n".join([f"; {first.accuracy} judges validation" if first.accuracy else "", *about])
    if first.judge:
        return Finding(level=Level.ok, found=f"{first.judge}{accuracy}")
    if not first.function and not first.accuracy:
        text = "no reward function: a reward model scores" if isinstance(context.config, OnlineRun) else "this run has no rewards"
        return Finding(level=Level.ok, found=text)
    if not first.function:
        return Finding(level=Level.ok, found=f"a reward model scores{accuracy}")
    if not first.answers or not first.empty:
        return Finding(
            level=Level.warning, found=f"{first.function} says nothing of the first samples: it returned None for each{accuracy}"
        )
    empty = sum(first.empty) / len(first.empty)
    if not first.num_with_answer:
        return Finding(level=Level.ok, found=f"{first.function}: {empty:.3g} for an empty response (the prompts have no answers){accuracy}")
    answers = sum(first.answers) / len(first.answers)
    found = f"{first.function}: mean {answers:.3g} for the answers themselves, {empty:.3g} for empty ones{accuracy}"
    if answers > empty:
        return Finding(level=Level.ok, found=found)
    advice = "fine where the reward is about form; else look at data.answer_field and at the function"
    return Finding(level=Level.warning, found=found, advice=advice)


DATA = Item(
    "data",
    Where.every_node,
    _observe_data,
    judge_data,
    timeout_seconds=300.0,
    needs=("tokenizer",),
    advice="mend the data, or what data.* says of them",
)
REWARD = Item("reward", Where.every_node, _observe_reward, judge_reward, timeout_seconds=180.0, needs=("data",))
