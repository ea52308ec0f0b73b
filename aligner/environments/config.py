"""The settings of a run's environment."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from aligner.errors import ConfigError


class OnEnvironmentError(str, Enum):
    """Reaction to an environment that raises, hangs or does not return an observation."""

    stop = "stop"  # the run ends, naming the episode
    invalid = "invalid"  # the episode ends without a reward: it is counted and not trained on


class ObservationForm(str, Enum):
    """What surrounds the text of an observation."""

    auto = "auto"  # chat where the prompts end as the tokenizer's chat template ends a user's message, else plain
    chat = "chat"  # what the chat template puts between the turns, with the observation as a message of `role`
    plain = "plain"  # `prefix` and `suffix`


@dataclass(kw_only=True, slots=True)
class EnvironmentConfig:
    """`path` is `package.module:Class`, `package.module.Class` or `path/to/file.py:Class` (or a function that returns an environment),
    called once in each process with `arguments`; empty: responses of one turn, without an environment.
    """

    path: str = ""  # package.module:Class or path/to/file.py:Class of an environment; empty: none, a response is one turn
    arguments: dict[str, Any] = field(default_factory=dict)  # keyword arguments with which `path` is called, once in each process
    max_turns: int = 8  # turns of the policy in an episode; an episode that is not done by then counts as truncated
    timeout_seconds: float = 30.0  # limit of one step, including the reset before the first
    on_error: OnEnvironmentError = (
        OnEnvironmentError.stop
    )  # after a failure: stop: the run ends; invalid: the episode gets no reward and is counted
    num_workers: int = 32  # concurrent steps in each sampling process
    form: ObservationForm = ObservationForm.auto  # put around an observation: turns of the chat template, or prefix and suffix
    role: str = "user"  # role of observations in a chat: user, or tool if the template supports it
    prefix: str = ""  # form=plain: before the text of an observation; special tokens may be spelled out
    suffix: str = ""  # form=plain: after the text of an observation

    def __post_init__(self) -> None:
        for name in ("max_turns", "num_workers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"environment.{name}={getattr(self, name)}: must be at least 1")
        if not (math.isfinite(self.timeout_seconds) and self.timeout_seconds > 0):
            raise ConfigError(f"environment.timeout_seconds={self.timeout_seconds}: must be finite and above 0")
        if self.arguments and not self.path:
            raise ConfigError(f"environment.arguments={dict(self.arguments)}: environment.path='' accepts none; name the environment")
        if self.form is not ObservationForm.plain and (self.prefix or self.suffix):
            raise ConfigError(
                f"environment.form={self.form.value}: prefix and suffix are used with form=plain only; allowed: plain, or neither"
            )
        if self.role not in ("user", "tool"):
            raise ConfigError(f"environment.role={self.role!r}: must be user or tool")
