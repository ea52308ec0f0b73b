"""Reads a Hugging Face `config.json` as transformers does; refuses settings that change the numbers and are not computed here."""

from __future__ import annotations

import json
import sys
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from aligner.errors import ConfigError
from aligner.models.architecture.architecture import MOST_LAYERS
from aligner.models.architecture.rope import longrope_attention_factor, yarn_attention_factor
from aligner.models.checkpoint.hf_files import unread_packing
from aligner.models.config import ROPE_FACTORS, Architecture

T = TypeVar("T")

# Of every family: the values that leave the model unchanged, the default first. The last ones belong to other families
# (Gemma, Granite, Cohere): who writes them into a file of these means a model that is computed differently.
UNCHANGED: Mapping[str, tuple[Any, ...]] = {
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "per_layer_config": (None, {}),
    "pruned_heads": (None, {}),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "attention_multiplier": (None,),
    "query_pre_attn_scalar": (None,),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"), (None, 1)),
}
LAYERS = ("num_hidden_layers", "n_layer")
WINDOWED, FULL = "sliding_attention", "full_attention"  # of `layer_types`
_CLASSES = ("ForCausalLM", "LMHeadModel", "Model", "ForSequenceClassification", "ForTokenClassification")


@dataclass(frozen=True, slots=True)
class Scaling:
    """The object of one kind, called `source` in the file."""

    file: HFConfig
    source: str
    kind: str
    values: dict[str, Any]

    def number(self, key: str, absent: float | None = None) -> float:
        """A finite number > 0; `absent` (None: the key is required) if it is missing or null."""
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


def rope_to_hf(a: Architecture, *, always_fraction: bool = False) -> dict[str, Any]:
    """The rotary keys of a Hugging Face config, in the old and the new place, so that transformers 4 and 5 both read them;
    `always_fraction`: with the rotated part of heads even if they are rotated whole, where that is not the default."""
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
    fraction = {} if a.rotary_fraction == 1 and not always_fraction else {"partial_rotary_factor": a.rotary_fraction}
    rope |= fraction
    return fraction | {"rope_parameters": rope, "rope_theta": a.rope_theta, "rope_scaling": scaling}


