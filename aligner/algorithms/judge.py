"""The policy as a judge of responses (LLM-as-a-judge): it is asked for a score in words, several times, and the mean is the score.

A judgement is sampled like any other response. Its score is the last number that the pattern finds; one that names no score, or one out of
range, does not parse: it is counted and left out of the mean. A response with no score at all is invalid, which is not the lowest score.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from aligner.data.encoding import PromptStyle, encode_prompt
from aligner.data.prompts import read_questions
from aligner.data.tokenizer import Tokenizer
from aligner.errors import ConfigError
from aligner.online.collect import ScoredRollouts, Scorers, collect
from aligner.protocols import RolloutEngine
from aligner.rewards.local import NoReward
from aligner.types import Prompt, SamplingConfig

PROMPT, RESPONSE = "{prompt}", "{response}"
_PLACEHOLDER = re.compile(r"\{[A-Za-z_]\w*\}")
# Figure 2 of Yuan et al. 2024 (2401.10020), additive from 0 to 5.
TEMPLATE = """\
Review the user's question and the corresponding response using the additive 5-point scoring system described below. Points are \
accumulated based on the satisfaction of each criterion:

- Add 1 point if the response is relevant and provides some information related to the user's inquiry, even if it is incomplete or \
contains some irrelevant content.
- Add another point if the response addresses a substantial portion of the user's question, but does not completely resolve the query \
or provide a direct answer.
- Award a third point if the response answers the basic elements of the user's question in a useful way, regardless of whether it seems \
to have been written by an AI Assistant or if it has elements typically found in blogs or search results.
- Grant a fourth point if the response is clearly written from an AI Assistant's perspective, addressing the user's question directly \
and comprehensively, and is well-organized and helpful, even if there is slight room for improvement in clarity, conciseness or focus.
- Bestow a fifth point for a response that is impeccably tailored to the user's question by an AI Assistant, without extraneous \
information, reflecting expert knowledge, and demonstrating a high-quality, engaging, and insightful answer.

User: {prompt}

<response>{response}</response>

After examining the user's instruction and the response:

- Briefly justify your total score, up to 100 words.
- Conclude with the score using the format: "Score: <total points>"

Remember to assess from the AI Assistant perspective, utilizing web search knowledge as necessary. To evaluate the response in alignment \
with this additive scoring model, we'll systematically attribute points based on the outlined criteria.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rubric:
    """The judge's question, and how its answer is parsed. Scores are from `lowest` to `highest`."""

    template: str
    pattern: re.Pattern[str]
    lowest: float
    highest: float

    def ask(self, question: str, response: str) -> str:
        """The judge's prompt. Placeholders in the two texts are not replaced."""
        texts = {PROMPT: question, RESPONSE: response}
        return _PLACEHOLDER.sub(lambda found: texts[found[0]], self.template)

    def score(self, judgement: str) -> float | None:
        """The last score in the text, because judges are asked to conclude with it; None if none is in range."""
        found = self.pattern.findall(judgement)
        try:
            score = float(found[-1]) if found else None
        except ValueError:
            return None
        return score if score is not None and self.lowest <= score <= self.highest else None


def score_pattern(pattern: str) -> re.Pattern[str]:
    """The pattern, compiled. Raises ConfigError if it is none, or has not exactly one group: the score."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"algorithm.score_pattern={pattern}: not a regular expression ({error})") from error
    if compiled.groups != 1:
        raise ConfigError(f"algorithm.score_pattern={pattern}: has {compiled.groups} groups; needs one, around the number")
    return compiled


def read_template(path: str) -> str:
    """The judge's template of this file, checked; the built-in one for ''. Raises ConfigError."""
    if not path:
        return TEMPLATE
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"algorithm.judge_template={path}: cannot be read ({error})") from error
    found = _PLACEHOLDER.findall(text)
    if missing := [name for name in (PROMPT, RESPONSE) if name not in found]:
        raise ConfigError(f"algorithm.judge_template={path}: has no {missing[0]}, which stands for what is judged")
    if unknown := [name for name in found if name not in (PROMPT, RESPONSE)]:
        line = text[: text.index(unknown[0])].count("\n") + 1
        raise ConfigError(f"algorithm.judge_template={path}: line {line} has {unknown[0]}; allowed: {PROMPT}, {RESPONSE}")
    return text


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """All judgements of one response: `texts` (none if it was too long), and for each the score, None if it does not parse."""

    scores: tuple[float | None, ...]
    texts: tuple[str, ...]

    @property
    def score(self) -> float | None:
        """The mean of the scores; None without any."""
        found = self.parsed
        return sum(found) / len(found) if found else None

    @property
    def parsed(self) -> list[float]:
        """The existing scores."""
        return [score for score in self.scores if score is not None]


Ask = Callable[[Prompt, Sequence[int]], Sequence[int]]  # a prompt and the response to it -> ids of the judge's prompt
Asking = tuple[Rubric, Ask]


