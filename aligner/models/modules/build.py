"""From a model config to Megatron-Core modules with their head: language model, value model or reward model.

A rank holds a list of chunks: one, or several if the pipeline is interleaved. A chunk's `forward` gives hidden states.
`aligner.models.modules.heads` computes log-probs, values or scores from the last ones, so the full logits never exist.
"""

from __future__ import annotations

import copy
import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.errors import ConfigError
from aligner.models.architecture import rope
from aligner.models.architecture.divisible import fp8_token_multiple
from aligner.models.config import Architecture, ModelConfig, Normalization, Part, PositionEmbedding, Recompute, SeeingArchitecture
from aligner.models.families.mapping import ADAPTER, EMBEDDING, OUTPUT_LAYER, Layout, shard
from aligner.models.families.wrappers import TOWER
from aligner.models.modules.attention import WholeLinear, split_for_checkpoint
from aligner.models.modules.batch_invariant import INVARIANT
from aligner.models.modules.chunk import Chunk, global_name
from aligner.models.modules.heads import linear_head
from aligner.models.modules.layers import KINDS, ORDINARY, SPLIT_INPUTS, LayerModules, block_spec, finish_transformer_engine
from aligner.models.modules.linear import is_split, linear_weight
from aligner.models.modules.lora import attach
from aligner.models.modules.megatron_config import transformer_config
from aligner.models.modules.noise import Noise
from aligner.models.modules.packed import nest, packed_modules
from aligner.models.modules.scalar_head import HEAD, ScalarHead
from aligner.models.modules.shared_prompts import SegmentedPackedSeqParams
from aligner.models.modules.vision import Sight, features, freeze, in_slots, look, make_tower, sees_frozen
from aligner.models.training.placement import Splits, input_shape
from aligner.parallel import mcore, platform
from aligner.parallel.topology import ParallelConfig
from aligner.types import Batch


def padded_vocab_size(vocab_size: int, *, divisor: int, tp: int) -> int:
    """The vocabulary rounded up to a multiple of `divisor` that the tensor-parallel ranks can share equally."""
    multiple = math.lcm(divisor, tp)
    return math.ceil(vocab_size / multiple) * multiple


def rounded_scale(scale: float, dtype: torch.dtype) -> float:
    """What embeddings of this type are multiplied by: the scale has their precision, as in transformers."""
    return torch.tensor(scale, dtype=dtype, device="cpu").item()


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Which part of the pipeline a chunk is."""

    vp_stage: int | None  # None where the pipeline is not interleaved
    pre_process: bool  # holds the embedding
    post_process: bool  # holds the final norm and the head


def stages(parallel: ParallelConfig) -> list[Stage]:
    """The parts of the pipeline that this rank holds, in the order in which a micro-batch meets them."""
    numbers: list[int | None] = [None] if parallel.vpp == 1 else list(range(parallel.vpp))
    return [
        Stage(
            vp_stage=number,
            pre_process=mcore.parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=number),
            post_process=mcore.parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=number),
        )
        for number in numbers
    ]


def narrow(model: mcore.GPTModel, size: int) -> None:
    """Replace the embedding and the output layer of a chunk, as far as it has them, by ones of this width (OPT-350M)."""
    config = model.config
    if model.pre_process:
        model.embedding.word_embeddings = ProjectedEmbedding(model.vocab_size, size, config=config, tp_group=model.pg_collection.tp)
    if model.post_process:
        model.output_layer = mcore.ColumnParallelLinear(
            size,
            model.vocab_size,
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=not model.parallel_output,
            skip_weight_param_allocation=model.pre_process and model.share_embeddings_and_output_weights,
            tp_group=model.pg_collection.tp,
        )
        model.output_projection = WholeLinear(config, config.hidden_size, size)


class ProjectedEmbedding(mcore.VocabParallelEmbedding):
    """A vocabulary of `size` numbers a token, projected to the residual stream; the projection and its gradient are whole on every rank."""

    def __init__(self, vocab_size: int, size: int, *, config: mcore.TransformerConfig, tp_group: Any) -> None:
        super().__init__(vocab_size, size, init_method=config.embedding_init_method, config=config, tp_group=tp_group)
        self.projection = WholeLinear(config, size, config.hidden_size)
        self.projection.weight.sequence_parallel = False

    def forward(self, input_: Tensor) -> Tensor:
        """[B, S] -> [B, S, H]."""
        return F.linear(super().forward(input_), self.projection.weight)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        projection = split_for_checkpoint({"projection.weight": self.projection.weight}, prefix, sharded_offsets, splits=False)
        return super().sharded_state_dict(prefix, sharded_offsets, metadata) | projection


@contextmanager
def _naming_norms(config: mcore.TransformerConfig, architecture: Architecture) -> Iterator[None]:
    """While a model is made: Megatron-Core 0.19 takes the specification's norms of queries and keys only where its config has some. But in
    training it sums their gradients over tensor-parallel ranks there, each of which has its own of norms of all heads."""
    has_norms, config.qk_layernorm = config.qk_layernorm, architecture.qk_norm or architecture.qk_norm_of_heads or architecture.qk_l2_norm
    try:
        yield
    finally:
        config.qk_layernorm = has_norms


def _modules(model: ModelConfig) -> LayerModules:
    """What the local specification's layers are made of."""
    if model.batch_invariant:
        return INVARIANT
    return packed_modules(model.quantization) if model.quantization.is_on else ORDINARY


