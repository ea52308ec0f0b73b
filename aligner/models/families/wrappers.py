"""Models of images and text whose text part is of a family with layers here: what their config.json says of that part, and what their files
and modules call it.

For text alone the positions of all axes of a multimodal rotary embedding (Qwen's) are equal, so that it is a plain one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from aligner.errors import ConfigError
from aligner.models.config import Architecture, Family, SeeingArchitecture
from aligner.models.families.hf_config import HFConfig
from aligner.models.families.mapping import Layout, NameTable, Rule, rule
from aligner.models.families.own_modules import hf_config, outline


class Wrapper(NamedTuple):
    """One kind of them."""

    hf_class: str
    texts: Mapping[str, Family]  # by the model_type in `text_config`; the first is that of files without it
    ties: bool | None = False  # the output layer to the embedding, where its config leaves that open; None: as its text part's has it
    heeds_text: bool = False  # ties them also if its text part's config does so
    module: tuple[str, ...] = ("model", "language_model")  # the place of the text part in transformers' model


_LLAMA, _MISTRAL = {"llama": Family.llama}, {"mistral": Family.mistral}
_LLAVA = _LLAMA | _MISTRAL | {"qwen2": Family.qwen2}
WRAPPERS = {
    "qwen2_vl": Wrapper("Qwen2VLForConditionalGeneration", {"qwen2_vl_text": Family.qwen2}, heeds_text=True),
    "qwen2_5_vl": Wrapper("Qwen2_5_VLForConditionalGeneration", {"qwen2_5_vl_text": Family.qwen2}, heeds_text=True),
    "qwen3_vl": Wrapper("Qwen3VLForConditionalGeneration", {"qwen3_vl_text": Family.qwen3}),
    "qwen3_vl_moe": Wrapper("Qwen3VLMoeForConditionalGeneration", {"qwen3_vl_moe_text": Family.qwen3_moe}),
    "qwen3_5": Wrapper("Qwen3_5ForConditionalGeneration", {"qwen3_5_text": Family.qwen3_5_text}),
    "qwen3_5_moe": Wrapper("Qwen3_5MoeForConditionalGeneration", {"qwen3_5_moe_text": Family.qwen3_5_moe_text}),
    "gemma3": Wrapper("Gemma3ForConditionalGeneration", {"gemma3_text": Family.gemma3_text}, ties=True),
    "mistral3": Wrapper("Mistral3ForConditionalGeneration", _MISTRAL, ties=True),
    "llama4": Wrapper("Llama4ForConditionalGeneration", {"llama4_text": Family.llama4_text}, ties=None, module=("language_model", "model")),
    "llava": Wrapper("LlavaForConditionalGeneration", _LLAVA, heeds_text=True),
    "idefics3": Wrapper("Idefics3ForConditionalGeneration", _LLAMA, module=("model", "text_model")),
    "smolvlm": Wrapper("SmolVLMForConditionalGeneration", _LLAMA, module=("model", "text_model")),
}
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
_QWEN2_VL = {"num_key_value_heads": 8, "max_window_layers": 80, "rms_norm_eps": 1e-5, "rope_theta": 1e6}
# Values of keys that a `text_config` leaves out, where a file of the family alone would have them, or others are the family's.
_ABSENT: dict[str, dict[str, Any]] = {
    "llama": dict(zip(_SIZES, (32000, 4096, 11008, 32, 32, 2048), strict=True)),
    "mistral": dict(zip(_SIZES, (32000, 4096, 14336, 32, 32, 131072), strict=True)),
    "qwen2": dict(zip(_SIZES, (151936, 4096, 22016, 32, 32, 32768), strict=True)),
    "gemma3_text": dict(zip(_SIZES, (262208, 2304, 9216, 26, 8, 131072), strict=True)),
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen3_vl_text": {"rope_theta": 5e5},
    "qwen3_vl_moe_text": {"rope_theta": 5e5, "num_key_value_heads": 16},
}
_UNTIED = {"tie_word_embeddings": False}
_IMAGES = re.compile(r"(?:model\.)?(?:visual|vision_tower|vision_model|multi_modal_projector|connector)\..+")
_TEXT = re.compile(r"(?:model\.)?(?:language_model|text_model)\.(?:model\.)?(.+)")


def wrapper_of(hf: Mapping[str, Any]) -> Wrapper | None:
    """The kind of wrapper that a `config.json` is of, where its text part has layers here; None for any other model."""
    found = WRAPPERS.get(str(hf.get("model_type")))
    if found is None or hf.get("architectures") not in (None, [found.hf_class]):
        return None
    text = _text_config(hf, found)
    return None if text is None or text["model_type"] not in found.texts else found


def has_images(hf: Mapping[str, Any]) -> bool:
    """Whether the model of a `config.json` reads images beside text."""
    return hf.get("model_type") in WRAPPERS or isinstance(hf.get("vision_config"), Mapping)


def text_part(hf: dict[str, Any]) -> dict[str, Any]:
    """The config of the text part of a model of images and text; any other unchanged. Raises ConfigError for what is not known."""
    wrapper = WRAPPERS.get(str(hf.get("model_type")))
    text = None if wrapper is None else _text_config(hf, wrapper)
    if wrapper is None or text is None:
        return hf
    HFConfig(hf).only({"architectures": (None, [wrapper.hf_class])})
    if (kind := text["model_type"]) not in wrapper.texts:
        raise HFConfig(hf).refusal("text_config.model_type", kind, " or ".join(f'"{one}"' for one in wrapper.texts))
    own: dict[str, Any] = {"model_type": wrapper.texts[kind].value, "architectures": None}
    if wrapper.ties is not None:
        tied = hf.get("tie_word_embeddings", wrapper.ties)
        own["tie_word_embeddings"] = tied or text.get("tie_word_embeddings", False) if wrapper.heeds_text else tied
    if kind == "qwen3_vl_moe_text":
        own["norm_topk_prob"] = True  # whatever the file has
    for key in ("rope_scaling", "rope_parameters"):
        rope = text.get(key)
        if isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) == "mrope":
            own[key] = rope | {"rope_type": "default"}
    return _ABSENT.get(kind, {}) | text | own | {"quantization_config": hf.get("quantization_config")}


def _text_config(hf: Mapping[str, Any], wrapper: Wrapper) -> dict[str, Any] | None:
    """`text_config` with its model_type, which old files may leave out; of Qwen2-VL's and 2.5-VL's the whole file may be it."""
    text, usual = hf.get("text_config"), next(iter(wrapper.texts))
    if text is None and wrapper.texts.get(usual) is Family.qwen2:
        return {key: value for key, value in hf.items() if key != "vision_config"} | {"model_type": usual}
    return {"model_type": usual} | text if isinstance(text, dict) else None


def wrapped_config(hf: Mapping[str, Any], architecture: Architecture, dtype: str = "") -> dict[str, Any]:
    """The `config.json` of a wrapper around a text part that has been trained; without `dtype` as its files are."""
    wrapper, dtype = WRAPPERS[hf["model_type"]], dtype or str(hf.get("dtype", hf.get("torch_dtype", "float32")))
    left_out = ("quantization_config", "torch_dtype")
    own = {key: value for key, value in hf.items() if key not in left_out} | {"architectures": [wrapper.hf_class], "dtype": dtype}
    untied = {} if text_part(dict(hf)).get("tie_word_embeddings") is not True or architecture.tied_embeddings else _UNTIED
    if isinstance(text := hf.get("text_config"), dict):
        own["text_config"] = text | {key: dtype for key in ("dtype", "torch_dtype") if key in text} | untied
    return own | untied


def is_of_images(name: str) -> bool:
    """Whether a tensor in a wrapper's files is not its text part's."""
    return bool(_IMAGES.fullmatch(name))


def text_name(name: str) -> str:
    """The name that a tensor in a wrapper's files has in those of its text part alone."""
    found = _TEXT.fullmatch(name)
    if found is None:
        return name
    return found[1] if found[1].startswith("lm_head.") else f"model.{found[1]}"


