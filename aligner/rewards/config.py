"""The setting that names a reward function."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from aligner.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class RewardFunctionConfig:
    """`function` is `package.module:name`, `package.module.name` or `path/to/file.py:name`; empty where a reward model is used instead.

    With `arguments`, the name is that of a factory, called with them once, which returns the reward function
    (`aligner.rewards.builtin:fixed_string` with `{target: hello}`).
    """

    function: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    timeout_seconds: float = 30.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.timeout_seconds) and self.timeout_seconds > 0):
            raise ConfigError(f"timeout_seconds is {self.timeout_seconds}, expected a finite number > 0")
        if self.arguments and not self.function:
            raise ConfigError(f"arguments is {dict(self.arguments)} but function is empty; name the factory that takes them")
