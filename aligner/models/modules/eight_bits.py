"""Matrix products in 8 bits (`model.fp8`): which of Transformer Engine's recipes scales their factors, and what it asks of a model.

Arithmetic only: imports no Megatron-Core.
"""

from __future__ import annotations

from typing import Any

from aligner.errors import ConfigError
from aligner.models.config import Architecture, Fp8Recipe, ModelConfig
from aligner.parallel.topology import ParallelConfig

MULTIPLES = {Fp8Recipe.blockwise: 128, Fp8Recipe.mxfp8: 32, Fp8Recipe.tensorwise: 16}  # of sizes: numbers of a block; what products ask for
FORMATS = {Fp8Recipe.blockwise: "e4m3", Fp8Recipe.mxfp8: "e4m3", Fp8Recipe.tensorwise: "hybrid"}  # e5m2: the range of gradients


def chosen(model: ModelConfig, capability: float) -> Fp8Recipe:
    """The recipe on GPUs of this compute capability (9.0: Hopper). MXFP8 is for Blackwell in data centres: 12.0 lacks a part of it."""
    own = {9: Fp8Recipe.blockwise, 10: Fp8Recipe.mxfp8, 11: Fp8Recipe.mxfp8}.get(int(capability), Fp8Recipe.tensorwise)
    return own if model.fp8_recipe is Fp8Recipe.auto else model.fp8_recipe


def token_multiple(config: Any) -> int:
    """Tokens of each rank are a multiple of this, by Megatron-Core's config. Blocks are whole on a rank whose tokens others gather."""
    if config.fp8_recipe == Fp8Recipe.mxfp8:
        return 128 if config.tp_comm_overlap else 32
    return 128 if config.fp8_recipe == Fp8Recipe.blockwise and config.sequence_parallel else 16


def check(a: Architecture, model: ModelConfig, parallel: ParallelConfig, recipe: Fp8Recipe) -> None:
    """Raise ConfigError where the layers' products have sizes that `recipe` cannot scale; it names the size and the recipes that can."""
    setting = f"model.fp8_recipe={model.fp8_recipe.value}" + (f" (here {recipe.value})" if model.fp8_recipe is Fp8Recipe.auto else "")
    if parallel.tp_comm_overlap and recipe is Fp8Recipe.blockwise:
        raise ConfigError(f"{setting}: has no exchange for parallel.tp_comm_overlap=true; allowed: false, or model.fp8_recipe=tensorwise")
    heads = {"num_attention_heads": (own := a.num_attention_heads), "heads of keys and values too": own + 2 * a.num_key_value_heads}
    sizes = {"hidden_size": a.hidden_size} | {f"{name} x head_dim": count * a.head_dim // parallel.tp for name, count in heads.items()}
    if a.num_experts:
        sizes["expert_ffn_hidden_size"] = a.expert_ffn_hidden_size // parallel.etp
    if not a.num_experts or a.dense_layers:
        sizes["ffn_hidden_size"] = a.ffn_hidden_size // parallel.tp
    for name, size in sizes.items():
        if size % MULTIPLES[recipe]:
            others = [other.value for other, multiple in MULTIPLES.items() if not any(own % multiple for own in sizes.values())]
            allowed = f"model.fp8_recipe={' or '.join(others)}" if others else "model.fp8=false"
            raise ConfigError(f"{setting}: {name} on a rank is {size}, not a multiple of {MULTIPLES[recipe]}; allowed: {allowed}")
