"""Weight names and layouts: Hugging Face <-> Megatron-Core, for one tensor at a time.

Megatron fuses q, k and v into one matrix whose rows are ordered by key-value group, `[q..q k v] [q..q k v] ...`, so that a tensor-parallel
shard holds whole groups; and gate and up into one matrix `[gate; up]` of which each shard holds `[gate_r; up_r]`. The vocabulary is padded.
Megatron names here are global: `decoder.layers.7.mlp.experts.local_experts.5...` is expert 5 of the model's layer 7, wherever it is.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aligner.errors import ConfigError
from aligner.models.config import Architecture


class Layout(str, Enum):
    """How the Hugging Face tensors of a rule make up the Megatron one."""

    plain = "plain"
    qkv = "qkv"  # three tensors
    packed_qkv = "packed_qkv"  # one tensor, [q; k; v]
    fused_qkv = "fused_qkv"  # one tensor, in Megatron's order
    gate_up = "gate_up"
    packed_gate_up = "packed_gate_up"  # one tensor, [gate; up]
    alternating_gate_up = "alternating_gate_up"  # one tensor, [gate; up; gate; up; ...], row by row
    delta_conv = "delta_conv"  # one tensor, [q; k; v] of a delta net; Megatron's is by key head
    delta_qkvz = "delta_qkvz"  # two tensors, [q; k; v] and the gates of a delta net
    delta_ba = "delta_ba"  # two tensors, of a number each for every value head
    vocabulary = "vocabulary"
    by_head = "by_head"  # [heads, head_dim], flattened

    @property
    def blocks(self) -> int:
        """Parts of the Megatron tensor of each of which every tensor-parallel rank has a share."""
        return 2 if self in (Layout.gate_up, Layout.packed_gate_up, Layout.alternating_gate_up) else 1

    @property
    def is_qkv(self) -> bool:
        """Whether the Megatron tensor is of query, key and value, by group."""
        return self in (Layout.qkv, Layout.packed_qkv, Layout.fused_qkv)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One Megatron parameter and the Hugging Face tensors that it holds."""

    hf_names: tuple[str, ...]
    layout: Layout
    transposed: bool = False  # Hugging Face stores it as [in, out] (GPT-2's Conv1D)
    expert: int | None = None  # whose part of tensors [experts, ...] it is; None: they are its own


def rule(*hf_names: str, layout: Layout = Layout.plain, transposed: bool = False) -> Rule:
    """A row of a `NameTable`."""
    return Rule(hf_names=hf_names, layout=layout, transposed=transposed)


EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"
PROJECTION = "embedding.word_embeddings.projection.weight"  # of embeddings of another width than the residual stream
OUTPUT_PROJECTION = "output_projection.weight"
ADAPTER = ".adapter."  # in the name of every parameter of an adapter, behind the name of its linear layer; no rule is of them
_LAYER_NAME = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_EXPERT_NAME = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.*)")
_EXPERT_TEMPLATE = "mlp.experts.local_experts.{expert}."