class Transformer(Chunk, mcore.GPTModel):
    """A GPTModel that ends at the hidden states; the output layer holds weights only."""

    _sight: tuple[Sight, Tensor | None] | None = None  # of the pass, with the tower's features on the first stage
    _noise: Noise | None = None  # of the pass

    def __init__(
        self,
        architecture: Architecture,
        model: ModelConfig,
        parallel: ParallelConfig,
        config: mcore.TransformerConfig,
        stage: Stage,
        *,
        has_vocabulary: bool = True,
    ) -> None:
        self.architecture = architecture
        self.logits_chunk_size = model.logits_chunk_size
        self.batch_invariant, self.float32_logits = model.batch_invariant, model.float32_logits and not model.batch_invariant
        self.lora, self.quantization, self.double_quantization = model.lora, model.quantization, model.double_quantization
        # Recomputed layers give no gradient if their input requires none, as the output of a frozen embedding.
        self._embedding_needs_gradient = model.lora.is_on and model.recompute is Recompute.full
        positions = architecture.max_position_embeddings
        learned = architecture.position_embedding == PositionEmbedding.learned
        with _naming_norms(config, architecture):
            super().__init__(
                config,
                block_spec(
                    config,
                    vp_stage=stage.vp_stage,
                    architecture=architecture,
                    share_prompts=model.share_prompts,
                    split_norms=model.lora.is_on,
                    modules=_modules(model),
                ),
                vocab_size=padded_vocab_size(architecture.vocab_size, divisor=model.make_vocab_divisible_by, tp=parallel.tp),
                max_sequence_length=positions + architecture.position_offset if learned else model.seq_length or positions,
                pre_process=stage.pre_process,
                post_process=stage.post_process,
                position_embedding_type="learned_absolute" if learned else "rope",
                rotary_percent=architecture.rotary_fraction,
                rotary_base=architecture.rope_theta,
                share_embeddings_and_output_weights=has_vocabulary and architecture.tied_embeddings,
                vp_stage=stage.vp_stage,
            )
        if learned:
            self.max_sequence_length = positions
        if architecture.rope_local_theta:
            self.rotary_local = copy.copy(self.rotary_pos_emb)
            self.rotary_local.inv_freq = rope.frequencies(rope.local(architecture), self.rotary_pos_emb.inv_freq.device)
        if rope.is_scaled(architecture) or architecture.latent_size:
            # Megatron-Core knows Llama 3.1's scaling alone, and of that one set of constants.
            old = self.rotary_pos_emb.inv_freq
            self.rotary_pos_emb.inv_freq = rope.frequencies(architecture, old.device, context=model.seq_length)
        if config.transformer_impl == "transformer_engine":
            finish_transformer_engine(self.decoder)
        if learned and stage.pre_process:
            positions = self.embedding.position_embeddings.weight  # Megatron-Core makes it in torch's default precision
            positions.data = positions.data.to(config.params_dtype)  # not Module.to: the planner's fake tensors cannot be swapped
        if self.double_quantization:
            nest(self)
        if isinstance(architecture, SeeingArchitecture):
            self._begin_to_see(architecture, model, parallel)
        if model.lora.is_on:
            attach(self, model.lora)

    def _begin_to_see(self, architecture: SeeingArchitecture, model: ModelConfig, parallel: ParallelConfig) -> None:
        if self.pre_process:
            self.visual = make_tower(architecture, model, self.config.params_dtype)
            if (layers := len(self.decoder.layers)) < architecture.deep_layers:
                wanted = f"its first {architecture.deep_layers} layers add features of images, and must be on the first one"
                raise ConfigError(f"parallel.pp={parallel.pp}: {layers} layers on the first stage: {wanted}")
        if self.config.transformer_impl == "transformer_engine" and model.packing and parallel.cp > 1:
            # Its rotary embedding would need the angles of all context-parallel ranks.
            raise ConfigError(f"model.packing=true: not for images with parallel.cp={parallel.cp} here; allowed: false, or layers=torch")
        self.trains_vision = not sees_frozen(architecture, model)
        self._embedding_needs_gradient |= Part.text in model.freeze and model.recompute is Recompute.full
        if not model.lora.is_on:  # adapters freeze all else, which may be packed
            freeze(self, architecture, model.freeze)

    def see(self, batch: Batch, images: Tensor, token_of: Tensor) -> Sight | None:
        if not isinstance(self.architecture, SeeingArchitecture):
            kind = self.architecture.family.value
            raise ConfigError(f"model.images=false: a {kind} model reads no images; allowed: true, or model.implementation=transformers")
        sight = look(self.architecture, self.vision, batch.tokens, batch.lengths, images)
        if sight is None:
            return None
        seen = sight.at(token_of)
        return (seen if self.pre_process else replace(seen, pixels=seen.pixels[:0])).to(platform.device())

    def forward(self, *args: Any, images: Sight | None = None, noise: Noise | None = None, **options: Any) -> Tensor:
        self._noise = noise
        if images is None:
            return super().forward(*args, **options)
        found = features(self.visual, images.pixels, images.grid) if self.pre_process else None
        feature_of, splits = images.feature_of, self.config.sequence_parallel
        if found is not None and splits:  # each rank embeds its part of the slots: the tower's gradient is the sum over the ranks
            found, tp = mcore.copy_to_tensor_model_parallel_region(found), self.pg_collection.tp
            feature_of = feature_of.chunk(tp.size(), dim=1)[tp.rank()]
        if found is not None and len(found) > 1:
            options["extra_block_kwargs"] = {"context": found[1:], "context_mask": feature_of.t()}
        self._sight = replace(images, feature_of=feature_of), found
        try:
            return super().forward(*args, **options)
        finally:
            self._sight = None

    def _preprocess(
        self, *args: Any, position_ids: Tensor | None = None, packed_seq_params: mcore.PackedSeqParams | None = None, **options: Any
    ) -> tuple:
        if position_ids is not None and self.architecture.position_offset:
            position_ids = position_ids + self.architecture.position_offset
        embedded, rotary, *rest = super()._preprocess(*args, position_ids=position_ids, packed_seq_params=packed_seq_params, **options)
        if self.architecture.embedding_scale != 1 and self.pre_process:
            embedded = embedded * rounded_scale(self.architecture.embedding_scale, embedded.dtype)
        if self._noise is not None and self.pre_process:
            tp = self.pg_collection.tp
            own = self._noise.part(tp.rank(), tp.size()) if self.config.sequence_parallel else self._noise
            embedded = own.added(embedded.transpose(0, 1)).transpose(0, 1).contiguous()
        if self.architecture.rope_local_theta:
            rotary = self.with_local_angles(rotary, packed=packed_seq_params is not None)
        is_segmented = isinstance(packed_seq_params, SegmentedPackedSeqParams)
        if self._sight is not None:
            sight, found = self._sight
            angles = rope.angles_of_axes(sight.positions, self.rotary_pos_emb.inv_freq, self.architecture)
            rotary = angles.transpose(0, 1)[:, :, None].contiguous()  # [L, rows, 1, D]
            if found is not None:
                embedded = in_slots(found[0], sight.feature_of.t(), embedded)
        elif rotary is not None and is_segmented:
            rotary = rotary[packed_seq_params.positions]  # slot by slot: a row continues behind its prompt, not at 0
        if rotary is not None and is_segmented:
            if packed_seq_params.cu_seqlens_q is None:  # [T, 1, D] for [T, heads, D]: Megatron-Core then looks for no sequences
                rotary = rotary.squeeze(1)
        if self._embedding_needs_gradient and self.pre_process and torch.is_grad_enabled() and not embedded.requires_grad:
            embedded = embedded.detach().requires_grad_()
        return (embedded, rotary, *rest)

    def with_local_angles(self, rotary: Tensor, *, packed: bool) -> Tensor:
        """The angles and, beside them, those of the layers with a window: one tensor, which passes through recomputation and can be indexed
        by position. Of padded rows each context-parallel rank has its part, of packed ones all."""
        length = rotary.shape[0] if packed else rotary.shape[0] * self.config.context_parallel_size
        return torch.cat([rotary, self.rotary_local(length, packed_seq=packed)], dim=-1)

    def setup_embeddings_and_output_layer(self) -> None:
        """Megatron-Core's, which ties the two, once they have the width of the model's vocabulary."""
        if self.architecture.embedding_size:
            narrow(self, self.architecture.embedding_size)
        super().setup_embeddings_and_output_layer()

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return self.output_projection(hidden_states) if self.post_process and self.architecture.embedding_size else hidden_states


