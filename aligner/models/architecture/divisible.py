"""Whether a model can be laid out and computed with given settings, and what `model.fp8` requires. Imports no Megatron-Core."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from aligner.errors import ConfigError
from aligner.models.architecture.architecture import refuse
from aligner.models.config import (
    Activation,
    Architecture,
    Fp8Recipe,
    HFArchitecture,
    Layers,
    LoraTarget,
    ModelConfig,
    Normalization,
    ParallelResidual,
    Part,
    Quantization,
    Recompute,
    SeeingArchitecture,
)
from aligner.parallel.topology import ParallelConfig


def check_divisible(architecture: Architecture, parallel: ParallelConfig) -> None:
    """Raise ConfigError where the model has no vocabulary, or a size of it cannot be split over the ranks; it names the values that can."""
    if isinstance(architecture, HFArchitecture):
        return  # nothing is split: see check_together
    if architecture.vocab_size < 1:
        raise ConfigError(f"model.architecture.vocab_size={architecture.vocab_size}: must be at least 1 (the tokenizer's size, usually)")
    _check(parallel, "tp", lambda tp: _tensor_problem(architecture, tp), architecture.num_attention_heads)
    if parallel.first_stage_layers or parallel.last_stage_layers:
        _check_uneven_stages(architecture.num_layers, parallel)
    else:
        stages = uneven_stages(architecture.num_layers, parallel.pp)
        also = f", or {' '.join(f'parallel.{name}={count}' for name, count in stages.items())}" if stages and parallel.vpp == 1 else ""
        _check(parallel, "pp", lambda pp: _problem("num_layers", architecture.num_layers, pp), architecture.num_layers, also=also)
        layers = architecture.num_layers // parallel.pp
        held = f"does not divide the {layers} of the model's num_layers={architecture.num_layers} that each stage holds"
        _check(parallel, "vpp", lambda vpp: held if layers % vpp else "", layers)
    _check(parallel, "ep", lambda ep: _expert_problem(architecture, "num_experts", ep), max(1, architecture.num_experts))
    if architecture.num_experts and parallel.ep == 1 and parallel.etp != parallel.tp:
        # Megatron-Core then takes experts for ordinary parameters and leaves their gradients unreduced over the tensor-parallel ranks.
        raise ConfigError(f"parallel.etp={parallel.etp}: without expert parallelism (ep=1) it must be parallel.tp; allowed: {parallel.tp}")
    _check(
        parallel,
        "etp",
        lambda etp: _expert_problem(architecture, "expert_ffn_hidden_size", etp),
        max(1, architecture.expert_ffn_hidden_size),
    )
    if architecture.expert_biases and parallel.etp not in (1, parallel.tp):  # the norm of gradients would count biases wrongly
        allowed = ", ".join(map(str, sorted({1, parallel.tp})))
        raise ConfigError(f"parallel.etp={parallel.etp}: with biases of experts it must be 1 or parallel.tp; allowed: {allowed}")
    if architecture.num_experts and parallel.tp > 1 and not parallel.sequence_parallel:
        raise ConfigError(
            f"parallel.sequence_parallel=false: a model with experts and parallel.tp={parallel.tp} needs it "
            "(else every tensor-parallel rank would send every token to the experts); allowed: true"
        )


def check_together(architecture: Architecture, model: ModelConfig, parallel: ParallelConfig) -> None:
    """Raise ConfigError for settings that are valid alone but not together."""
    if isinstance(architecture, HFArchitecture):
        return _check_own_modules(architecture, model, parallel)
    _check_packed(architecture, model, parallel)
    problem, experts = unusual(architecture, UNUSUAL | _FACTOR), architecture.num_experts
    overlap, invariant, cp = "parallel.tp_comm_overlap=true: needs", "model.batch_invariant=true:", parallel.cp
    sees = isinstance(architecture, SeeingArchitecture)
    sums = "the sums over a token's experts have no invariant form here; allowed: dense models"
    refuse(
        (
            parallel.tp_comm_overlap and model.layers is Layers.torch,
            f"{overlap} Transformer Engine's layers; allowed: model.layers=auto or transformer_engine",
        ),
        (parallel.tp_comm_overlap and not model.packing, f"{overlap} model.packing=true (its buffers are of micro-batches of one size)"),
        (model.batch_invariant and problem, f"{invariant} {problem} has no invariant form here; allowed: models without it"),
        (model.batch_invariant and experts, f"{invariant} not for mixtures of experts (num_experts={experts}): {sums}"),
        (
            model.batch_invariant and sees,
            f"{invariant} the tower of a model that reads images has no invariant form; allowed: images=false",
        ),
        (
            sees and Part.text in model.freeze and parallel.pp > 1,
            f"model.freeze: text with parallel.pp={parallel.pp} leaves later stages nothing to train; allowed: parallel.pp=1",
        ),
        (
            architecture.linear_attention_layers and cp > 1,
            f"parallel.cp={cp}: the model's delta nets hand a state on from token to token; allowed: 1",
        ),
        (
            model.share_prompts and cp > 1,
            f"model.share_prompts=true: sequences that are split over parallel.cp={cp} ranks cannot share prompts; allowed: cp=1",
        ),
    )


PACKED_BLOCK = 64  # numbers of a row that share a scale in NF4


def _check_packed(a: Architecture, model: ModelConfig, parallel: ParallelConfig) -> None:
    """Raise ConfigError for a model whose layers have no packed form, or one that depends on the layout."""
    if not model.quantization.is_on:
        return
    setting = f"model.quantization={model.quantization.value}"
    if model.quantization is not Quantization.nf4:
        return
    for name, size, degree in _inputs(a):
        ranks = getattr(parallel, degree) if degree else 1
        if size % (PACKED_BLOCK * ranks):
            where = f"{size} inputs" if ranks == 1 else f"{size} inputs over parallel.{degree}={ranks} ranks, {size / ranks:g} on each"
            raise ConfigError(
                f"{setting}: {name} has {where}: no multiple of {PACKED_BLOCK}, the numbers that share a scale; allowed: int8, none"
                + (", or fewer ranks" if size % PACKED_BLOCK == 0 else "")
            )


def _inputs(a: Architecture) -> Iterator[tuple[str, int, str]]:
    """(a layer that has a packed form, its inputs, the parallel degree that splits them; empty if none does)."""
    delta, heads = len(a.linear_attention_layers), a.num_attention_heads
    if delta:
        yield "linear_qkvz", a.hidden_size, ""
        yield "linear_out", a.linear_value_heads * a.linear_value_head_dim, "tp"
    if a.latent_size:
        yield "linear_q_up_proj" if a.query_latent_size else "linear_q_proj", a.query_latent_size or a.hidden_size, ""
        yield "linear_kv_up_proj", a.latent_size, ""
        yield "linear_proj", heads * a.value_head_dim, "tp"
    elif delta < a.num_layers:
        yield "linear_qkv", a.hidden_size, ""
        yield "linear_proj", heads * a.head_dim, "tp"
    yield "linear_fc1", a.hidden_size, ""
    if not a.num_experts or a.dense_layers:
        yield "linear_fc2", a.ffn_hidden_size, "tp"
    if a.num_experts:
        yield "local_experts.linear_fc2", a.expert_ffn_hidden_size, "etp"
        yield "shared_experts.linear_fc2", a.shared_ffn_hidden_size, "tp"


_PARALLEL = ("tp", "pp", "cp", "ep", "etp", "vpp")


def _check_own_modules(architecture: HFArchitecture, model: ModelConfig, parallel: ParallelConfig) -> None:
    """Raise ConfigError for a layout or a setting that `transformers`' own modules cannot have."""
    who = f"{architecture.model_type} has transformers' own modules"
    checks = [(getattr(parallel, name) != 1, f"parallel.{name}={getattr(parallel, name)}: {who}; allowed: 1") for name in _PARALLEL]
    off = {
        "layers=transformer_engine": model.layers is Layers.transformer_engine,
        "fp8=true": model.fp8,
        "batch_invariant=true": model.batch_invariant,
        "share_prompts=true": model.share_prompts,
        f"router_aux_loss_coef={model.router_aux_loss_coef}": model.router_aux_loss_coef,
        f"router_z_loss_coef={model.router_z_loss_coef}": model.router_z_loss_coef,
        f"router_bias_update_rate={model.router_bias_update_rate}": model.router_bias_update_rate,
    }
    checks += [(is_set, f"model.{setting}: {who}, which have no such setting; allowed: the default") for setting, is_set in off.items()]
    refuse(
        *checks,
        (parallel.sequence_parallel, f"parallel.sequence_parallel=true: {who}; allowed: false"),
        (model.recompute is Recompute.selective, f"model.recompute=selective: {who}; allowed: none, full"),
        (model.lora.is_on and LoraTarget.experts in model.lora.targets, f"model.lora.targets=[experts]: {who}; allowed: the others"),
    )