@dataclass(frozen=True, kw_only=True, slots=True)
class NameTable:
    """Every parameter of a family's language models, in the order of Hugging Face's model: Megatron name -> rule.

    Names in `layer` are relative to `decoder.layers.N.` and to `layer_prefix` (which holds `{layer}`); `{expert}` stands for the number of
    an expert. `ignored` matches tensors in Hugging Face files that are not parameters.
    """

    layer: Mapping[str, Rule]
    before: Mapping[str, Rule] = field(default_factory=lambda: BEFORE)
    after: Mapping[str, Rule] = field(default_factory=lambda: FINAL_NORM | OUTPUT)
    dense: Mapping[str, Rule] = field(default_factory=dict)  # feed-forward part of a mixture's layers without experts, not `layer`'s
    linear: Mapping[str, Rule] = field(default_factory=dict)  # the attention of layers that are delta nets, instead of `layer`'s
    layer_prefix: str = "model.layers.{layer}."
    base_prefix: str = "model."  # what a file of the headless model leaves out of the names
    ignored: str = r".*rotary_emb\.inv_freq"
    further: str = r"(?!)"  # matches those of layers that predict further tokens, which are not read

    def find(self, name: str) -> Rule:
        """The rule of a parameter with a global Megatron name. Raises ConfigError where the family's models have no such parameter."""
        layer = _LAYER_NAME.fullmatch(name)
        found = (self.before.get(name) or self.after.get(name)) if layer is None else self._find_in_layer(int(layer[1]), layer[2])
        if found is None:
            raise ConfigError(
                f"architecture: models of this family have no parameter {name}; the architecture's flags do not fit its family"
            )
        return found

    def _find_in_layer(self, layer: int, name: str) -> Rule | None:
        expert = _EXPERT_NAME.fullmatch(name)
        key = name if expert is None else _EXPERT_TEMPLATE + expert[2]
        found = self.layer.get(key) or self.dense.get(key) or self.linear.get(key)
        if found is None:
            return None
        prefix = self.layer_prefix.format(layer=layer)
        number = "" if expert is None else expert[1]
        return Rule(
            hf_names=tuple(prefix + hf.format(expert=number) for hf in found.hf_names),
            layout=found.layout,
            transposed=found.transposed,
            expert=int(number) if number and _is_stacked(found) else None,
        )

    def names(self, architecture: Architecture) -> Iterator[str]:
        """The global Megatron names of all parameters of a language model, in Hugging Face's order; a tied output layer is left out."""
        yield from self.before
        for layer in range(architecture.num_layers):
            names = list(self.layer)
            if architecture.num_experts and not architecture.has_experts(layer):
                names = [name for name in names if not name.startswith("mlp.")] + list(self.dense)
            if architecture.is_linear(layer):
                names = list(self.linear) + [name for name in names if not name.startswith("self_attention.")]
            experts = [name for name in names if name.startswith(_EXPERT_TEMPLATE)]
            yield from (f"decoder.layers.{layer}.{name}" for name in names if name not in experts)
            numbers = range(architecture.num_experts if experts else 0)
            pairs = [(name, number) for number in numbers for name in experts]
            if any(_is_stacked(self.layer[name]) for name in experts):  # one tensor of all experts after the other
                pairs = [(name, number) for name in experts for number in numbers]
            yield from (f"decoder.layers.{layer}.{name.format(expert=number)}" for name, number in pairs)
        yield from (name for name in self.after if name != OUTPUT_LAYER or not architecture.tied_embeddings)


def _is_stacked(rule: Rule) -> bool:
    return "{expert}" not in rule.hf_names[0]


def to_megatron(rule: Rule, tensors: list[Tensor], architecture: Architecture, padded_vocab_size: int) -> Tensor:
    """Full Hugging Face tensors (an expert's part of those of all), in the order of the rule's names -> the full Megatron tensor."""
    if rule.transposed:
        tensors = [t.t() for t in tensors]
    if rule.layout == Layout.alternating_gate_up:
        tensors = [tensors[0][0::2], tensors[0][1::2]]
    groups, sizes = _by_group(rule.layout, architecture)
    if groups:
        parts = [part for tensor, own in zip(tensors, sizes, strict=True) for part in tensor.split(own)]
        rest = tensors[0].shape[1:]
        return torch.cat([part.reshape(groups, -1, *rest) for part in parts], dim=1).reshape(-1, *rest)
    if rule.layout == Layout.vocabulary:
        padding = tensors[0].new_zeros(padded_vocab_size - tensors[0].shape[0], tensors[0].shape[1])
        return torch.cat([tensors[0], padding])
    if rule.layout == Layout.by_head:
        return tensors[0].flatten()
    return torch.cat(tensors) if len(tensors) > 1 else tensors[0]


