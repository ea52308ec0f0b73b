"""The kinds of rotary scaling in a Hugging Face config: its `rope_scaling` or `rope_parameters` <-> fields of an `Architecture`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from aligner.errors import ConfigError
from aligner.models.architecture.rope import longrope_attention_factor, yarn_attention_factor
from aligner.models.config import ROPE_FACTORS, Architecture


class File(Protocol):
    """The config that the scaling is part of."""

    def size(self, key: str) -> int:
        """A whole number >= 1."""

    def refusal(self, key: str, value: Any, allowed: str) -> ConfigError:
        """The error for a value that is not computed here."""

    def checked(self, key: str, value: Any) -> float:
        """`value` of `key` as a finite number >= 0."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """The object of one kind, called `source` in the file."""

    file: File
    source: str
    kind: str
    values: dict[str, Any]

    def number(self, key: str, absent: float | None = None) -> float:
        """A finite number > 0; `absent` (None: there must be one) where the file leaves it out or says null."""
        value = self.values.get(key)
        value = absent if value is None else value
        found = self.file.checked(f"{self.source}.{key}", value)
        if not found:
            raise self.file.refusal(f"{self.source}.{key}", value, f'a number > 0 where rope_type is "{self.kind}"')
        return found

    def factor(self) -> float:
        """What the context is stretched by."""
        found = self.number("factor")
        if found < 1:
            raise self.file.refusal(f"{self.source}.factor", found, f'at least 1 where rope_type is "{self.kind}"')
        return found

    def numbers(self, key: str) -> list[float]:
        """A list of finite numbers > 0, not empty."""
        found = self.values.get(key)
        if not isinstance(found, list) or not found or not all(self.file.checked(f"{self.source}.{key}", value) for value in found):
            raise self.file.refusal(f"{self.source}.{key}", found, f'a list of numbers > 0 where rope_type is "{self.kind}"')
        return [float(value) for value in found]

    def original_length(self) -> int:
        """The context length before it was stretched."""
        key = "original_max_position_embeddings"
        found = self.number(key)
        if found != int(found):
            raise self.file.refusal(f"{self.source}.{key}", found, "a whole number")
        return int(found)


def _llama3(scaling: Scaling) -> dict[str, Any]:
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if low > high:
        raise scaling.file.refusal(f"{scaling.source}.low_freq_factor", low, f"at most high_freq_factor={high}")
    return {
        "rope_llama3_factor": scaling.factor(),
        "rope_original_length": scaling.original_length(),
        "rope_low_freq_factor": low,
        "rope_high_freq_factor": high,
    }


def _yarn(scaling: Scaling) -> dict[str, Any]:
    factor, values = scaling.factor(), scaling.values
    truncate = values.get("truncate", True)
    if not isinstance(truncate, bool):
        raise scaling.file.refusal(f"{scaling.source}.truncate", truncate, "true or false")
    attention = yarn_attention_factor(factor)
    if values.get("mscale") and values.get("mscale_all_dim"):
        scales = (scaling.number(key) for key in ("mscale", "mscale_all_dim"))
        numerator, denominator = (yarn_attention_factor(factor, scale) for scale in scales)
        attention = numerator / denominator
    return {
        "rope_yarn_factor": factor,
        "rope_original_length": scaling.original_length(),
        "rope_beta_fast": scaling.number("beta_fast", 32.0),
        "rope_beta_slow": scaling.number("beta_slow", 1.0),
        "rope_truncate": truncate,
        "rope_attention_factor": scaling.number("attention_factor", attention),
    }


def _longrope(scaling: Scaling) -> dict[str, Any]:
    length = scaling.original_length()
    attention = longrope_attention_factor(scaling.number("factor", scaling.file.size("max_position_embeddings") / length), length)
    return {
        "rope_short_factors": scaling.numbers("short_factor"),
        "rope_long_factors": scaling.numbers("long_factor"),
        "rope_original_length": length,
        "rope_attention_factor": scaling.number("attention_factor", attention),
    }


LONGROPE = {"longrope": _longrope, "su": _longrope}  # its first name
ROPE_KINDS: Mapping[str, Callable[[Scaling], dict[str, Any]]] = {
    "llama3": _llama3,
    "linear": lambda scaling: {"rope_linear_factor": scaling.factor()},
    "yarn": _yarn,
    "dynamic": lambda scaling: {"rope_dynamic_factor": scaling.factor()},
}
UNFACTORED = tuple(kind for kind in ROPE_KINDS if kind != "yarn")  # those without a factor on cosines and sines


def to_hf(a: Architecture) -> dict[str, Any]:
    """The rotary keys of a Hugging Face config, in the old and the new place, so that transformers 4 and 5 both read them."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": a.rope_theta}
    factor = next((name for name in ROPE_FACTORS if getattr(a, name)), "")
    if factor:
        rope |= {"rope_type": factor.split("_")[1], "factor": getattr(a, factor)}
    if a.rope_llama3_factor:
        rope |= {"low_freq_factor": a.rope_low_freq_factor, "high_freq_factor": a.rope_high_freq_factor}
    if a.rope_yarn_factor:
        rope |= {"beta_fast": a.rope_beta_fast, "beta_slow": a.rope_beta_slow, "truncate": a.rope_truncate}
        if a.rope_score_scale:
            rope["mscale_all_dim"] = a.rope_score_scale
            rope |= {"mscale": a.rope_score_scale} if a.rope_attention_factor == 1 else {"attention_factor": a.rope_attention_factor}
        elif a.rope_attention_factor != yarn_attention_factor(a.rope_yarn_factor):  # else left out: some readers multiply it in once more
            rope["attention_factor"] = a.rope_attention_factor
    if a.rope_llama3_factor or a.rope_yarn_factor:
        rope["original_max_position_embeddings"] = a.rope_original_length
    scaling: dict[str, Any] | None = rope if factor else None
    if a.rope_long_factors:
        factors = {"short_factor": a.rope_short_factors, "long_factor": a.rope_long_factors}
        if a.rope_attention_factor != longrope_attention_factor(a.max_position_embeddings / a.rope_original_length, a.rope_original_length):
            factors |= {"attention_factor": a.rope_attention_factor}
        rope |= {"rope_type": "longrope", "original_max_position_embeddings": a.rope_original_length} | factors
        scaling = {"type": "longrope"} | factors  # transformers 4 allows Phi-3 no other keys
    fraction: dict[str, float] = {}
    if a.rotary_fraction != 1:
        rope["partial_rotary_factor"] = a.rotary_fraction
        fraction = {"partial_rotary_factor": a.rotary_fraction}
    return fraction | {"rope_parameters": rope, "rope_theta": a.rope_theta, "rope_scaling": scaling}