@dataclass(slots=True)
class Judge:
    """Asks the engine with its current weights. Every rank constructs one; `judge` is collective.

    Prompts of more than `longest` tokens are not judged. `read`: ids to text.
    """

    rubric: Rubric
    engine: RolloutEngine
    ask: Ask
    read: Callable[[Sequence[int]], str]
    sampling: SamplingConfig
    num_judgements: int
    longest: int
    heartbeat: Callable[[], None] = lambda: None

    def judge(self, prompts: Sequence[Prompt], responses: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[Judgement]:
        """Of each response to the prompt in its place; `seeds`: `num_judgements` for each, side by side."""
        count = self.num_judgements
        asked: list[Prompt] = []
        for number, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            tokens = tuple(self.ask(prompt, response))
            if len(tokens) <= self.longest:
                asked.append(Prompt(id=number, tokens=tokens, source=prompt.source))
        found = [Judgement(scores=(), texts=())] * len(prompts)
        if not asked:
            return found
        own = [seed for prompt in asked for seed in seeds[prompt.id * count : (prompt.id + 1) * count]]
        repeated = [prompt for prompt in asked for _ in range(count)]
        scorers = Scorers(reward=NoReward(), heartbeat=self.heartbeat)
        rollouts = collect(self.engine, repeated, own, scorers=scorers, sampling=self.sampling).rollouts
        for start in range(0, len(rollouts), count):
            texts = tuple(self.read(rollout.response) for rollout in rollouts[start : start + count])
            scores = tuple(self.rubric.score(text) for text in texts)
            found[rollouts[start].prompt.id] = Judgement(scores=scores, texts=texts)
        return found


def judged(collected: ScoredRollouts, judgements: Sequence[Judgement]) -> ScoredRollouts:
    """The rollouts with the judge's scores for rewards; those without any are not valid."""
    scores = [judgement.score for judgement in judgements]
    valid = torch.tensor([score is not None for score in scores], dtype=torch.bool)
    rewards = torch.tensor([0.0 if score is None else score for score in scores], dtype=torch.float32)
    return replace(collected, rewards=rewards, valid=valid, failed=~valid, parts={})


def judgement_metrics(judgements: Sequence[Judgement]) -> dict[str, float]:
    """How many there are, how many do not parse, how many responses have no score, and how many of these are too long to be judged.

    `judge/disagreement` is the standard deviation of the scores of one response, the mean over those with more than one.
    """
    parsed = [judgement.parsed for judgement in judgements]
    spreads = [torch.tensor(scores, dtype=torch.float64).std(correction=0).item() for scores in parsed if len(scores) > 1]
    metrics = {
        "judge/judgements": float(sum(len(judgement.texts) for judgement in judgements)),
        "judge/unparsed": float(sum(score is None for judgement in judgements for score in judgement.scores)),
        "judge/invalid": float(sum(not scores for scores in parsed)),
        "judge/too_long": float(sum(not judgement.texts for judgement in judgements)),
    }
    return metrics | ({"judge/disagreement": sum(spreads) / len(spreads)} if spreads else {})


def rubric_of(settings: Any) -> Rubric:
    """The rubric of the config. Raises ConfigError for a template that cannot be used."""
    return Rubric(
        template=read_template(settings.judge_template),
        pattern=score_pattern(settings.score_pattern),
        lowest=settings.lowest_score,
        highest=settings.highest_score,
    )


def longest_question(config: Any, tokenizer: Tokenizer) -> int:
    """Tokens of the judge's question without prompt and response, in the framing that takes most."""
    question = rubric_of(config.algorithm).ask("", "")
    styles = [PromptStyle(apply_chat_template=chat, add_bos=config.data.add_bos) for chat in {False, tokenizer.has_chat_template}]
    return max(len(encode_prompt(tokenizer, question, style)) for style in styles)


def ask_about(config: Any, train: Sequence[Prompt], validation: Sequence[Prompt], *, tokenizer: Tokenizer, context: int) -> Asking:
    """How the judge is asked about responses to these prompts: as the policy is, through the chat template if they are.

    Raises ConfigError for a template that cannot be used, or that leaves no room for the longest response and a judgement of it.
    """
    questions = read_questions(config.data.train, config.data, train)
    if validation:
        questions |= read_questions(config.data.validation, config.data, validation)
    rubric = rubric_of(config.algorithm)
    style = PromptStyle(apply_chat_template=questions.are_chats, add_bos=config.data.add_bos)

    def ask(prompt: Prompt, response: Sequence[int]) -> list[int]:
        return encode_prompt(tokenizer, rubric.ask(questions.texts[prompt.source], tokenizer.decode(response)), style)

    check_room(config, len(encode_prompt(tokenizer, rubric.ask("", ""), style)), context)
    return rubric, ask


def check_room(config: Any, template: int, context: int) -> None:
    """Raise ConfigError if a judge's prompt (with a template of so many tokens) and its judgement may not fit the model's context."""
    sizes = {
        "the judge's template": template,
        "data.max_prompt_length": config.data.max_prompt_length,
        "rollout.sampling.max_response_length": config.rollout.sampling.max_response_length,
        "algorithm.max_judgement_length": config.algorithm.max_judgement_length,
    }
    if (longest := sum(sizes.values())) > context:
        parts = " + ".join(f"{name} ({size})" for name, size in sizes.items())
        raise ConfigError(f"{parts} = {longest}: longer than the model's context of {context} tokens")


def make_judge(
    settings: Any, asking: Asking, tokenizer: Tokenizer, engine: RolloutEngine, heartbeat: Callable[[], None], *, context: int
) -> Judge:
    """The policy as the judge. Text may encode to more tokens than it was sampled with; responses that get too long are not judged."""
    rubric, ask = asking
    return Judge(
        rubric,
        engine,
        ask=ask,
        read=tokenizer.decode,
        sampling=settings.judge_sampling(),
        num_judgements=settings.num_judgements,
        longest=context - settings.max_judgement_length,
        heartbeat=heartbeat,
    )


def scoring_settings(config: Any, asking: Asking | None) -> str:
    """Everything that determines samples and scores, besides weights, prompts and seeds."""
    settings, reward, judged = config.algorithm, config.reward, None
    if asking is not None:
        rubric, _ = asking
        scale = (rubric.template, rubric.pattern.pattern, rubric.lowest, rubric.highest)
        judged = (scale, settings.num_judgements, settings.judge_sampling())
    return repr((config.rollout.sampling, judged, reward.function, reward.functions, reward.model.path, reward.attribute_weights))
