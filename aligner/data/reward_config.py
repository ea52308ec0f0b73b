"""Data settings of reward models that learn from numbers: attributes of responses, and judgements of their steps. Light."""

from __future__ import annotations

from dataclasses import dataclass, field

from aligner.data.config import PreferenceDataConfig
from aligner.errors import ConfigError

STEERLM_ATTRIBUTES = (
    "quality",
    "toxicity",
    "humor",
    "creativity",
    "helpfulness",
    "correctness",
    "coherence",
    "complexity",
    "verbosity",
)


@dataclass(kw_only=True, slots=True)
class RegressionDataConfig(PreferenceDataConfig):
    """Responses with a number for each attribute.

    `{text, label}`, `{prompt, response, label}`, `{messages, label}`, or SteerLM's conversations. Settings as in
    `PreferenceDataConfig`. `attributes` names the numbers of a label in their order, and so the model's outputs.
    """

    attributes: list[str] = field(default_factory=lambda: list(STEERLM_ATTRIBUTES))  # names of a label's numbers, in order

    def __post_init__(self) -> None:
        PreferenceDataConfig.__post_init__(self)
        if not self.attributes or len(set(self.attributes)) < len(self.attributes):
            raise ConfigError(f"data.attributes is {self.attributes}, allowed: at least one name, each once")
        for name in self.attributes:
            if not name.isidentifier():
                raise ConfigError(f"data.attributes has {name!r}, allowed: names of letters, digits and _ that begin with no digit")


@dataclass(kw_only=True, slots=True)
class StepDataConfig(PreferenceDataConfig):
    """Responses in judged steps: `{prompt, steps, labels}` or `{prompt, completions, labels}`. Settings as in `PreferenceDataConfig`."""

    step_separator: str = "\n"  # written behind every step; its last token is where the step is judged

    def __post_init__(self) -> None:
        PreferenceDataConfig.__post_init__(self)
        if not self.step_separator:
            raise ConfigError("data.step_separator is '', allowed: a text that ends a step")
