"""Token embeddings and an output layer of another width than the residual stream, with a matrix between each and the layers (OPT-350M)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.parallel.mcore import (
    ColumnParallelLinear,
    GPTModel,
    TransformerConfig,
    VocabParallelEmbedding,
    make_sharded_tensors_for_checkpoint,
    parallel_state,
)


def narrow(model: GPTModel, size: int) -> None:
    """Replace the embedding and the output layer of a chunk, as far as it has them, by ones of this width."""
    config = model.config
    if model.pre_process:
        model.embedding.word_embeddings = ProjectedEmbedding(model.vocab_size, size, config=config, tp_group=model.pg_collection.tp)
    if model.post_process:
        model.output_layer = ColumnParallelLinear(
            size,
            model.vocab_size,
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=not model.parallel_output,
            skip_weight_param_allocation=model.pre_process and model.share_embeddings_and_output_weights,
            tp_group=model.pg_collection.tp,
        )
        model.output_projection = _linear(config, config.hidden_size, size)
        # Every tensor-parallel rank projects its part of the tokens: the gradients are summed.
        model.output_projection.weight.sequence_parallel = config.sequence_parallel


class ProjectedEmbedding(VocabParallelEmbedding):
    """A vocabulary of `size` numbers a token, projected to the residual stream. The projection is whole on every tensor-parallel rank, and
    so is its gradient: Megatron-Core splits the tokens behind it."""

    def __init__(self, vocab_size: int, size: int, *, config: TransformerConfig, tp_group: Any) -> None:
        super().__init__(vocab_size, size, init_method=config.embedding_init_method, config=config, tp_group=tp_group)
        self.projection = _linear(config, size, config.hidden_size)

    def forward(self, input_: Tensor) -> Tensor:
        """[B, S] -> [B, S, H]."""
        return F.linear(super().forward(input_), self.projection.weight)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """For checkpoints: the rows by their rank's share, and the projection."""
        groups = {"tp_group": parallel_state.get_tensor_model_parallel_group(), "dp_cp_group": parallel_state.get_data_parallel_group(True)}
        own = {"projection.weight": self.projection.weight}
        projection = make_sharded_tensors_for_checkpoint(own, prefix, {}, sharded_offsets, **groups)
        return super().sharded_state_dict(prefix, sharded_offsets, metadata) | projection


def _linear(config: TransformerConfig, inputs: int, outputs: int) -> torch.nn.Linear:
    device = None if config.use_cpu_initialization else torch.cuda.current_device()
    return torch.nn.Linear(inputs, outputs, bias=False, dtype=config.params_dtype, device=device)
