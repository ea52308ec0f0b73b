"""What training, weights, checkpoints and heads require of a chunk: this rank's part of a model, whoever made its layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from aligner.models.config import Architecture, LoraConfig
from aligner.models.modules.scalar_head import ScalarHead
from aligner.parallel.logprobs import Arithmetic
from aligner.parallel.mcore import ProcessGroupCollection, TransformerConfig


class Chunk(Protocol):
    """A torch module whose `forward` gives hidden states; the model is a pipeline of chunks."""

    config: TransformerConfig
    architecture: Architecture
    lora: LoraConfig
    head: ScalarHead | None  # of a value or reward model; None for a language model
    base: str  # directory, or name on the Hub, of the weights that adapters belong to; empty: random ones
    base_digest: str  # distinguishes these weights from others
    gather: Any  # of updated weights between replicas (`build.WeightGather`); None where an update waits for it
    pre_process: bool  # holds the embedding
    post_process: bool  # holds the final norm and the head
    share_embeddings_and_output_weights: bool
    pg_collection: ProcessGroupCollection
    decoder: Any  # `layers`: each has `layer_number`, from 1 in the whole model, and `mlp`, with a `router` in mixtures

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]: ...

    def named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]: ...

    def get_submodule(self, target: str) -> torch.nn.Module: ...

    def get_parameter(self, target: str) -> torch.nn.Parameter: ...

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any: ...

    def sharded_state_dict(self) -> dict[str, Any]:
        """For checkpoints: every parameter with its place in the whole model."""

    def settle(self) -> None:
        """Wait for weights that an update has left under way between the replicas; whatever reads weights beside `forward` calls it."""

    def whole_sequences(self, hidden: Tensor, *, grads_are_partial: bool) -> Tensor:
        """[S, B, H] without the split of sequence parallelism; `grads_are_partial`: ranks contribute parts of the gradient."""


class LanguageChunk(Chunk, Protocol):
    """A chunk of a policy; the last stage's chunk has the output layer."""

    logits_chunk_size: int  # tokens whose logits exist at a time

    @property
    def arithmetic(self) -> Arithmetic:
        """That of the output layer."""

    @property
    def output_parameter(self) -> Tensor:
        """The output layer's weight with its padding."""

    def vocabulary_weight(self) -> tuple[Tensor, int]:
        """(this rank's rows of the output layer without padding [V_local, H], the token id of the first row)."""


class ScalarChunk(Chunk, Protocol):
    """A chunk of a value or reward model; the last stage's chunk has the linear head, in float32."""

    head: ScalarHead
    score_head: torch.nn.Linear
