"""Models of `transformers`' own modules: what their `config.json` tells of them, and what they cannot have here.

Every model that `AutoModelForCausalLM` loads is described by its config alone, so that no list of families limits what can be trained.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from aligner.errors import ConfigError
from aligner.models.architecture.divisible import PACKED_BLOCK
from aligner.models.checkpoint.hf_files import unread_packing
from aligner.models.config import Architecture, HFArchitecture, LoraConfig, LoraTarget, Part, Quantization
from aligner.models.families.mapping import NameTable, Rule, rule

LEAST_RELEASE = (5, 4)  # of transformers, whose caches and conversions of files this needs
PREFIX = "hf."  # of the parameters in a chunk: the attribute that holds the module
# The last part of the names of linear layers, by model.lora.targets. Whatever a model calls otherwise gets no adapter.
_LINEARS = {
    LoraTarget.q: ("q_proj", "query", "wq"),
    LoraTarget.k: ("k_proj", "key", "wk"),
    LoraTarget.v: ("v_proj", "value", "wv"),
    LoraTarget.qkv: ("qkv_proj", "query_key_value", "Wqkv", "qkv", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "in_proj"),
    LoraTarget.proj: ("o_proj", "out_proj", "dense", "wo", "proj"),
    LoraTarget.gate: ("gate_proj", "w1"),
    LoraTarget.up: ("up_proj", "w3"),
    LoraTarget.fc1: ("gate_up_proj", "fc1", "linear_fc1", "linear_1", "c_fc", "dense_h_to_4h", "fc_in", "input_linear"),
    LoraTarget.fc2: ("down_proj", "fc2", "linear_fc2", "linear_2", "w2", "dense_4h_to_h", "fc_out", "output_linear"),
}
_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")  # what configs call the longest sequence
_LAYER = re.compile(r".*?\.\d+\.")
_PARTS = {LoraTarget.qkv: (LoraTarget.q, LoraTarget.k, LoraTarget.v), LoraTarget.fc1: (LoraTarget.gate, LoraTarget.up)}


def hf_config(hf: dict[str, Any], where: str) -> Any:
    """The `transformers` config of a `config.json`. Raises ConfigError for a kind that is unknown there, and for code in the directory."""
    import transformers  # takes seconds, and most models do not need it
    from transformers import CONFIG_MAPPING, AutoConfig

    model_type = hf.get("model_type")
    if tuple(map(int, transformers.__version__.split(".")[:2])) < LEAST_RELEASE:
        release = ".".join(map(str, LEAST_RELEASE))
        raise ConfigError(f"{where}: model_type={model_type!r} needs transformers {release} or newer; here is {transformers.__version__}")
    if model_type not in CONFIG_MAPPING:
        own = "; its directory has code of its own (auto_map), which is not run" if hf.get("auto_map") else ""
        raise ConfigError(
            f"{where}: model_type={model_type!r} is neither a family with layers here nor in transformers {transformers.__version__}{own}; "
            "a newer transformers may have it"
        )
    hf = _unpacked(hf, where)
    try:
        with TemporaryDirectory() as directory:  # as a file, in which a number may be an object
            (Path(directory) / "config.json").write_text(json.dumps(hf))
            return AutoConfig.from_pretrained(directory)
    except Exception as error:  # of whatever kind a config raises
        raise ConfigError(f"{where}: transformers cannot read it: {error}") from error


def _unpacked(hf: dict[str, Any], where: str) -> dict[str, Any]:
    """A `config.json` of weights that are read as numbers. Raises ConfigError for files in few bits of kinds that are not read."""
    if (unread := unread_packing(hf.get("quantization_config"))) is not None:
        key, value, allowed = unread
        raise ConfigError(f"{where}: {key}={json.dumps(value)} is not read; allowed: {allowed}")
    hf = {key: value for key, value in hf.items() if key != "quantization_config"}
    return hf | ({"text_config": _unpacked(hf["text_config"], where)} if isinstance(hf.get("text_config"), dict) else {})


def auto_class(config: Any, where: str) -> Any:
    """The Auto class that makes a language model of a `transformers` config. Raises ConfigError if none does."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kinds = (AutoModelForCausalLM, AutoModelForImageTextToText)
    # Of a model that also sees, the first is its text part, which would be exported without the rest.
    for made_by in kinds if config.get_text_config() is config else reversed(kinds):
        if type(config) in made_by._model_mapping and not config.is_encoder_decoder:
            return made_by
    raise ConfigError(f"{where}: model_type={config.model_type!r} has no causal language model in transformers")


