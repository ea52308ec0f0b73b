"""The weights that a rollout engine computes with, by role: the training parameters in place, or the engine's own in another split.

Reading in place costs nothing and needs no refit. The engine needs its own weights if the training layout leaves a rank without all
layers or experts (pipeline, expert parallelism), or splits them over another number of ranks. Names are global, as in
`models.initialise`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from aligner.models.config import Architecture, ParallelResidual, PositionEmbedding
from aligner.models.families import weight_names
from aligner.models.families.mapping import ADAPTER, EMBEDDING, OUTPUT_LAYER, OUTPUT_PROJECTION, PROJECTION, Layout
from aligner.models.modules.build import LanguageModel
from aligner.models.modules.chunk import global_name
from aligner.models.weights.shards import Place, all_places, tensor_group
from aligner.parallel.reshard import Move, Sharding, even, grouped, padded, replicated

POSITIONS = "embedding.position_embeddings.weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class Affine:
    """Weight and bias of a linear layer or a norm; bias None if there is none."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedForward:
    """A dense layer's, or an expert's, two matrices; `up` is `[gate; up]` if the model gates."""

    up: Affine
    down: Affine


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentWeights:
    """Of latent attention; `q_down` is None where queries have no latent. The projections onto latents are whole on every rank."""

    q_down: Tensor | None
    q_norm: Affine | None
    q_up: Tensor
    kv_down: Tensor
    kv_norm: Affine
    kv_up: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaWeights:
    """Of a gated delta net, this rank's heads: names as in `aligner.models.modules.gated_delta_net`."""

    qkvz: Tensor
    ba: Tensor
    conv: Tensor  # [channels, 1, W]
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """One layer's parameters on this rank; what the architecture lacks is None or empty. Without a router there is one expert: the MLP."""

    input_norm: Affine | None
    qkv: Affine | None  # None with a latent, and in a delta net
    latent: LatentWeights | None
    delta: DeltaWeights | None
    q_norm: Affine | None
    k_norm: Affine | None
    attention_out: Affine
    post_attention_norm: Affine | None
    mlp_norm: Affine | None
    post_mlp_norm: Affine | None
    sinks: Tensor | None  # a learned score of each head of this rank, [heads]
    router: Affine | None
    router_bias: Tensor | None
    experts: tuple[FeedForward, ...]
    shared: FeedForward | None  # what every token passes beside its experts
    shared_gate: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelWeights:
    """All layers, and the rows of the vocabulary that this rank holds; `output` may have rows of padding after the real ones."""

    embedding: Tensor
    positions: Tensor | None
    layers: tuple[LayerWeights, ...]
    final_norm: Affine | None
    output: Tensor
    projections: tuple[Tensor, Tensor] | None = None  # behind the embedding, and in front of the output layer


def tensors(weights: ModelWeights) -> Iterator[Tensor]:
    """All of them, in an order that is always the same."""
    yield from (weights.embedding, weights.output)
    if weights.positions is not None:
        yield weights.positions
    yield from weights.projections or ()
    affines = [weights.final_norm] if weights.final_norm is not None else []
    for layer in weights.layers:
        affines += [layer.attention_out]
        norms = layer.input_norm, layer.mlp_norm, layer.q_norm, layer.k_norm, layer.post_attention_norm, layer.post_mlp_norm
        affines += [affine for affine in (layer.qkv, layer.router, *norms) if affine is not None]
        affines += [affine for expert in (*layer.experts, layer.shared) if expert for affine in (expert.up, expert.down)]
        matrices = [layer.sinks, layer.router_bias, layer.shared_gate]
        if (latent := layer.latent) is not None:
            matrices += [latent.q_down, latent.q_up, latent.kv_down, latent.kv_up]
            affines += [norm for norm in (latent.q_norm, latent.kv_norm) if norm is not None]
        if (delta := layer.delta) is not None:
            matrices += [delta.qkvz, delta.ba, delta.conv, delta.a_log, delta.dt_bias, delta.norm]
        yield from (matrix for matrix in matrices if matrix is not None)
    for affine in affines:
        yield affine.weight
        if affine.bias is not None:
            yield affine.bias