# Fields of an architecture that only torch's layers compute here, not Transformer Engine's, and not the compiled kernels of the rollouts:
# the neutral value, and what a model with another value has.
UNUSUAL: dict[str, tuple[Any, str]] = {
    "sliding_window": (0, "attention to a window"),
    "attention_chunk": (0, "attention in chunks"),
    "no_rope_layers": ([], "layers without rotary positions"),
    "qk_l2_norm": (False, "norms of rotated queries and keys without weights"),
    "attention_softcap": (0.0, "capped attention scores"),
    "attention_sinks": (False, "attention sinks"),
    "attention_scale": (0.0, "attention scores with a scale of their own"),
    "attention_scale_by_layer": (False, "attention scores with a scale by layer"),
    "rotary_interleaved": (False, "rotated pairs of neighbouring dimensions"),
    "rope_local_theta": (0.0, "two rotary bases"),
    "position_offset": (0, "a table of positions that begins later"),
    "parallel_residual": (ParallelResidual.none, "attention and feed-forward layer side by side"),
    "pre_norms": (True, "no norms in front of its layers"),
    "residual_norms": (False, "norms of the residual stream"),
    "embedding_size": (0, "projected embeddings"),
    "post_norms": (False, "norms behind its layers"),
    "qk_norm_whole": (False, "norms of all heads together"),
    "qk_norm_by_head": (False, "norms with weights of each head"),
    "embedding_scale": (1.0, "scaled embeddings"),
    "logits_scale": (1.0, "scaled logits"),
    "logits_softcap": (0.0, "capped logits"),
    "latent_size": (0, "latent attention"),
    "linear_attention_layers": ([], "gated delta nets"),
    "attention_gate": (False, "a gate on attention"),
    "dense_layers": ([], "layers without experts"),
    "shared_ffn_hidden_size": (0, "shared experts"),
    "glu_limit": (0.0, "cut activations"),
    "expert_biases": (False, "experts with biases"),
    "router_sigmoid": (False, "sigmoid routing"),
    "router_groups": (0, "groups of experts"),
    "weighted_expert_inputs": (False, "experts whose input is weighted"),
}
_FACTOR: dict[str, tuple[Any, str]] = {"rope_attention_factor": (1.0, "a factor on the rotary embedding")}
_WITH_BIASES: dict[str, tuple[Any, str]] = dict.fromkeys(("attention_out_bias", "mlp_bias"), (False, "biases on some of its linear layers"))


