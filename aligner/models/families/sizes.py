"""The shapes that an architecture gives most of its Hugging Face matrices: compared with files before anything is built."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from aligner.models.config import Architecture
from aligner.models.families.mapping import NameTable


class Size(NamedTuple):
    """One dimension of a tensor, and the fields of `Architecture` that make it."""

    value: int
    fields: tuple[str, ...]


_KEYS = {  # of config.json that say a field
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


def settings(hf: Mapping[str, Any], sizes: list[Size]) -> str:
    """What a config says of these sizes."""
    fields = [field for size in sizes for field in size.fields]
    keys = dict.fromkeys(key for field in fields for key in _KEYS.get(field, (field,))[: 1 if field in hf else None] if key in hf)
    return ", ".join(f"{key}={json.dumps(hf[key])}" for key in keys)


def expected(architecture: Architecture, table: NameTable) -> Iterator[tuple[str, list[Size]]]:
    """Name and dimensions of every matrix of the files whose shape follows from the sizes in a simple way."""
    known = _matrices(architecture)
    for name in table.names(architecture):
        module, _, kind = name.rpartition(".")
        part = "expert " if "local_experts" in module else "shared " if "shared_experts" in module else ""
        rows, columns = known.get(part + module.rpartition(".")[2], ((), None))
        if not columns or kind != "weight" or (architecture.latent_size and not part and "self_attention" in module):
            continue
        rule = table.find(name)
        if len(rule.hf_names) == 1:
            rows = (Size(sum(row.value for row in rows), tuple(field for row in rows for field in row.fields)),)
        stack = [] if rule.expert is None else [known["router"][0][0]]
        for hf_name, row in zip(rule.hf_names, rows, strict=True):
            yield hf_name, [*stack, *((columns, row) if rule.transposed else (row, columns))]


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
    for part, field in (("", "ffn_hidden_size"), ("expert ", "expert_ffn_hidden_size"), ("shared ", "shared_ffn_hidden_size")):
        found[f"{part}linear_fc1"] = ((size(field),) * (2 if a.gated_mlp else 1), hidden)
        found[f"{part}linear_fc2"] = ((hidden,), size(field))
    return found
