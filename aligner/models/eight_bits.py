"""Matrix products in 8 bits (`model.fp8`): which of Transformer Engine's recipes scales their factors, and what it asks of a model.

Only recipes that scale each tensor by what is in it now: `Fp8Recipe` says why. Arithmetic only: imports no Megatron-Core.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from aligner.errors import ConfigError
from aligner.models.config import Architecture, Fp8Recipe, ModelConfig
from aligner.parallel.topology import ParallelConfig

# Numbers with one scale: sizes are multiples of it. Of whole tensors the products themselves ask for one.
MULTIPLES = {Fp8Recipe.blockwise: 128, Fp8Recipe.mxfp8: 32, Fp8Recipe.tensorwise: 16}
# Blocks are small enough for gradients in e4m3, whole tensors want the range of e5m2.
FORMATS = {Fp8Recipe.blockwise: "e4m3", Fp8Recipe.mxfp8: "e4m3", Fp8Recipe.tensorwise: "hybrid"}
_OVERLAP_TOKENS = 128  # of each rank, whose scales are exchanged with `parallel.tp_comm_overlap`


def chosen(model: ModelConfig, capability: float) -> Fp8Recipe:
    """The recipe on GPUs of this compute capability (9.0: Hopper). MXFP8 is for Blackwell in data centres: 12.0 lacks a part of it."""
    if model.fp8_recipe is not Fp8Recipe.auto:
        return model.fp8_recipe
    own = {9: Fp8Recipe.blockwise, 10: Fp8Recipe.mxfp8, 11: Fp8Recipe.mxfp8}
    return own.get(int(capability), Fp8Recipe.tensorwise)


def token_multiple(config: Any) -> int:
    """Tokens of each rank are a multiple of this, by Megatron-Core's config. Blocks are whole on a rank whose tokens others gather."""
    if config.fp8_recipe == Fp8Recipe.mxfp8:
        return _OVERLAP_TOKENS if config.tp_comm_overlap else MULTIPLES[Fp8Recipe.mxfp8]
    is_gathered = config.fp8_recipe == Fp8Recipe.blockwise and config.sequence_parallel
    return MULTIPLES[Fp8Recipe.blockwise if is_gathered else Fp8Recipe.tensorwise]


def check(architecture: Architecture, model: ModelConfig, parallel: ParallelConfig, recipe: Fp8Recipe) -> None:
    """Raise ConfigError where the layers have a size that `recipe` cannot scale; it names the size and the recipes that can."""
    setting = f"model.fp8_recipe={model.fp8_recipe.value}" + (f", here {recipe.value}" if model.fp8_recipe is Fp8Recipe.auto else "")
    if parallel.tp_comm_overlap and recipe is Fp8Recipe.blockwise:
        raise ConfigError(
            f"parallel.tp_comm_overlap=true: Transformer Engine has no such exchange for {setting}; allowed: false, or "
            "model.fp8_recipe=tensorwise"
        )
    for name, split, size in _sizes(architecture, parallel):
        if size % MULTIPLES[recipe]:
            others = [
                other.value
                for other, multiple in MULTIPLES.items()
                if all(own % multiple == 0 for *_, own in _sizes(architecture, parallel))
            ]
            raise ConfigError(
                f"{setting}: {name} on a rank is {size}{split}, which is not a multiple of {MULTIPLES[recipe]}; allowed: "
                f"{'model.fp8_recipe=' + ' or '.join(others) if others else 'model.fp8=false'}"
            )


def _sizes(a: Architecture, parallel: ParallelConfig) -> Iterator[tuple[str, str, int]]:
    """(what it is, how it is split, size on a rank) of the inputs and outputs of the layers' products."""
    tp, etp = parallel.tp, parallel.etp
    of_tp, of_etp = (f" ({name}={size})" if size > 1 else "" for name, size in (("parallel.tp", tp), ("parallel.etp", etp)))
    yield "hidden_size", "", a.hidden_size
    yield "num_attention_heads x head_dim", of_tp, a.num_attention_heads * a.head_dim // tp
    yield "what queries, keys and values have together", of_tp, (a.num_attention_heads + 2 * a.num_key_value_heads) * a.head_dim // tp
    if len(a.dense_layers) or not a.num_experts:
        yield "ffn_hidden_size", of_tp, a.ffn_hidden_size // tp
    if a.num_experts:
        yield "expert_ffn_hidden_size", of_etp, a.expert_ffn_hidden_size // etp
