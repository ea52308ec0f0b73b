"""Self-rewarding language models (Yuan et al. 2024, 2401.10020): the policy judges its own responses and learns from the pairs.

Iteration i: the current policy becomes the reference, samples `group_size` responses to each prompt, and scores each of them as a judge
(`judge.py`), `num_judgements` times. The best and the worst of a group are a pair; then `epochs_per_iteration` passes over the pairs with a
loss of `aligner.losses.preference`. With `judge=reward` the run's reward scores instead: iterative DPO (2312.11456).

Against SPIN (`spin.py`): no given responses, so that the policy may become better than its data. Against online DPO (`online_dpo.py`): a
whole iteration is sampled at once and trained on for many steps, which saves sampling and judging.

`length_control` is that of Meta-Rewarding (Wu et al. 2024, 2407.19594): judges like long responses, so that of those that are nearly the
best the shortest is chosen, and of those that are nearly the worst the longest is rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aligner.algorithms.iterations import Answer, Iteration, IterationConfig, PairIterations, SampleFiles
from aligner.algorithms.judge import (
    Judge,
    Judgement,
    ask_about,
    judged,
    judgement_metrics,
    longest_question,
    make_judge,
    score_pattern,
    scoring_settings,
)
from aligner.algorithms.online_dpo import MovingReference
from aligner.data.collate import PreferencePair
from aligner.data.images import images_in
from aligner.data.order import EpochSampler
from aligner.data.supervised import answered
from aligner.data.tokenizer import Tokenizer
from aligner.errors import ConfigError, RunHalted, check_numbers
from aligner.loop.learnt import accounted
from aligner.loop.loop import Built, Clock
from aligner.online import validation
from aligner.online.collect import ScoredRollouts, sample_seeds
from aligner.online.config import OnlineRun, check_iterated
from aligner.online.selection import Pairing, Pairs, pairs_by_length, pairs_of
from aligner.online.task import OnlineTask
from aligner.protocols import Policy
from aligner.reporting.formats import Column, Goal
from aligner.run.recipe import Recipe
from aligner.run.settings import Traits
from aligner.types import FinishReason, Prompt, SampleRow, SamplingConfig

if TYPE_CHECKING:
    from aligner.jobs.samples import OnlineJob

NUM_SHOWN = 4  # responses in a table
EXCERPT_CHARACTERS = 200  # of a judgement that does not parse


class JudgedBy(str, Enum):
    """Who scores the responses."""

    policy = "policy"  # the model itself, asked in words
    reward = "reward"  # what `reward` names


@dataclass(kw_only=True, slots=True)
class SelfRewardingConfig(IterationConfig):
    """Settings of self-rewarding."""

    group_size: int = 4  # responses sampled per prompt
    judge: JudgedBy = JudgedBy.policy  # who scores the responses: policy: the model itself, asked in words; reward: what `reward` names
    num_judgements: int = 3  # of each response; their mean is its score
    judge_template: str = ""  # a file with {prompt} and {response}; empty: the paper's, additive from 0 to 5
    score_pattern: str = r"(?i)score:\s*([0-9]+(?:\.[0-9]+)?)"  # its one group is the score; the last place where it matches counts
    lowest_score: float = 0.0  # judgements below it, or above highest_score, do not parse
    highest_score: float = 5.0  # judgements above it, or below lowest_score, do not parse
    judge_temperature: float = 0.7  # sampling temperature of judgements; 0 is greedy
    judge_top_p: float = 0.9  # judgements are sampled from the likeliest tokens with this share of the probability; 1: off
    max_judgement_length: int = 256  # tokens
    min_gap: float = 0.0  # best and worst whose scores differ by no more than this are a tie: left out and counted
    length_control: float = 0.0  # part of the range of a group's scores from its best, and from its worst, in which length decides; 0: off
    drop_truncated: bool = True  # responses that were cut at the length limit are in no pair

    def __post_init__(self) -> None:
        IterationConfig.__post_init__(self)
        check_numbers(self, "algorithm", at_least_1=("num_judgements", "max_judgement_length"), not_negative=("min_gap",))
        if self.group_size < 2:
            raise ConfigError(f"algorithm.group_size={self.group_size}: must be at least 2")
        if not self.variant.needs_reference:
            raise ConfigError(f"algorithm.loss={self.variant.value}: needs one with a reference, such as sigmoid")
        if not 0 <= self.length_control < 0.5:
            raise ConfigError(f"algorithm.length_control={self.length_control}: must be at least 0 and below 0.5, or best is worst")
        if self.lowest_score >= self.highest_score:
            raise ConfigError(f"algorithm.lowest_score={self.lowest_score}: must be below highest_score={self.highest_score}")
        if self.judge_template and self.judge is JudgedBy.reward:
            raise ConfigError(f"algorithm.judge_template={self.judge_template}: with judge=reward nobody is asked; allowed: judge=policy")
        if not self.judge_temperature and self.num_judgements > 1:
            raise ConfigError(f"algorithm.num_judgements={self.num_judgements}: with judge_temperature=0 all are the same; allowed: 1")
        score_pattern(self.score_pattern)
        self.judge_sampling()

    @property
    def rollouts_per_step(self) -> int:
        """Responses sampled per training step, in the mean over an iteration."""
        return -(-self.batch_size * self.group_size // self.epochs_per_iteration)

    @property
    def judgements_per_step(self) -> int:
        """Judgements sampled per training step, in the mean over an iteration."""
        return self.rollouts_per_step * self.num_judgements if self.judge is JudgedBy.policy else 0

    def judge_sampling(self) -> SamplingConfig:
        """Sampling settings of judgements. Raises ConfigError for settings that cannot work."""
        try:
            return SamplingConfig(temperature=self.judge_temperature, top_p=self.judge_top_p, max_response_length=self.max_judgement_length)
        except ConfigError as error:
            raise ConfigError(str(error).replace("sampling.", "algorithm.judge_")) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """The training pairs, and how many pairs are left out: ties, and pairs with the same tokens."""

    pairs: list[PreferencePair] = field(default_factory=list)
    num_ties: int = 0
    num_identical: int = 0


class SelfRewarding(PairIterations[SelfRewardingConfig]):
    """`judge` and the files of its `judgements`: None if the task's reward scores. `rewarded`: there is such a reward; beside a judge it is
    reported. `settings`: text that says how responses and judgements are sampled, and by what they are scored.
    """

    area = "self_rewarding"

    def __init__(
        self,
        config: SelfRewardingConfig,
        policy: Policy,
        task: OnlineTask,
        reference: MovingReference,
        answers: SampleFiles[Answer],
        *,
        judge: Judge | None = None,
        judgements: SampleFiles[Judgement] | None = None,
        rewarded: bool = True,
        settings: str = "",
    ) -> None:
        if (judge is None) != (judgements is None) or (judge is None) != (config.judge is JudgedBy.reward):
            raise ValueError(f"judge is {judge} and judgements is {judgements}, with algorithm.judge={config.judge.value}")
        size, shown = config.group_size, repr((config.group_size, settings))
        super().__init__(config, policy, task, reference, answers, prompts=task.train, settings=shown, group_size=size, rewarded=rewarded)
        self.judge = judge
        self.judgements = judgements
        self._chosen = Chosen()

    def prepare(self, iteration: Iteration, answers: Sequence[Answer], clock: Clock) -> tuple[dict[str, float], Sequence[SampleRow]]:
        """Scores, and pairs. Raises RunHalted if no response has a score: training would never begin."""
        if self.judge is None or self.judgements is None:
            scores, metrics = [answer.reward for answer in answers], {}
        else:
            with clock.phase("judge"):
                judgements = self._judge(self.judge, self.judgements, iteration, answers)
            scores, metrics = [judgement.score for judgement in judgements], judgement_metrics(judgements)
            metrics |= _agreement(answers, scores, self.group_size)
            self._check_parsed(judgements)
        found, self._chosen = self._choose(iteration, answers, scores)
        return metrics | found, self._rows(iteration, answers, scores)

    def recall(self, iteration: Iteration, answers: Sequence[Answer]) -> None:
        scores = [answer.reward for answer in answers]
        if self.judgements is not None:
            scores = [judgement.score for judgement in self.read(self.judgements, iteration, "judgements")]
        _, self._chosen = self._choose(iteration, answers, scores)

    def pairs(self, iteration: int, position: int) -> tuple[list[PreferencePair], dict[str, float]]:
        """All pairs of an iteration, `epochs_per_iteration` times, are spread evenly over its steps: none weighs more than another."""
        pairs, steps, epochs = self._chosen.pairs, self.steps_per_iteration, self.config.epochs_per_iteration
        total = len(pairs) * epochs
        if not total:
            return [], {"pairs/in_update": 0.0}
        order, first = EpochSampler(len(pairs), 1, self.task.seed), (iteration - 1) * total  # other epochs than in iterations before
        places = range(first + position * total // steps, first + (position + 1) * total // steps)
        return [pairs[order.indices(place)[0]] for place in places], {"pairs/in_update": float(len(places))}

    def validate(self) -> Mapping[str, float]:
        """As in all online runs, but with the judge's scores as rewards if there is a judge; reports how many judgements do not parse."""
        self.policy.sleep()
        self.task.engine.refit(self.policy.version)
        if self.judge is None:
            return validation.validate(self.task)
        said: list[Judgement] = []
        metrics = validation.validate(self.task, partial(self._rejudged, self.judge, said))
        counts = judgement_metrics(said)
        unparsed = {"validation/judgements_unparsed": counts["judge/unparsed"] / max(1.0, counts["judge/judgements"])}
        return metrics | unparsed if metrics else {}

    def _rejudged(self, judge: Judge, said: list[Judgement], collected: ScoredRollouts) -> ScoredRollouts:
        prompts = [rollout.prompt for rollout in collected.rollouts]
        seeds = sample_seeds(self.task.seed, 0, len(prompts) * judge.num_judgements)  # the same at every validation
        judgements = judge.judge(prompts, [rollout.response for rollout in collected.rollouts], seeds)
        said += judgements
        return judged(collected, judgements)

    def _judge(self, judge: Judge, files: SampleFiles[Judgement], iteration: Iteration, answers: Sequence[Answer]) -> list[Judgement]:
        """Of all responses of the iteration, in their order."""
        size, count = self.group_size, judge.num_judgements
        # A judge's draws are not those of the responses: iterations are counted the other way.
        seeds = sample_seeds(self.task.seed, -iteration.number, len(answers) * count)

        def make(number: int, rows: Sequence[int]) -> list[Judgement]:
            first = number * self.config.sampled_together * size
            last = first + len(rows) * size
            prompts = [self.prompts[row] for row in rows for _ in range(size)]
            responses = [answer.tokens for answer in answers[first:last]]
            return judge.judge(prompts, responses, seeds[first * count : last * count])

        return self.kept(files, iteration, make)

    def _choose(self, iteration: Iteration, answers: Sequence[Answer], given: Sequence[float | None]) -> tuple[dict[str, float], Chosen]:
        config, size = self.config, self.group_size
        scores = torch.tensor([0.0 if score is None else score for score in given], dtype=torch.float32)
        valid = torch.tensor([score is not None for score in given], dtype=torch.bool)
        lengths = torch.tensor([len(answer.tokens) for answer in answers])
        ended = torch.tensor([answer.ended for answer in answers], dtype=torch.bool)
        allowed = valid & ended if config.drop_truncated else valid
        common: dict[str, Any] = {"group_size": size, "min_gap": config.min_gap}
        if config.length_control:
            found = pairs_by_length(scores, allowed, lengths, slack=config.length_control, **common)
        else:
            found = pairs_of(scores, allowed, pairing=Pairing.best_worst, seed=0, **common)
        chosen = self._learnt(iteration, answers, found)
        groups = len(answers) // size
        metrics = {
            "rollout/reward": scores[valid].double().mean().item(),
            "rollout/reward_std": scores[valid].double().std(correction=0).item() if valid.any() else float("nan"),
            "rollout/rewards_invalid": float((~valid).sum()),
            "pairs/count": float(len(chosen.pairs)),
            "pairs/ties": float(chosen.num_ties),
            "pairs/identical": float(chosen.num_identical),
            "pairs/prompts_without_any": 1 - len(chosen.pairs) / groups,
        }
        metrics |= _account(chosen, valid=valid, ended=ended | (not config.drop_truncated))
        if len(found.gaps):
            metrics["pairs/reward_gap"] = found.gaps.double().mean().item()
            metrics["pairs/length_gap"] = (lengths[found.chosen] - lengths[found.rejected]).double().mean().item()
        return metrics, chosen

    def _learnt(self, iteration: Iteration, answers: Sequence[Answer], found: Pairs) -> Chosen:
        rows, pairs = iteration.rows, []
        for better, worse, gap in zip(found.chosen.tolist(), found.rejected.tolist(), found.gaps.tolist(), strict=True):
            one, other = answers[better].tokens, answers[worse].tokens
            if one != other:
                prompt = self.prompts[rows[better // self.group_size]]
                pairs.append(PreferencePair(chosen=answered(prompt, one), rejected=answered(prompt, other), margin=gap))
        return Chosen(pairs=pairs, num_ties=found.num_ties, num_identical=len(found.gaps) - len(pairs))

    def _check_parsed(self, judgements: Sequence[Judgement]) -> None:
        if any(judgement.parsed for judgement in judgements):
            return
        said = next((text for judgement in judgements for text in judgement.texts), None)
        what = "all are too long to be judged" if said is None else f"a judgement ends {said[-EXCERPT_CHARACTERS:]!r}"
        raise RunHalted(
            f"none of {len(judgements)} responses got a score from {self.config.lowest_score} to {self.config.highest_score} by "
            f"algorithm.score_pattern={self.config.score_pattern}: {what}. A model that cannot judge needs examples of it in its SFT data, "
            "a longer algorithm.max_judgement_length, or another algorithm.judge_template"
        )

    def _rows(self, iteration: Iteration, answers: Sequence[Answer], given: Sequence[float | None]) -> list[SampleRow]:
        prompts = [self.prompts[row] for row in iteration.rows for _ in range(self.group_size)]
        return [
            SampleRow(
                prompt=prompt.text or self.task.decode(prompt.tokens),
                response=self.task.decode(answer.tokens),
                reward=float("nan") if score is None else score,
                finish_reason=FinishReason.stop if answer.ended else FinishReason.length,
                images=images_in(prompt.extras),
            )
            for prompt, answer, score in list(zip(prompts, answers, given, strict=True))[:NUM_SHOWN]
        ]


def _account(chosen: Chosen, *, valid: Tensor, ended: Tensor) -> dict[str, float]:
    """What an iteration learns from; responses that are in no pair could be, unless they have no score or no end."""
    learnt, seen, unscored = 2 * len(chosen.pairs), len(valid), int((~valid).sum())
    cut, identical = int((valid & ~ended).sum()), 2 * chosen.num_identical
    others = seen - learnt - unscored - cut - identical
    return accounted(samples=learnt, seen=seen, no_reward=unscored, truncated=cut, identical=identical, not_paired=others)


def _agreement(answers: Sequence[Answer], scores: Sequence[float | None], size: int) -> dict[str, float]:
    """Where there are rewards beside the judge's scores: their mean, and how often both prefer the same of two responses to a prompt."""
    rewards = [answer.reward for answer in answers if answer.reward is not None]
    if not rewards:
        return {}
    agreed: list[bool] = []
    for start in range(0, len(answers), size):
        both = [(a.reward, s) for a, s in zip(answers[start : start + size], scores[start : start + size], strict=True)]
        known = [(reward, score) for reward, score in both if reward is not None and score is not None]
        for position, (reward, score) in enumerate(known):
            order = [(reward - r) * (score - s) for r, s in known[:position]]
            agreed += [product > 0 for product in order if product]
    metrics = {"judge/reward": sum(rewards) / len(rewards)}
    return metrics | ({"judge/agreement": sum(agreed) / len(agreed)} if agreed else {})


COLUMNS = (
    Column("iteration", "self_rewarding/iteration", ".0f"),
    Column("reward", "rollout/reward", ".3f", Goal.highest),
    Column("val reward", "validation/reward", ".3f", Goal.highest),
    Column("loss", "preference/loss", ".4f", Goal.lowest),
    Column("pref accuracy", "preference/accuracy", "percent", Goal.highest),
    Column("margin", "preference/margin", ".3f", Goal.highest),
    Column("pairs", "pairs/count", ".0f"),
    Column("ties", "pairs/ties", ".0f"),
    Column("unparsed", "judge/unparsed", ".0f"),
    Column("length", "rollout/response_length", ".1f"),
)


@dataclass(kw_only=True, slots=True)
class TrainSelfRewarding(OnlineRun):
    """Self-rewarding, and iterative DPO on rewards (conf/self_rewarding/self_rewarding.yaml)."""

    algorithm: SelfRewardingConfig = field(default_factory=SelfRewardingConfig)
    batch_setting = "batch_size"

    def __post_init__(self) -> None:
        OnlineRun.__post_init__(self)
        check_iterated(self)

    @property
    def judges_itself(self) -> bool:
        """Whether the policy is asked about its responses."""
        return self.algorithm.judge is JudgedBy.policy

    def traits(self) -> Traits:
        return self.actor_traits(unit=2, has_reference=True, extra_rows=self.algorithm.judgements_per_step)

    def check_complete(self) -> None:
        """Rewards are required only if they judge."""
        self.check_given_rewards() if self.judges_itself else OnlineRun.check_complete(self)

    def reserved_length(self, tokenizer: Callable[[], Tokenizer]) -> int:
        """Of the judge's question about a response, and of its answer."""
        return longest_question(self, tokenizer()) + self.algorithm.max_judgement_length if self.judges_itself else 0

    def describe_judge(self, load: Callable[[], tuple[Any, Sequence[Prompt], Tokenizer, int]]) -> str:
        if not self.judges_itself:
            return ""
        config, prompts, tokenizer, context = load()
        _, ask = ask_about(config, prompts, (), tokenizer=tokenizer, context=context)
        size = len(ask(prompts[0], ()))
        return f"the policy judges itself, {self.algorithm.num_judgements} times: asked about {prompts[0].source} in {size} tokens"


def build(job: OnlineJob[TrainSelfRewarding]) -> Built:
    """The reference is the policy at the beginning of each iteration."""
    config, settings, context = job.config, job.config.algorithm, job.context
    sets = job.load_prompts(job.tokenizer)
    asking = ask_about(config, *sets, tokenizer=job.tokenizer, context=context) if config.judges_itself else None
    task = job.task(with_reference=True, num_prompts=settings.batch_size, load=lambda _: sets)
    job.ready()
    folder = job.session.directory.path / "self_rewarding"
    algorithm = SelfRewarding(
        settings,
        job.policy,
        task,
        job.moving_reference(task),
        SampleFiles(folder, Answer, stem="responses"),
        judge=None if asking is None else make_judge(settings, asking, job.tokenizer, task.engine, task.judges.heartbeat, context=context),
        judgements=None if asking is None else SampleFiles(folder, Judgement, stem="judgements"),
        rewarded=config.has_scorer,
        settings=scoring_settings(config, asking),
    )
    job.session.say(algorithm.summary())
    return Built(algorithm=algorithm, model=job.policy.model)


RECIPE = Recipe(name="self_rewarding", config=TrainSelfRewarding, build=build, columns=COLUMNS, presets_of=("dpo",))
