"""From a model config to a Megatron-Core module with its head: language model, value model or reward model.

The module's `forward` gives the final hidden states, `[S, B, H]` whole sequences on every tensor-parallel rank; what a task needs of them
(log-probs, values, scores) is computed by `aligner.models.heads`, so that the full logits never exist.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.errors import ConfigError
from aligner.models.config import Architecture, Dtype, ModelConfig
from aligner.models.layers import block_spec
from aligner.parallel import platform
from aligner.parallel.mcore import GPTModel, TransformerConfig, gather_from_sequence_parallel_region
from aligner.parallel.topology import ParallelConfig


def check_divisible(architecture: Architecture, parallel: ParallelConfig) -> None:
    """Raise ConfigError where the model has no vocabulary, or a size of it cannot be split over the tensor-parallel ranks."""
    if architecture.vocab_size < 1:
        raise ConfigError(f"architecture.vocab_size={architecture.vocab_size}: must be at least 1 (the tokenizer's size, usually)")
    for name in ("num_attention_heads", "ffn_hidden_size", "hidden_size"):
        value = getattr(architecture, name)
        if value % parallel.tp:
            raise ConfigError(f"parallel.tp={parallel.tp}: does not divide the model's {name}={value}")
    groups = architecture.num_key_value_heads
    if groups % parallel.tp and parallel.tp % groups:
        raise ConfigError(f"parallel.tp={parallel.tp}: must divide, or be a multiple of, the model's num_key_value_heads={groups}")


def resolve_dtype(dtype: Dtype) -> torch.dtype:
    """The torch dtype that a config asks for."""
    return platform.default_dtype() if dtype == Dtype.auto else {Dtype.float32: torch.float32, Dtype.bfloat16: torch.bfloat16}[dtype]


def padded_vocab_size(vocab_size: int, *, divisor: int, tp: int) -> int:
    """The vocabulary rounded up to a multiple of `divisor` that the tensor-parallel ranks can share equally.

    The same for every tp that divides `divisor`: the padding draws from the random stream, so a model from scratch then starts alike.
    """
    multiple = math.lcm(divisor, tp)
    return math.ceil(vocab_size / multiple) * multiple


def transformer_config(architecture: Architecture, parallel: ParallelConfig, dtype: torch.dtype, *, load: bool) -> TransformerConfig:
    """Megatron-Core's config. `load` skips random initialisation (weights will be read); never through `perform_initialization=False`,
    which also leaves out the tensor-parallel attributes and so corrupts gradient norms."""
    skip: dict[str, Any] = {"init_method": _keep, "output_layer_init_method": _keep} if load else {}
    return TransformerConfig(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        num_attention_heads=architecture.num_attention_heads,
        num_query_groups=architecture.num_key_value_heads,
        kv_channels=architecture.head_dim,
        ffn_hidden_size=architecture.ffn_hidden_size,
        gated_linear_unit=True,
        activation_func=F.silu,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.norm_eps,
        add_bias_linear=False,
        add_qkv_bias=architecture.qkv_bias,
        qk_layernorm=architecture.qk_norm,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        init_method_std=architecture.initializer_range,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=parallel.tp,
        sequence_parallel=parallel.sequence_parallel,
        calculate_per_token_loss=True,  # gradients of sums; divided once by the global count
        use_cpu_initialization=not torch.cuda.is_available() or not load,  # the same weights for every tp
        # Fusions that need CUDA extensions, or whose backward is in bf16 (cross-entropy), stay off.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        cross_entropy_loss_fusion=False,
        **skip,
    )


def _keep(weight: Tensor) -> Tensor:
    return weight


class Transformer(GPTModel):
    """A GPTModel that ends at the hidden states; the output layer holds weights only."""

    def __init__(self, architecture: Architecture, model: ModelConfig, parallel: ParallelConfig, *, load: bool, tied: bool) -> None:
        config = transformer_config(architecture, parallel, resolve_dtype(model.dtype), load=load)
        self.architecture = architecture
        self.logits_chunk_size = model.logits_chunk_size
        super().__init__(
            config,
            block_spec(config),
            vocab_size=padded_vocab_size(architecture.vocab_size, divisor=model.make_vocab_divisible_by, tp=parallel.tp),
            max_sequence_length=model.seq_length or architecture.max_position_embeddings,
            position_embedding_type="rope",
            rotary_base=architecture.rope_theta,
            rope_scaling=bool(architecture.rope_llama3_factor),
            rope_scaling_factor=architecture.rope_llama3_factor or 8.0,
            share_embeddings_and_output_weights=tied,
        )

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return hidden_states

    def whole_sequences(self, hidden: Tensor, *, grads_are_partial: bool) -> Tensor:
        """[S, B, H] of whole sequences from what `forward` returned; `grads_are_partial` where ranks contribute parts of the gradient."""
        if not self.config.sequence_parallel:
            return hidden
        return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=grads_are_partial)


class LanguageModel(Transformer):
    """A policy: the output layer is the embedding's transpose or a matrix of its own."""

    def __init__(self, architecture: Architecture, model: ModelConfig, parallel: ParallelConfig, *, load: bool) -> None:
        super().__init__(architecture, model, parallel, load=load, tied=architecture.tied_embeddings)

    def vocabulary_weight(self) -> tuple[Tensor, int]:
        """(this rank's rows of the output layer without padding [V_local, H], the token id of the first row)."""
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else self.output_layer.weight
        start = self.pg_collection.tp.rank() * weight.shape[0]
        return weight[: max(0, min(weight.shape[0], self.architecture.vocab_size - start))], start


class ScalarModel(Transformer):
    """A value or reward model: a linear head in float32 gives `num_outputs` numbers per position."""

    def __init__(
        self, architecture: Architecture, model: ModelConfig, parallel: ParallelConfig, *, load: bool, num_outputs: int = 1
    ) -> None:
        super().__init__(architecture, model, parallel, load=load, tied=True)  # tied: allocates no output layer
        device = self.embedding.word_embeddings.weight.device
        self.score_head = torch.nn.Linear(architecture.hidden_size, num_outputs, dtype=torch.float32, device=device)
        generator = torch.Generator(device="cpu").manual_seed(0)  # the same head on every rank
        with torch.no_grad():
            noise = torch.randn(self.score_head.weight.shape, generator=generator) / math.sqrt(architecture.hidden_size + 1)
            self.score_head.weight.copy_(noise)
            self.score_head.bias.zero_()
