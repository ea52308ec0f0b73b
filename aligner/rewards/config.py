"""The settings that name reward functions."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from aligner.errors import AT_LEAST_1, POSITIVE, ConfigError, check_numbers, check_range


class OnError(str, Enum):
    """How to treat a failure of a reward function."""

    stop = "stop"  # the run ends, naming the sample
    invalid = "invalid"  # the sample gets no reward, is left out and counted: the one that fails alone, or all of a call that hangs


@dataclass(kw_only=True, slots=True)
class RewardFunctionConfig:
    """`path` is `package.module:name`, `package.module.name` or `path/to/file.py:name`; empty: no function.

    With `arguments`, it is a factory: called with them once, it returns the reward function
    (`aligner.rewards.builtin:fixed_string` with `{target: hello}`).
    """

    path: str = ""  # package.module:name or path/to/file.py:name of a reward function; empty: none
    arguments: dict[str, Any] = field(default_factory=dict)  # keyword arguments: `path` is then a factory, called with them once
    timeout_seconds: float = 30.0  # limit of one call of the reward function
    on_error: OnError = OnError.stop  # after a failure: stop: the run ends; invalid: the sample gets no reward and is counted

    def __post_init__(self) -> None:
        check_range(self, "", POSITIVE, "timeout_seconds")
        if self.arguments and not self.path:
            raise ConfigError(f"arguments={dict(self.arguments)}: requires path, the factory that accepts them")


class Compare(str, Enum):
    """What a judge compares a response with."""

    nothing = "nothing"  # it scores one response at a time
    answer = "answer"  # the reference answer: 1 if the response is better, 0 if it is worse, 0.5 for a tie
    group = "group"  # the other responses to the same prompt: the part of them that it beats, a tie being half


@dataclass(kw_only=True, slots=True)
class RubricItem:
    """One question of a rubric: yes or no, or points from 0 to `highest`."""

    text: str = ""  # the question, as the judge reads it
    weight: float = 1.0  # in the mean over all items
    highest: int = 1  # the most points; 1: yes or no

    def check(self, key: str) -> None:
        """Raise ConfigError, naming the settings of the item at `key`."""
        if not self.text.strip():
            raise ConfigError(f"{key}.text={self.text!r}: say what the judge is asked")
        check_range(self, key, POSITIVE, "weight")
        check_numbers(self, key, at_least_1=("highest",))


@dataclass(kw_only=True, slots=True)
class RewardJudgeConfig:
    """A model that judges, asked at `url` through OpenAI's API (docs/rewards.md).

    Its answer has to end with `Score: N`, or with `Better: A`, `B` or `tie` if it compares; with a `rubric`, with a JSON object of a value
    for each item; with a `pattern`, its last match counts. Other answers are unparsable: the response has no reward from them.
    """

    model: str = ""  # its name at the endpoint; empty: the endpoint is no judge
    token_file: str = ""  # a file with the bearer token, instead of token_variable
    compare: Compare = Compare.nothing  # score one response, or compare it with the reference answer or with the group's other responses
    swap: bool = True  # ask about every pair in both orders; the mean counts
    opponents: int = 0  # with compare=group: responses that each is compared with first, the next ones of the group; 0: all
    rubric: dict[str, RubricItem] = field(default_factory=dict)  # by name: the reward is the weighted mean of points / highest, 0 to 1
    lowest: float = 0.0  # of a score; one below is unparsable
    highest: float = 10.0  # of a score; one above is unparsable
    pattern: str = ""  # regular expression with one group, the score (or A, B, tie); empty: the last line of the answer
    template: str = ""  # file with a jinja template of the question; empty: the built-in one
    system: str = ""  # the system message; empty: none
    samples: int = 1  # judgements of each response or pair: their mean counts
    temperature: float = 0.0  # of its answers; 0: greedy
    max_tokens: int = 1024  # of an answer
    body: dict[str, Any] = field(default_factory=dict)  # further fields of every request, such as reasoning_effort
    requests_per_minute: float = 0.0  # of this process; 0: no limit
    concurrency: int = 16  # requests at the same time
    retries: int = 6  # of a request that is refused for now, fails or takes longer than timeout_seconds
    longest_wait_seconds: float = 120.0  # before a retry: of the growing pauses, and what the endpoint may ask for in Retry-After
    cache: bool = True  # keep answers in the run's directory: the same question is asked once, also after a resume
    prompt_price: float = 0.0  # of a million tokens of questions, in any currency; 0: cost is not reported
    completion_price: float = 0.0  # of a million tokens of answers

    def __post_init__(self) -> None:
        check_numbers(self, "judge", at_least_1=("samples", "max_tokens", "concurrency"), above_0=("longest_wait_seconds",))
        numbers = ("opponents", "temperature", "requests_per_minute", "retries", "prompt_price", "completion_price")
        check_numbers(self, "judge", not_negative=numbers)
        if not self.lowest < self.highest:
            raise ConfigError(f"judge.lowest={self.lowest}, judge.highest={self.highest}: the first must be less")
        if self.samples > 1 and not self.temperature:
            raise ConfigError(f"judge.samples={self.samples}: all would be the same at judge.temperature=0; allowed: a temperature above 0")
        for name, item in self.rubric.items():
            if not (name.isidentifier() and name.isascii()):
                raise ConfigError(f"judge.rubric.{name}: a name has letters, digits and _ only, and begins with no digit")
            item.check(f"judge.rubric.{name}")
        if self.rubric and (self.compare is not Compare.nothing or self.pattern):
            other = "judge.pattern" if self.pattern else f"judge.compare={self.compare.value}"
            raise ConfigError(f"judge.rubric and {other}: a rubric's answer is a JSON object of scores; give one of the two")
        if self.opponents and self.compare is not Compare.group:
            raise ConfigError(f"judge.opponents={self.opponents}: only applies with judge.compare=group")
        self._check_pattern()

    def _check_pattern(self) -> None:
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise ConfigError(f"judge.pattern={self.pattern}: not a regular expression ({error})") from error
        if self.pattern and groups != 1:
            raise ConfigError(f"judge.pattern={self.pattern}: has {groups} groups; needs one, around what is read")


@dataclass(kw_only=True, slots=True)
class NamedRewardConfig(RewardFunctionConfig):
    """One of several rewards: a `path` as above, an HTTP endpoint (`url`), a `judge` at one, or the served reward model (`served`).

    The endpoint receives a POST of {"prompts": [...], "responses": [...], "answers": [...]} and answers {"rewards": [...]}; with
    `judge.model`, `url` is an API like OpenAI's (https://host/v1), and timeout_seconds is for each of its answers.
    """

    url: str = ""  # of an HTTP endpoint: http://... or https://...
    token_variable: str = ""  # the environment variable that holds the endpoint's bearer token
    judge: RewardJudgeConfig = field(default_factory=RewardJudgeConfig)  # a model at `url` that judges, in words
    served: bool = False  # this reward is the reward model of reward.model, served by reward.serve
    weight: float = 1.0  # weight in the sum of rewards; 0: only logged
    num_threads: int = 1  # concurrent calls; above 1 the function must be thread-safe

    def __post_init__(self) -> None:
        RewardFunctionConfig.__post_init__(self)
        if self.judge.model and not self.url:
            raise ConfigError(f"judge.model={self.judge.model}: needs url, where the judge is asked")
        sources = [text for text in (self.path and f"path={self.path}", self.url and f"url={self.url}") if text]
        sources += ["served=true"] if self.served else []
        if len(sources) != 1:
            raise ConfigError(f"{' and '.join(sources) or 'no source'}: a reward requires exactly one of path, url and served=true")
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"url={self.url}: must begin with http:// or https://")
        if self.token_variable and not self.url:
            raise ConfigError(f"token_variable={self.token_variable}: only applies when url is set")
        if not self.judge.model and self.judge != RewardJudgeConfig():
            raise ConfigError("judge.model='': name the model that judges, as its endpoint knows it")
        if self.judge.token_file and self.token_variable:
            raise ConfigError(f"judge.token_file={self.judge.token_file} and token_variable={self.token_variable}: give one of the two")
        if not math.isfinite(self.weight):
            raise ConfigError(f"weight={self.weight}: must be finite")
        check_range(self, "", AT_LEAST_1, "num_threads")


def check_parts(parts: dict[str, NamedRewardConfig]) -> None:
    """Raise ConfigError for names that metrics cannot have, a sum without weights, or more than one served model."""
    for name in parts:
        if not (name.isidentifier() and name.isascii()):
            raise ConfigError(f"reward.functions.{name}: a name has letters, digits and _ only, and begins with no digit")
    if parts and not any(part.weight for part in parts.values()):
        raise ConfigError(f"reward.functions: {', '.join(parts)} all have weight 0, which leaves no reward")
    used = {f"{name}_{more}": name for name, part in parts.items() if part.judge.model for more in (*part.judge.rubric, "tokens", "cost")}
    if taken := used.keys() & parts.keys():
        raise ConfigError(f"reward.functions.{(name := min(taken))}: is a metric of the judge {used[name]}; allowed: another name")
    if len(served := [name for name, part in parts.items() if part.served]) > 1:
        raise ConfigError(f"reward.functions: {' and '.join(served)} have served=true; only one reward model is served")


def formula(configs: dict[str, NamedRewardConfig]) -> str:
    """The sum in readable form, for messages: `maths + 0.1 length`."""
    return " + ".join(name if config.weight == 1 else f"{config.weight:g} {name}" for name, config in configs.items())