def to_hf(rule: Rule, tensor: Tensor, architecture: Architecture) -> list[Tensor]:
    """The full Megatron tensor -> full Hugging Face tensors (an expert's part of those of all), in the order of the rule's names."""
    parts = _split(rule.layout, tensor, architecture)
    return [part.t() for part in parts] if rule.transposed else parts


def hf_shapes(rule: Rule, shape: tuple[int, ...], architecture: Architecture) -> list[tuple[int, ...]]:
    """Shapes of the full Hugging Face tensors of a full Megatron tensor of this shape."""
    stack = () if rule.expert is None else (architecture.num_experts,)
    return [(*stack, *part.shape) for part in to_hf(rule, torch.empty(shape, device="meta"), architecture)]


def _split(layout: Layout, tensor: Tensor, architecture: Architecture) -> list[Tensor]:
    groups, sizes = _by_group(layout, architecture)
    if groups:
        fused = tensor.reshape(groups, -1, *tensor.shape[1:])
        parts = iter(fused.split([size // groups for own in sizes for size in own], dim=1))
        return [torch.cat([next(parts).reshape(-1, *tensor.shape[1:]) for _ in own]) for own in sizes]
    if layout == Layout.gate_up:
        return list(tensor.chunk(2))
    if layout == Layout.alternating_gate_up:
        return [torch.stack(tensor.chunk(2), dim=1).flatten(0, 1)]
    if layout == Layout.vocabulary:
        return [tensor[: architecture.vocab_size]]
    if layout == Layout.by_head:
        return [tensor.view(-1, architecture.head_dim)]
    return [tensor]


def _by_group(layout: Layout, a: Architecture) -> tuple[int, list[list[int]]]:
    """(number of key-value groups or key heads by which a Megatron tensor's rows are ordered, rows of each part); (0, []) for others."""
    if layout in (Layout.qkv, Layout.packed_qkv):
        keys = a.num_key_value_heads * a.head_dim
        sizes = [a.num_attention_heads * a.head_dim * (1 + a.attention_gate), keys, keys]  # a gate's rows follow those of its query
        return a.num_key_value_heads, [[size] for size in sizes] if layout is Layout.qkv else [sizes]
    keys, values = a.linear_key_heads * a.linear_key_head_dim, a.linear_value_heads * a.linear_value_head_dim
    of_delta_nets = {
        Layout.delta_conv: [[keys, keys, values]],
        Layout.delta_qkvz: [[keys, keys, values], [values]],
        Layout.delta_ba: [[a.linear_value_heads], [a.linear_value_heads]],
    }
    sizes_of = of_delta_nets.get(layout)
    return (0, []) if sizes_of is None else (a.linear_key_heads, sizes_of)


def shard(layout: Layout, tensor: Tensor, *, dim: int, num_shards: int, index: int) -> Tensor:
    """This tensor-parallel rank's part of a full Megatron tensor."""
    if layout.blocks == 2:
        return torch.cat([half.chunk(num_shards)[index] for half in tensor.chunk(2)])
    return tensor.chunk(num_shards, dim=dim)[index]


def feed_forward(name: str, block: str, *, kind: str = "weight") -> dict[str, Rule]:
    """Rows of a gated feed-forward layer whose Hugging Face layers are under `block`."""
    return {
        f"{name}.linear_fc1.{kind}": rule(f"{block}.gate_proj.{kind}", f"{block}.up_proj.{kind}", layout=Layout.gate_up),
        f"{name}.linear_fc2.{kind}": rule(f"{block}.down_proj.{kind}"),
    }


BEFORE = {EMBEDDING: rule("model.embed_tokens.weight", layout=Layout.vocabulary)}
FINAL_NORM = {"decoder.final_layernorm.weight": rule("model.norm.weight")}
OUTPUT = {OUTPUT_LAYER: rule("lm_head.weight", layout=Layout.vocabulary)}
INPUT_NORM = {"input_layernorm.weight": rule("input_layernorm.weight")}
MLP_NORM = {"pre_mlp_layernorm.weight": rule("post_attention_layernorm.weight")}
QKV, QKV_BIAS = (
    {f"self_attention.linear_qkv.{kind}": rule(*(f"self_attn.{one}_proj.{kind}" for one in "qkv"), layout=Layout.qkv)}
    for kind in ("weight", "bias")
)
ATTENTION_OUT = {"self_attention.linear_proj.weight": rule("self_attn.o_proj.weight")}
ATTENTION = QKV | ATTENTION_OUT
QK_NORM = {f"self_attention.{one}_layernorm.weight": rule(f"self_attn.{one}_norm.weight") for one in "qk"}
MLP = feed_forward("mlp", "mlp")
PACKED_QKV = {"self_attention.linear_qkv.weight": rule("self_attn.qkv_proj.weight", layout=Layout.packed_qkv)}
PACKED_MLP = {
    "mlp.linear_fc1.weight": rule("mlp.gate_up_proj.weight", layout=Layout.packed_gate_up),
    "mlp.linear_fc2.weight": rule("mlp.down_proj.weight"),
}
SANDWICH_NORMS = {
    "post_attention_layernorm.weight": rule("post_attention_layernorm.weight"),
    "pre_mlp_layernorm.weight": rule("pre_feedforward_layernorm.weight"),
    "post_mlp_layernorm.weight": rule("post_feedforward_layernorm.weight"),
}


def affine(name: str, hf_name: str, *, layout: Layout = Layout.plain, transposed: bool = False) -> dict[str, Rule]:
    """A weight and its bias; `transposed`: the weight is stored as [in, out]."""
    weight = {f"{name}.weight": rule(f"{hf_name}.weight", layout=layout, transposed=transposed)}
    return weight | {f"{name}.bias": rule(f"{hf_name}.bias", layout=layout)}


def experts(block: str, *, gate: str, up: str, down: str) -> dict[str, Rule]:
    """A mixture-of-experts layer whose router and experts are under `block`; the others name an expert's three projections."""
    expert = block + ".experts.{expert}."
    local = "mlp.experts.local_experts.{expert}."
    return {
        "mlp.router.weight": rule(f"{block}.gate.weight"),
        f"{local}linear_fc1.weight": rule(f"{expert}{gate}.weight", f"{expert}{up}.weight", layout=Layout.gate_up),
        f"{local}linear_fc2.weight": rule(f"{expert}{down}.weight"),
    }


_MLP_BIAS = feed_forward("mlp", "mlp", kind="bias")
BIASED_MLP = {
    f"{name}.{kind}": table[f"{name}.{kind}"]
    for name in ("mlp.linear_fc1", "mlp.linear_fc2")
    for kind, table in (("weight", MLP), ("bias", _MLP_BIAS))
}


def attention(a: Architecture) -> dict[str, Rule]:
    """Rows of Llama's attention, with those that the architecture has besides. Biases of query, key and value directly follow their
    weights: tensors that an engine fuses must arrive together."""
    norm = Layout.by_head if a.qk_norm_by_head else Layout.plain
    return {
        **QKV,
        **(QKV_BIAS if a.qkv_bias else {}),
        **{f"self_attention.{one}_layernorm.weight": rule(f"self_attn.{one}_norm.weight", layout=norm) for one in "qk" if a.qk_norm},
        **ATTENTION_OUT,
        **({"self_attention.linear_proj.bias": rule("self_attn.o_proj.bias")} if a.attention_out_bias else {}),
        **({"self_attention.core_attention.sinks": rule("self_attn.sinks")} if a.attention_sinks else {}),
    }


def llama_like(a: Architecture, *, mlp: Mapping[str, Rule] | None = None, dense: Mapping[str, Rule] = MappingProxyType({})) -> NameTable:
    """Llama's table, perhaps with another feed-forward part, `dense` for a mixture's layers without experts."""
    return NameTable(layer=INPUT_NORM | attention(a) | MLP_NORM | dict(mlp or (BIASED_MLP if a.mlp_bias else MLP)), dense=dense)


class Size(NamedTuple):
    """One dimension of a tensor, and the fields of `Architecture` that make it."""

    value: int
    fields: tuple[str, ...]


_SIZE_KEYS = {  # of config.json that say a field
    "hidden_size": ("hidden_size", "n_embd"),
    "num_attention_heads": ("num_attention_heads", "n_head"),
    "head_dim": ("head_dim", "hidden_size", "n_embd", "num_attention_heads", "n_head"),
    "ffn_hidden_size": ("intermediate_size_mlp", "intermediate_size", "n_inner", "ffn_dim"),
    "expert_ffn_hidden_size": ("moe_intermediate_size", "intermediate_size"),
    "shared_ffn_hidden_size": ("shared_expert_intermediate_size", "n_shared_experts", "moe_intermediate_size", "intermediate_size"),
    "num_experts": ("num_experts", "n_routed_experts", "num_local_experts"),
    "max_position_embeddings": ("max_position_embeddings", "n_positions"),
    "embedding_size": ("word_embed_proj_dim",),
}


def size_settings(hf: Mapping[str, Any], sizes: list[Size]) -> str:
    """The entries of a config for these sizes."""
    fields = [field for size in sizes for field in size.fields]
    keys = dict.fromkeys(key for field in fields for key in _SIZE_KEYS.get(field, (field,))[: 1 if field in hf else None] if key in hf)
    return ", ".join(f"{key}={json.dumps(hf[key])}" for key in keys)


def expected_sizes(architecture: Architecture, table: NameTable) -> Iterator[tuple[str, list[Size]]]:
    """Name and dimensions of every matrix of the files whose shape follows from the sizes in a simple way."""
    known = _matrices(architecture)
    for name in table.names(architecture):
        module, _, kind = name.rpartition(".")
        part = "expert " if "local_experts" in module else "shared " if "shared_experts" in module else ""
        rows, columns = known.get(part + module.rpartition(".")[2], ((), None))
        if not columns or kind != "weight" or (architecture.latent_size and not part and "self_attention" in module):
            continue
        found = table.find(name)
        if len(found.hf_names) == 1:
            rows = (Size(sum(row.value for row in rows), tuple(field for row in rows for field in row.fields)),)
        stack = [] if found.expert is None else [known["router"][0][0]]
        for hf_name, row in zip(found.hf_names, rows, strict=True):
            yield hf_name, [*stack, *((columns, row) if found.transposed else (row, columns))]


def _matrices(a: Architecture) -> dict[str, tuple[tuple[Size, ...], Size | None]]:
    """By the end of Megatron's name: rows of each part, and columns."""

    def size(*fields: str, by: int = 1) -> Size:
        return Size(math.prod(getattr(a, field) for field in fields) * by, fields)

    hidden, width = size("hidden_size"), size("embedding_size" if a.embedding_size else "hidden_size")
    heads, keys = size("num_attention_heads", "head_dim"), size("num_key_value_heads", "head_dim")
    positions = Size(a.max_position_embeddings + a.position_offset, ("max_position_embeddings",))
    found: dict[str, tuple[tuple[Size, ...], Size | None]] = {
        "word_embeddings": ((size("vocab_size"),), width),
        "output_layer": ((size("vocab_size"),), width),
        "position_embeddings": ((positions,), hidden),
        "linear_qkv": ((size(*heads.fields, by=1 + a.attention_gate), keys, keys), hidden),
        "linear_proj": ((hidden,), heads),
        "router": ((size("num_experts"),), hidden),
    }
    for part, name in (("", "ffn_hidden_size"), ("expert ", "expert_ffn_hidden_size"), ("shared ", "shared_ffn_hidden_size")):
        found[f"{part}linear_fc1"] = ((size(name),) * (2 if a.gated_mlp else 1), hidden)
        found[f"{part}linear_fc2"] = ((hidden,), size(name))
    return found