def by_role(tensors: Mapping[str, Tensor], architecture: Architecture) -> ModelWeights:
    """The named tensors of a whole model (of one rank of a split) in the places where the decoder looks for them."""

    def affine(name: str, *, bias: bool) -> Affine:
        return Affine(weight=tensors[name + ".weight"], bias=tensors[name + ".bias"] if bias else None)

    return ModelWeights(
        embedding=tensors[EMBEDDING],
        positions=tensors[POSITIONS] if architecture.position_embedding == PositionEmbedding.learned else None,
        layers=tuple(_layer(number, affine, tensors, architecture) for number in range(architecture.num_layers)),
        final_norm=None if architecture.residual_norms else affine("decoder.final_layernorm", bias=architecture.normalization.has_bias),
        output=tensors[EMBEDDING if architecture.tied_embeddings else OUTPUT_LAYER],
        projections=(tensors[PROJECTION], tensors[OUTPUT_PROJECTION]) if architecture.embedding_size else None,
    )


def _layer(number: int, affine: Callable[..., Affine], tensors: Mapping[str, Tensor], architecture: Architecture) -> LayerWeights:
    prefix, mixture = f"decoder.layers.{number}.", architecture.has_experts(number)
    norm_bias, bias = architecture.normalization.has_bias, architecture.linear_bias
    own_norm = architecture.pre_norms and architecture.parallel_residual != ParallelResidual.shared_norm

    behind = architecture.post_norms or architecture.residual_norms

    def norm(name: str, present: bool) -> Affine | None:
        return affine(prefix + name, bias=norm_bias) if present else None

    linear = architecture.is_linear(number)
    attention_bias, out = bias or architecture.attention_out_bias, "linear_out" if linear else "linear_proj"
    mlp_bias = bias or (architecture.expert_biases if mixture else architecture.mlp_bias)
    experts = [f"mlp.experts.local_experts.{number}." for number in range(architecture.num_experts)] if mixture else ["mlp."]

    def feed_forward(mlp: str) -> FeedForward:
        return FeedForward(up=affine(prefix + mlp + "linear_fc1", bias=mlp_bias), down=affine(prefix + mlp + "linear_fc2", bias=mlp_bias))

    return LayerWeights(
        input_norm=norm("input_layernorm", architecture.pre_norms),
        qkv=None
        if architecture.latent_size or linear
        else affine(prefix + "self_attention.linear_qkv", bias=bias or architecture.qkv_bias),
        latent=_latent(prefix + "self_attention.", affine, tensors, architecture) if architecture.latent_size else None,
        delta=_delta(prefix + "self_attention.", tensors) if linear else None,
        q_norm=norm("self_attention.q_layernorm", architecture.qk_norm and not linear),
        k_norm=norm("self_attention.k_layernorm", architecture.qk_norm and not linear),
        attention_out=affine(f"{prefix}self_attention.{out}", bias=attention_bias and not linear),
        post_attention_norm=norm("post_attention_layernorm", behind),
        mlp_norm=norm("pre_mlp_layernorm", own_norm),
        post_mlp_norm=norm("post_mlp_layernorm", behind),
        sinks=tensors[prefix + "self_attention.core_attention.sinks"] if architecture.attention_sinks else None,
        router=affine(prefix + "mlp.router", bias=architecture.expert_biases) if mixture else None,
        router_bias=tensors[prefix + "mlp.router.expert_bias"] if mixture and architecture.router_bias else None,
        experts=tuple(feed_forward(mlp) for mlp in experts),
        shared=feed_forward("mlp.shared_experts.") if mixture and architecture.shared_ffn_hidden_size else None,
        shared_gate=tensors[prefix + "mlp.shared_experts.gate_weight"] if mixture and architecture.shared_expert_gate else None,
    )