def unusual(architecture: Architecture, fields: Mapping[str, tuple[Any, str]] = UNUSUAL) -> str:
    """The first of `fields` that is not neutral, in words; empty where all are."""
    for name, (neutral, what) in fields.items():
        if (value := getattr(architecture, name)) != neutral:
            return f"{what} ({name}={getattr(value, 'value', value)})"
    if architecture.activation in (Activation.relu, Activation.quick_gelu):
        return f"an activation of its own kind (activation={architecture.activation.value})"
    if architecture.normalization in (Normalization.rms_norm_1p, Normalization.layer_norm_no_bias):
        return f"a norm of its own kind (normalization={architecture.normalization.value})"
    return ""


def torch_layers_reason(architecture: Architecture) -> str:
    """What of the model only torch's layers compute here; empty where others may."""
    parted = {} if architecture.rotary_fraction == 1 else _FACTOR
    found = unusual(architecture, UNUSUAL | _WITH_BIASES | parted)
    return f"the model has {found}, which torch's layers compute" if found else ""


def uneven_stages(num_layers: int, pp: int) -> dict[str, int]:
    """`first_stage_layers` and `last_stage_layers` for layers that `pp` stages do not divide: fewer than the others have where that is
    possible, and as even as can be. Empty if the stages are equal, or the model has fewer layers than stages."""
    if num_layers % pp == 0 or num_layers < pp:
        return {}
    if pp == 2:
        return {"first_stage_layers": num_layers // 2}
    for others in (math.ceil(num_layers / pp), num_layers // pp):
        rest = num_layers - others * (pp - 2)
        if rest >= 2:
            break
    return {"first_stage_layers": rest - rest // 2, "last_stage_layers": rest // 2}


def _check(parallel: ParallelConfig, name: str, problem: Callable[[int], str], largest: int, *, also: str = "") -> None:
    value = getattr(parallel, name)
    if found := problem(value):
        allowed = ", ".join(str(n) for n in range(1, largest + 1) if not problem(n))
        raise ConfigError(f"parallel.{name}={value}: {found}; allowed: {allowed}{also}")


def _tensor_problem(architecture: Architecture, tp: int) -> str:
    sizes = ["num_attention_heads", "hidden_size"]
    sizes += ["ffn_hidden_size"] if architecture.dense_layers or not architecture.num_experts else []
    for name in (*sizes, "shared_ffn_hidden_size", "linear_key_heads"):
        if found := _problem(name, getattr(architecture, name), tp):
            return found
    groups = architecture.num_key_value_heads
    if architecture.qk_norm_of_heads and groups % tp:
        return f"must divide the model's num_key_value_heads={groups}: each rank has the norms' weights of its heads"
    if groups % tp and tp % groups:
        return f"must divide, or be a multiple of, the model's num_key_value_heads={groups}"
    rows = (architecture.num_attention_heads * (1 + architecture.attention_gate) + 2 * groups) * architecture.head_dim
    return f"does not divide the {rows} rows of the query, key and value projections" if rows % tp else ""


def _problem(name: str, size: int, count: int) -> str:
    return f"does not divide the model's {name}={size}" if size % count else ""


def _expert_problem(architecture: Architecture, name: str, count: int) -> str:
    if not architecture.num_experts:
        return "the model has no experts (num_experts=0)" if count > 1 else ""
    return _problem(name, getattr(architecture, name), count)


def _check_uneven_stages(num_layers: int, parallel: ParallelConfig) -> None:
    first, last = parallel.first_stage_layers, parallel.last_stage_layers
    others = parallel.pp - bool(first) - bool(last)

    def fits(first: int, last: int) -> bool:
        rest = num_layers - first - last
        return rest == 0 if others == 0 else rest > 0 and rest % others == 0

    if fits(first, last):
        return
    name = "first_stage_layers" if first else "last_stage_layers"
    allowed = [n for n in range(1, num_layers + 1) if (fits(n, last) if first else fits(first, n))]
    raise ConfigError(
        f"parallel.{name}={getattr(parallel, name)}: with first_stage_layers={first} and last_stage_layers={last}, "
        f"{num_layers - first - last} of the model's num_layers={num_layers} remain for {others} equal stages; "
        f"allowed: {', '.join(map(str, allowed)) or 'none'}"
    )


FP8_MULTIPLES = {
    Fp8Recipe.blockwise: 128,
    Fp8Recipe.mxfp8: 32,
    Fp8Recipe.tensorwise: 16,
}  # of sizes: numbers of a block; what products ask for
FP8_FORMATS = {Fp8Recipe.blockwise: "e4m3", Fp8Recipe.mxfp8: "e4m3", Fp8Recipe.tensorwise: "hybrid"}  # e5m2: the range of gradients


def fp8_recipe(model: ModelConfig, capability: float) -> Fp8Recipe:
    """The recipe on GPUs of this compute capability (9.0: Hopper). MXFP8 is for Blackwell in data centres: 12.0 lacks a part of it."""
    own = {9: Fp8Recipe.blockwise, 10: Fp8Recipe.mxfp8, 11: Fp8Recipe.mxfp8}.get(int(capability), Fp8Recipe.tensorwise)
    return own if model.fp8_recipe is Fp8Recipe.auto else model.fp8_recipe


def fp8_token_multiple(config: Any) -> int:
    """Tokens of each rank are a multiple of this, by Megatron-Core's config. Blocks are whole on a rank whose tokens others gather."""
    if config.fp8_recipe == Fp8Recipe.mxfp8:
        return 128 if config.tp_comm_overlap else 32
    return 128 if config.fp8_recipe == Fp8Recipe.blockwise and config.sequence_parallel else 16


def check_fp8(a: Architecture, model: ModelConfig, parallel: ParallelConfig, recipe: Fp8Recipe) -> None:
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
        if size % FP8_MULTIPLES[recipe]:
            others = [other.value for other, multiple in FP8_MULTIPLES.items() if not any(own % multiple for own in sizes.values())]
            allowed = f"model.fp8_recipe={' or '.join(others)}" if others else "model.fp8=false"
            raise ConfigError(f"{setting}: {name} on a rank is {size}, not a multiple of {FP8_MULTIPLES[recipe]}; allowed: {allowed}")