class LanguageModel(Transformer):
    """A policy: the output layer is the embedding's transpose or a matrix of its own."""

    @property
    def output_parameter(self) -> Tensor:
        return self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else self.output_layer.weight


class ScalarModel(Transformer):
    """A value or reward model: a linear head in float32 gives as many numbers per position as `head` has outputs."""

    def __init__(self, architecture: Architecture, *args: Any, head: ScalarHead) -> None:
        super().__init__(architecture, *args, has_vocabulary=False)
        self.head = head
        if not self.post_process:
            return
        device = self.output_layer.weight.device
        self.output_layer = None  # nothing is projected onto the vocabulary
        self.score_head = linear_head(head, architecture.vocabulary_width, device, residual=architecture.hidden_size)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        # GPTModel's and LanguageModule's versions expect an output layer.
        return super(mcore.LanguageModule, self).sharded_state_dict(
            prefix, sharded_offsets, mcore.ensure_metadata_has_dp_cp_group(metadata)
        )


_RESIDUAL = tuple(f"{name}.weight" for name in SPLIT_INPUTS)
_DECAY = "self_attention.A_log"
_ONES = tuple(f"self_attention.{name}" for kind in KINDS for name in kind.ones)


def initialise(chunks: list[Any], seed: int) -> None:
    """Fill the parameters of a model's chunks, but for a scalar model's head and for adapters. Norms start at one, biases at zero.

    Every tensor is drawn whole, by a generator of its own, and then cut: a model from scratch is the same with any tensor, pipeline or
    expert parallel size, and no two pipeline stages draw the same numbers. Standard deviations are GPT-2's and Megatron-Core's:
    `initializer_range`, over sqrt(2 layers) for what is added to the residual stream.
    """
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if name.startswith((HEAD, TOWER)) or ADAPTER in name or parameter.device.type == "meta":
                continue
            with torch.no_grad():
                _fill(chunk, name, parameter, seed)