def module_name(model_type: str, name: str) -> str:
    """The name in transformers' model of a wrapper that a layer has in its text part alone."""
    return ".".join((*WRAPPERS[model_type].module, text_name(name).removeprefix("model.")))


TOWER = "visual."  # of the parameters in a chunk that sees: the attribute that holds transformers' vision tower


class _Seeing(NamedTuple):
    """A kind of which Megatron-Core's layers read images."""

    sections: tuple[int, int, int]  # of its rotary embedding, where the file names none
    mixed: bool  # whether they take turns
    text: tuple[str, ...] = ("model", "language_model")  # what the names of tensors begin with in published files
    tower: tuple[str, ...] = ("model", "visual")
    stacks_experts: bool = False  # all of a layer in one tensor, transposed, where the family's files have single ones


_EXPERT = "mlp.experts.local_experts.{expert}."
_STACKED = {
    f"{_EXPERT}linear_fc1.weight": rule("mlp.experts.gate_up_proj", layout=Layout.packed_gate_up, transposed=True),
    f"{_EXPERT}linear_fc2.weight": rule("mlp.experts.down_proj", transposed=True),
}
_SEEING = {
    "qwen2_vl": _Seeing((16, 24, 24), mixed=False, text=("model",), tower=("visual",)),
    "qwen2_5_vl": _Seeing((16, 24, 24), mixed=False, text=("model",), tower=("visual",)),
    "qwen3_vl": _Seeing((24, 20, 20), mixed=True),
    "qwen3_vl_moe": _Seeing((24, 20, 20), mixed=True, stacks_experts=True),
    "qwen3_5": _Seeing((11, 11, 10), mixed=True),
    "qwen3_5_moe": _Seeing((11, 11, 10), mixed=True),
}