class HFConfig:
    """The keys of one file. Every method raises ConfigError naming key, value and what is allowed; the caller puts the file before it."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self.model_type = values.get("model_type")

    def refusal(self, key: str, value: Any, allowed: str) -> ConfigError:
        """The error for a value that is not computed here."""
        return ConfigError(f"{key}={json.dumps(value)} is not supported for model_type {self.model_type}; allowed: {allowed}")

    def own_code(self) -> str:
        """A remark on code that the model ships; empty if it ships none."""
        code = self._values.get("auto_map")
        return f" (its auto_map names code of its own, {json.dumps(code)}, which is never run here)" if code else ""

    def check_classes(self) -> None:
        """The classes in `architectures`, where there are any, have to be the family's own language models and classifiers."""
        found = self._values.get("architectures")
        prefix = str(self.model_type).removesuffix("_text").replace("_", "")
        allowed = [(prefix + suffix).lower() for suffix in _CLASSES]
        if found is not None and not (isinstance(found, list) and all(str(name).lower().replace("_", "") in allowed for name in found)):
            raise self.refusal("architectures", found, f"{prefix.capitalize()}... with {', '.join(_CLASSES)}{self.own_code()}")

    def check_quantization(self) -> None:
        """Refuse weights in few bits of kinds that are not read."""
        if (unread := unread_packing(self._values.get("quantization_config"))) is not None:
            raise self.refusal(*unread)

    def only(self, unchanged: Mapping[str, tuple[Any, ...]]) -> None:
        """Refuse any other value of these keys; a key that is absent has its first one."""
        for key, allowed in unchanged.items():
            value = self._values.get(key, allowed[0])
            if value not in allowed:
                raise self.refusal(key, value, " or ".join(json.dumps(one) for one in allowed))

    def size(self, *keys: str, absent: int | None = None, null: int | None = None) -> int:
        """A whole number >= 1, called by one of `keys`; `absent` and `null` are used if it is missing or null."""
        given = {key: self._values[key] for key in keys if key in self._values}
        if len({json.dumps(value) for value in given.values()}) > 1:
            texts = [f"{key}={json.dumps(value)}" for key, value in given.items()]
            raise ConfigError(f"{' and '.join(texts)} are two values of one size for model_type {self.model_type}; allowed: one")
        if not given:
            if absent is None:
                raise ConfigError(f"{keys[0]} is missing, which every file of model_type {self.model_type} has")
            return absent
        key, value = next(iter(given.items()))
        if value is None and null is not None:
            return null
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refusal(key, value, "a whole number >= 1")
        if value > (most := MOST_LAYERS if key in LAYERS else 10**30):
            raise self.refusal(key, value, f"at most {most}")
        return value

    def value(self, key: str) -> Any:
        """As the file has it; None where it is absent."""
        return self._values.get(key)

    def optional_size(self, key: str, *, absent: int | None) -> int | None:
        """A whole number >= 1, or None for null."""
        value = self._values.get(key, absent)
        return None if value is None else self.size(key, absent=value)

    def number(self, key: str, absent: float) -> float:
        """A finite number >= 0."""
        return self.checked(key, self._values.get(key, absent))

    def optional_number(self, key: str, absent: float) -> float:
        """A finite number > 0, or 0 for null."""
        value = self._values.get(key, absent)
        if value is not None and value is not absent and self.checked(key, value) == 0:
            raise self.refusal(key, value, "a number > 0 or null")
        return 0.0 if value is None else float(value)

    def part(self, **replaced: Any) -> HFConfig:
        """The same file with other values of these keys."""
        return HFConfig(ChainMap(replaced, self._values))

    def flag(self, key: str, absent: bool) -> bool:
        """true or false."""
        value = self._values.get(key, absent)
        if not isinstance(value, bool):
            raise self.refusal(key, value, "true or false")
        return value

    def choice(self, key: str, options: Mapping[str, T], absent: str) -> T:
        """What the value stands for."""
        value = self._values.get(key, absent)
        if not isinstance(value, str) or value not in options:
            raise self.refusal(key, value, " or ".join(json.dumps(option) for option in options))
        return options[value]

    def rope(
        self,
        *,
        theta: float = 10000.0,
        fraction: float = 1.0,
        names: tuple[str, str] = ("rope_theta", "partial_rotary_factor"),
        kinds: Collection[str] | None = None,
    ) -> dict[str, Any]:
        """The fields of an `Architecture` that are about the rotary embedding.

        `names`: what the base and the rotated part are called at the top level. `kinds`: of scaling, which the family knows; None: all.

        Version 4 of transformers writes `rope_theta` and `rope_scaling`, version 5 `rope_parameters`. If a file has both, `rope_scaling`
        counts and `rope_parameters` is ignored. Values that it lacks are read from the top level, else are `theta` and `fraction`.
        """
        base_name, part_name = names
        source = "rope_scaling" if self._values.get("rope_scaling") else "rope_parameters"
        rope = self._values.get(source) or {}
        if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
            raise self.refusal(source, rope, "one object for all layers")
        named = f"{source}.rope_theta" if "rope_theta" in rope else base_name
        base = self.checked(named, rope.get("rope_theta", self._values.get(base_name, theta)))
        if base == 0:
            raise self.refusal("rope_theta", base, "a number > 0")
        part = self.checked(part_name, rope.get("partial_rotary_factor", self._values.get(part_name, fraction)))
        fields: dict[str, Any] = {"rope_theta": base, "rotary_fraction": part}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == "default":
            if rope.get("factor") not in (None, 1):
                raise self.refusal(f"{source}.factor", rope["factor"], "1 without a rope_type: nothing is scaled")
            return fields
        known = ROPE_KINDS if kinds is None else kinds
        if kind not in known:
            raise self.refusal(f"{source}.rope_type", kind, " or ".join(json.dumps(name) for name in ("default", *known)))
        key = "original_max_position_embeddings"
        own = {key: self._values[key]} if key in self._values else {}
        given = Scaling(self, source, kind, {key: self._values.get("max_position_embeddings")} | rope | own)
        return fields | (ROPE_KINDS | LONGROPE)[kind](given)

    def checked(self, key: str, value: Any) -> float:
        """`value` of `key` as a finite number >= 0."""
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= sys.float_info.max:
            raise self.refusal(key, value, "a finite number >= 0")
        return float(value)

    def layer_types(self, other: str, is_other: Callable[[int], Any]) -> list[str]:
        """`other` or full attention for each layer; `is_other`: for each layer, from 0, where the file has no `layer_types`."""
        types, count = self.value("layer_types"), self.size("num_hidden_layers")
        if types is None:
            return [other if is_other(number) else FULL for number in range(count)]
        if not isinstance(types, list) or len(types) != count or any(kind not in (FULL, other) for kind in types):
            raise self.refusal("layer_types", types, f'{count} of "{FULL}" and "{other}", one for each layer')
        return types

    def windows(self, window: int | None, has_window: Callable[[int], Any]) -> dict[str, Any]:
        """The fields of a model whose windowed layers see `window` tokens; `has_window`: of each layer, from 0, without `layer_types`."""
        types = self.layer_types(WINDOWED, has_window)
        if WINDOWED not in types:
            return {}
        if window is None:
            raise self.refusal("layer_types", types, f'"{FULL}" alone where no sliding_window is on')
        return {"sliding_window": window, "full_attention_layers": [number for number, kind in enumerate(types) if kind == FULL]}

    def window_everywhere(self, *, absent: int | None) -> dict[str, Any]:
        """The fields of a model whose layers all have the same window; `absent` is that of a file without the key.

        A window that holds the longest sequence is none: Phi-3's files of 128k tokens have 262144.
        """
        window = self.optional_size("sliding_window", absent=absent)
        return {} if window is None or window >= self.size("max_position_embeddings") else {"sliding_window": window}

    def two_ropes(self, *, theta: float, local_theta: float, local_name: str) -> tuple[dict[str, Any], float]:
        """(the rotary fields of the layers without a window, the base of those with one), which nothing scales. The numbers are defaults;
        `local_name`: the latter's key at the top level."""
        kinds = self.value("rope_parameters") or {}
        if not isinstance(kinds, dict) or set(kinds) - {FULL, WINDOWED}:
            raise self.refusal("rope_parameters", kinds, f'one object each for "{FULL}" and "{WINDOWED}"')
        scaling = self.value("rope_scaling") or {}
        if not isinstance(scaling, dict) or (scaling and "rope_type" not in scaling):
            raise self.refusal("rope_scaling", scaling, "an object with a rope_type")
        full, local = ((kinds.get(kind) or {}) for kind in (FULL, WINDOWED))
        if local.get("rope_type", "default") != "default":
            raise self.refusal(f"rope_parameters.{WINDOWED}.rope_type", local["rope_type"], '"default"')
        fields = self.part(rope_parameters=dict(full) | scaling, rope_scaling=None).rope(theta=theta)
        of_windows = self.part(rope_parameters=local, rope_scaling=None).rope(theta=local_theta, names=(local_name, "none"))
        return fields, of_windows["rope_theta"]


def layer_types(architecture: Architecture) -> list[str]:
    """The inverse of `HFConfig.windows`."""
    return [WINDOWED if architecture.window_of(number) else FULL for number in range(architecture.num_layers)]


def two_ropes_to_hf(hf: dict[str, Any], local_theta: float) -> dict[str, Any]:
    """The config with the rotary keys of `HFConfig.two_ropes` instead of one set for all layers."""
    return hf | {"rope_parameters": {FULL: hf["rope_parameters"], WINDOWED: {"rope_type": "default", "rope_theta": local_theta}}}