def hf_architecture(hf: dict[str, Any], *, where: str = "config.json") -> HFArchitecture:
    """Read the `config.json` of a model of `transformers`' own modules. Raises ConfigError if `transformers` has no such model."""
    config = hf_config(hf, where)
    made_by = auto_class(config, where)
    text, hf = config.get_text_config(), _unpacked(hf, where)
    if not hf.get("architectures"):
        hf = hf | {"architectures": [made_by._model_mapping[type(config)].__name__]}

    def size(name: str, default: int) -> int:
        try:
            found = getattr(text, name, None)
        except Exception:  # of a config whose layers differ: transformers refuses to name one value for all
            found = text.to_dict().get(name)
        return found if type(found) is int and found > 0 else default

    hidden, heads = size("hidden_size", 0), size("num_attention_heads", 1)
    if not hidden or not size("vocab_size", 0):
        raise ConfigError(f"{where}: transformers' config of model_type={config.model_type!r} has no hidden_size or vocab_size")
    return HFArchitecture(
        num_layers=size("num_hidden_layers", 1),
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=size("num_key_value_heads", heads),
        head_dim=size("head_dim", max(1, hidden // heads)),
        ffn_hidden_size=size("intermediate_size", 4 * hidden),
        vocab_size=text.vocab_size,
        max_position_embeddings=next(filter(None, (size(name, 0) for name in _CONTEXT)), 1 << 20),
        tied_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        hf=hf,
    )


@lru_cache(maxsize=8)
def _outline(hf: str) -> Any:
    """The model of a config without memory for its numbers."""
    config = hf_config(json.loads(hf), "config.json")
    with torch.device("meta"):
        return auto_class(config, "config.json").from_config(config)


def outline(architecture: Any) -> Any:
    """The `transformers` model on the meta device: names, shapes and kinds of its modules."""
    return _outline(json.dumps(architecture.hf, sort_keys=True))


class OwnNames(NameTable):
    """The names of a model whose parameters are called and stored as in its module."""

    def find(self, name: str) -> Rule:
        return rule(name.removeprefix(PREFIX))

    def names(self, architecture: Architecture) -> Iterator[str]:
        """All parameters, in the module's order; a tied output layer is left out."""
        assert isinstance(architecture, HFArchitecture)
        yield from (f"{PREFIX}{name}" for name, _ in outline(architecture).named_parameters())


OWN_NAMES = OwnNames(layer={})


def layer_of(name: str) -> str:
    """What the names of a layer's parameters begin with, in the module and in files; empty outside of layers."""
    found = _LAYER.match(name)
    return found[0] if found else ""


def has_adapter(weight: str, architecture: HFArchitecture, lora: LoraConfig) -> bool:
    """Whether the layer with this weight (its name in a chunk) gets an adapter: a linear layer that a target names, in one of the parts."""
    targets, path = lora.targets, weight.removeprefix(PREFIX).removesuffix(".weight")
    *_, parent, leaf = ("", *path.split("."))
    wanted = {name for target in targets for one in (target, *_PARTS.get(target, ())) for name in _LINEARS.get(one, ())}
    wanted |= {"c_attn"} if LoraTarget.qkv in targets else set()
    if leaf == "c_proj":  # GPT-2's descendants call two layers so
        wanted |= {"c_proj"} if (LoraTarget.proj if "attn" in parent else LoraTarget.fc2) in targets else set()
    if leaf not in wanted or not weight.endswith(".weight"):
        return False
    model = outline(architecture)
    is_named = not is_multimodal(model) or part_of(f"{path}.weight", model) in lora.parts
    return is_named and isinstance(model.get_submodule(path), torch.nn.Linear)


def packed_linears(architecture: HFArchitecture, quantization: Quantization) -> list[str]:
    """The linear layers of the `transformers` model whose weights are packed: those of its text part, without the output layer. Raises
    ConfigError for NF4 if the inputs of one are not a multiple of 64.

    Only torch's own kind of layer counts: experts that are one tensor, convolutions and the towers of models that see stay as they are.
    """
    model = outline(architecture)
    sees, output = is_multimodal(model), model.get_output_embeddings()
    found = []
    for name, layer in model.named_modules():
        if type(layer) is not torch.nn.Linear or layer is output or (sees and part_of(f"{name}.weight", model) is not Part.text):
            continue
        found.append(name)
        if quantization is Quantization.nf4 and layer.in_features % PACKED_BLOCK:
            raise ConfigError(
                f"model.quantization=nf4: {name} has {layer.in_features} inputs: no multiple of {PACKED_BLOCK}, the numbers that share a "
                "scale; allowed: int8, none"
            )
    return found


def dense_twin(architecture: HFArchitecture) -> Architecture:
    """A dense model of the same sizes, whose activations and times a plan knows."""
    sizes = {one.name: getattr(architecture, one.name) for one in fields(Architecture)}
    if architecture.num_attention_heads % architecture.num_key_value_heads:
        sizes["num_key_value_heads"] = architecture.num_attention_heads
    return Architecture(**sizes)


_PROJECTOR = re.compile(r"(^|[._])(merger|projector|connector|deepstack_merger_list|embed_vision)(\.|$)")


def part_of(name: str, model: Any) -> Part | None:
    """The part of a `transformers` model that sees to which the parameter `name` belongs; None for a part that hears."""
    inside = model.get_submodule(name.rpartition(".")[0])
    if any(inside is one for whole in (model.get_decoder(), model.get_output_embeddings()) for one in whole.modules()):
        return Part.text
    tower = model.get_encoder(modality="image")
    is_seen = any(inside is one for one in tower.modules())
    if _PROJECTOR.search(name):
        return Part.projector
    return Part.vision if is_seen else None


def is_multimodal(model: Any) -> bool:
    """Whether a `transformers` model has more than a text part."""
    return model.config.get_text_config() is not model.config


def text_of(model: Any) -> tuple[Any, Any]:
    """The modules of a `transformers` model that make logits of text, which may be a language model inside one that has more (BLIP-2), and
    the last hidden states that its output layer reads."""
    inside = model.get_decoder() if is_multimodal(model) else model
    return model if inside.get_output_embeddings() is None else inside, inside.base_model