def can_see(hf: Mapping[str, Any]) -> bool:
    """Whether Megatron-Core's layers can read images in the model of a `config.json`."""
    return hf.get("model_type") in _SEEING and wrapper_of(hf) is not None


def seeing(architecture: Architecture, hf: dict[str, Any], *, where: str) -> SeeingArchitecture:
    """The text part with the rest of the model of `hf`. Raises ConfigError if it cannot see, or `transformers` has no such model."""
    if not can_see(hf):
        raise ConfigError(
            f"model.images=true: {where}: Megatron's layers read the images of {', '.join(_SEEING)}, not of "
            f"model_type={hf.get('model_type')!r}; allowed: model.implementation=transformers"
        )
    config, kind = hf_config(hf, where), _SEEING[hf["model_type"]]
    sections = list((config.get_text_config().rope_parameters or {}).get("mrope_section", kind.sections))
    if len(sections) != 3 or 2 * sum(sections) != architecture.rotated:
        raise ConfigError(f"{where}: mrope_section={sections}: expected three numbers that sum to {architecture.rotated // 2}")
    deep = len(getattr(config.vision_config, "deepstack_visual_indexes", None) or [])
    own = {one.name: getattr(architecture, one.name) for one in fields(Architecture)}
    return SeeingArchitecture(**own, hf=hf, rope_sections=sections, rope_mixed=kind.mixed, deep_layers=deep)


def with_axes(hf: dict[str, Any]) -> dict[str, Any]:
    """A seeing model's `config.json`, saying what `transformers` takes for granted about its axes of positions; any other unchanged."""
    if not can_see(hf):
        return hf
    kind, inside = _SEEING[hf["model_type"]], isinstance(hf.get("text_config"), dict)
    told = hf_config(hf, "config.json").get_text_config().rope_parameters or {}
    rope = {"mrope_section": list(kind.sections)} | told | ({"mrope_interleaved": True} if kind.mixed else {})
    text = {key: value for key, value in (hf["text_config"] if inside else hf).items() if key != "rope_scaling"} | {"rope_parameters": rope}
    return hf | {"text_config": text} if inside else text


def around(text: Mapping[str, Any], rest: Mapping[str, Any]) -> dict[str, Any]:
    """The `config.json` of a model of images and text, from that of its text part and the rest."""
    wrapper = WRAPPERS.get(str(rest.get("model_type")))
    if wrapper is None:
        return dict(rest)
    whole = {"architectures": [wrapper.hf_class], "tie_word_embeddings": text["tie_word_embeddings"]}
    return {**whole, **rest, "text_config": {**text, "model_type": next(iter(wrapper.texts)), "architectures": None}}


@dataclass(frozen=True, kw_only=True, slots=True)
class SeeingNames(NameTable):
    """The names of a text part with its vision tower, whose parameters are called as in `transformers`' module."""

    kind: _Seeing

    def find(self, name: str) -> Rule:
        return rule(self.stored(name)) if name.startswith(TOWER) else NameTable.find(self, name)

    def stored(self, name: str) -> str:
        """The name in published files of a tensor that is called as in those of any release."""
        if is_of_images(name):
            return ".".join((*self.kind.tower, name.removeprefix("model.").removeprefix(TOWER)))
        own = text_name(name)
        return own if own.startswith("lm_head.") else ".".join((*self.kind.text, own.removeprefix("model.")))

    def names(self, architecture: Architecture) -> Iterator[str]:
        """See `NameTable`; the tower's first."""
        yield from (f"{TOWER}{name}" for name, _ in outline(architecture).model.visual.named_parameters())
        yield from NameTable.names(self, architecture)


def seeing_names(table: NameTable, architecture: SeeingArchitecture) -> SeeingNames:
    """The names of a model whose text part has those of `table`."""
    kind = _SEEING[architecture.hf["model_type"]]

    def inside(rules: Mapping[str, Rule]) -> dict[str, Rule]:
        named = {name: [re.sub(r"^model", ".".join(kind.text), hf) for hf in own.hf_names] for name, own in rules.items()}
        return {name: replace(own, hf_names=tuple(named[name])) for name, own in rules.items()}

    same = {one.name: getattr(table, one.name) for one in fields(NameTable)}
    if kind.stacks_experts:
        same["layer"] = {**table.layer, **_STACKED}
    own = {"before": inside(table.before), "after": inside(table.after), "layer_prefix": ".".join((*kind.text, "layers.{layer}."))}
    return SeeingNames(**{**same, **own}, kind=kind)
