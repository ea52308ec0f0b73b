"""The settings that name reward functions."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from aligner.errors import ConfigError


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
        if not (math.isfinite(self.timeout_seconds) and self.timeout_seconds > 0):
            raise ConfigError(f"timeout_seconds={self.timeout_seconds}: must be finite and above 0")
        if self.arguments and not self.path:
            raise ConfigError(f"arguments={dict(self.arguments)}: requires path, the factory that accepts them")


@dataclass(kw_only=True, slots=True)
class NamedRewardConfig(RewardFunctionConfig):
    """One of several rewards: a `path` as above, an HTTP endpoint (`url`), or the served reward model (`served`).

    The endpoint receives a POST of {"prompts": [...], "responses": [...], "answers": [...]} and answers {"rewards": [...]}.
    """

    url: str = ""  # of an HTTP endpoint: http://... or https://...
    token_variable: str = ""  # the environment variable that holds the endpoint's bearer token
    served: bool = False  # this reward is the reward model of reward.model, served by reward.serve
    weight: float = 1.0  # weight in the sum of rewards; 0: only logged
    num_threads: int = 1  # concurrent calls; above 1 the function must be thread-safe

    def __post_init__(self) -> None:
        RewardFunctionConfig.__post_init__(self)
        sources = [text for text in (self.path and f"path={self.path}", self.url and f"url={self.url}") if text]
        sources += ["served=true"] if self.served else []
        if len(sources) != 1:
            raise ConfigError(f"{' and '.join(sources) or 'no source'}: a reward requires exactly one of path, url and served=true")
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"url={self.url}: must begin with http:// or https://")
        if self.token_variable and not self.url:
            raise ConfigError(f"token_variable={self.token_variable}: only applies when url is set")
        if not math.isfinite(self.weight):
            raise ConfigError(f"weight={self.weight}: must be finite")
        if self.num_threads < 1:
            raise ConfigError(f"num_threads={self.num_threads}: must be at least 1")


def check_parts(parts: dict[str, NamedRewardConfig]) -> None:
    """Raise ConfigError for names that metrics cannot have, a sum without weights, or more than one served model."""
    for name in parts:
        if not (name.isidentifier() and name.isascii()):
            raise ConfigError(f"reward.functions.{name}: a name has letters, digits and _ only, and begins with no digit")
    if parts and not any(part.weight for part in parts.values()):
        raise ConfigError(f"reward.functions: {', '.join(parts)} all have weight 0, which leaves no reward")
    if len(served := [name for name, part in parts.items() if part.served]) > 1:
        raise ConfigError(f"reward.functions: {' and '.join(served)} have served=true; only one reward model is served")