def _latent(prefix: str, affine: Callable[..., Affine], tensors: Mapping[str, Tensor], architecture: Architecture) -> LatentWeights:
    own = architecture.query_latent_size > 0
    return LatentWeights(
        q_down=tensors[prefix + "linear_q_down_proj.weight"] if own else None,
        q_norm=affine(prefix + "q_layernorm", bias=False) if own else None,
        q_up=tensors[prefix + ("linear_q_up_proj" if own else "linear_q_proj") + ".weight"],
        kv_down=tensors[prefix + "linear_kv_down_proj.weight"],
        kv_norm=affine(prefix + "kv_layernorm", bias=False),
        kv_up=tensors[prefix + "linear_kv_up_proj.weight"],
    )


def _delta(prefix: str, tensors: Mapping[str, Tensor]) -> DeltaWeights:
    return DeltaWeights(
        qkvz=tensors[prefix + "linear_qkvz.weight"],
        ba=tensors[prefix + "linear_ba.weight"],
        conv=tensors[prefix + "conv_weight"],
        a_log=tensors[prefix + "A_log"],
        dt_bias=tensors[prefix + "dt_bias"],
        norm=tensors[prefix + "out_norm.weight"],
    )


def named_parameters(chunks: Sequence[LanguageModel]) -> dict[str, Tensor]:
    """This rank's training parameters by global name, without adapters'.

    The last stage's copy of a tied embedding is left out: the first stage has it.
    """
    return {
        global_name(chunk, name): parameter
        for chunk in chunks
        for name, parameter in chunk.named_parameters()
        if ADAPTER not in name and not (name == OUTPUT_LAYER and chunk.share_embeddings_and_output_weights)
    }


def moves(chunks: Sequence[LanguageModel], *, tp: int) -> list[Move]:
    """How every tensor of the model gets from the training layout to `tp` tensor-parallel ranks: the same list on every rank.

    Collective over each pipeline group. Raises ConfigError if the model's sizes cannot be split over `tp` ranks.
    """
    chunk = chunks[0]
    found = []
    for place in all_places(chunks):
        source, target = _shardings(place, chunk.architecture, old_tp=tensor_group(chunk, place).size(), tp=tp)
        found.append(
            Move(
                name=place.name,
                shape=place.shape,
                dtype=place.dtype,
                source=source,
                target=target,
                stage=place.stage,
                expert_rank=place.expert_rank,
            )
        )
    return found


def _shardings(place: Place, architecture: Architecture, *, old_tp: int, tp: int) -> tuple[Sharding, Sharding]:
    """(training, rollout): rank by rank what is held of the full tensor."""
    dim = place.split_dim
    if dim is None:
        return replicated(place.shape[0]), replicated(place.shape[0])
    size = place.shape[dim] * old_tp
    layout = weight_names(architecture).find(place.name).layout
    if layout == Layout.vocabulary:
        # The training layout's padding where it fits: then equal splits stay equal and nothing need be gathered.
        rows = size if size % tp == 0 else -(-architecture.vocab_size // tp) * tp
        return even(size, old_tp), padded(architecture.vocab_size, rows, tp)
    if layout.is_qkv:
        groups = architecture.num_key_value_heads
        heads = architecture.num_attention_heads * (1 + architecture.attention_gate)  # a gate is a head's width, and beside its query
        return even(size, old_tp), grouped(groups, heads // groups, architecture.head_dim, tp)
    return even(size, old_tp, dim=dim, blocks=layout.blocks), even(size, tp, dim=dim, blocks=layout.blocks)


def held_here(move: Move, chunk: LanguageModel) -> bool:
    """Whether this rank has a shard of the tensor in training."""
    groups = chunk.pg_collection
    return groups.pp.rank() == move.stage and move.expert_rank in (None, groups.ep.rank())


def usable_in_place(chunk: LanguageModel, *, tp: int) -> bool:
    """Whether every rank holds, for `tp` ranks that share the model in rollouts, all that it needs: it can read the training parameters.

    Not those of a model with adapters: the engine computes with weights that have them in.
    """
    groups, architecture = chunk.pg_collection, chunk.architecture
    if chunk.lora.is_on:
        return False
    same = groups.tp.size() == tp and groups.pp.size() == 1 and architecture.num_key_value_heads % tp == 0
    if not architecture.num_experts:
        return same
    return same and groups.ep.size() == 1 and groups.expt_tp.size() == tp