def _decays(chunk: Any, name: str, seed: int) -> Tensor:
    """This rank's logarithms of a delta net's decays, which are uniform up to 16, as in transformers."""
    generator = torch.Generator(device="cpu").manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    drawn = torch.empty(chunk.architecture.linear_value_heads, device="cpu").uniform_(0.01, 16, generator=generator)
    group = chunk.pg_collection.tp
    return drawn.log().chunk(group.size())[group.rank()]


def _fill(chunk: Any, name: str, parameter: Tensor, seed: int) -> None:
    unique = global_name(chunk, name)
    if unique.endswith(_DECAY):
        parameter.copy_(_decays(chunk, unique, seed))
        return
    if parameter.dim() == 1:
        if unique.endswith(_ONES):
            parameter.fill_(1.0)
            return
        is_norm = "norm" in unique and unique.endswith("weight")
        around_zero = chunk.architecture.normalization in (Normalization.layer_norm_1p, Normalization.rms_norm_1p)
        parameter.fill_(1.0 if is_norm and not around_zero else 0.0)
        return
    if unique == OUTPUT_LAYER and chunk.share_embeddings_and_output_weights:
        unique = EMBEDDING  # the last stage's copy of a tied embedding
    split = is_split(parameter)
    group = chunk.pg_collection.expt_tp if "local_experts" in unique else chunk.pg_collection.tp
    shape = list(linear_weight(parameter).shape)
    if split:
        shape[parameter.partition_dim] *= group.size()
    std = chunk.architecture.initializer_range
    if unique.endswith(_RESIDUAL):
        std /= math.sqrt(2.0 * chunk.architecture.num_layers)
    rows = chunk.architecture.vocab_size if unique in (EMBEDDING, OUTPUT_LAYER) else shape[0]
    number = zlib.crc32(f"{seed}/{unique}".encode())  # 32 bits: the generator does not look at more
    generator = torch.Generator(device="cpu").manual_seed(number)
    full = torch.zeros(shape, device="cpu")  # vocabulary padding, which depends on the layout, stays zero
    full[:rows] = torch.randn((rows, *shape[1:]), generator=generator, device="cpu") * std
    if split:
        layout = Layout.gate_up if unique.endswith("linear_fc1.weight") and chunk.architecture.gated_mlp else Layout.plain
        full = shard(layout, full, dim=parameter.partition_dim, num_shards=group.size(), index=group.rank())
    linear_weight(parameter).write(full)


def build_model(
    architecture: Architecture,
    model: ModelConfig,
    parallel: ParallelConfig,
    *,
    load: bool,
    head: ScalarHead | None = None,
    seed: int = 0,
) -> list[Any]:
    """This rank's chunks, with one config, of a policy or, with a `head`, of a value or reward model. Without `load` the weights are
    random, the same for every layout. With `parallel.tp_comm_overlap`, first make the buffers that Transformer Engine's layers need."""
    config = transformer_config(architecture, model, parallel)
    if parallel.tp_comm_overlap:
        multiple = fp8_token_multiple(config) if config.fp8 else 1
        splits = Splits(cp_size=parallel.cp, sequence_parallel_size=parallel.tp, packed=True, token_multiple=multiple)
        shape = (input_shape([model.micro_batch_tokens], splits)[1] // parallel.cp, config.hidden_size)
        mcore.initialize_user_buffers(shape, tp=parallel.tp, dtype=config.params_dtype, fp8=bool(config.fp8))
    kind = LanguageModel if head is None else partial(ScalarModel, head=head)
    chunks = [kind(architecture, model, parallel, config, stage) for stage in stages(parallel)]
    if not load:
        initialise(chunks, seed)
    return chunks
