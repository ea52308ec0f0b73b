"""What training, weights, checkpoints and heads require of a chunk: this rank's part of a model, whoever made its layers. And what holds
of every chunk: its parameters' names in the whole model, and the exchange of updated weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from aligner.data.vision import Vision
from aligner.models.config import Architecture, LoraConfig
from aligner.models.modules.scalar_head import ScalarHead
from aligner.parallel.logprobs import Arithmetic
from aligner.parallel.mcore import ProcessGroupCollection, TransformerConfig
from aligner.types import Batch

_GROUPED_EXPERT = re.compile(r"(.*\.mlp\.experts\.)(linear_fc[12]\.)(weight|bias)(\d+)")
_FUSED_NORMS = {
    ".self_attention.linear_qkv.layer_norm_": ".input_layernorm.",
    ".mlp.linear_fc1.layer_norm_": ".pre_mlp_layernorm.",
}


class Chunk(Protocol):
    """A torch module whose `forward` gives hidden states; the model is a pipeline of chunks."""

    config: TransformerConfig
    architecture: Architecture
    lora: LoraConfig
    head: ScalarHead | None  # of a value or reward model; None for a language model
    base: str  # directory, or name on the Hub, of the weights that adapters belong to; empty: random ones
    base_digest: str  # distinguishes these weights from others
    wrapper: Mapping[str, str]  # of a text part: what a marker says of the model around it, which exports restore; empty: there is none
    vision: Vision | None  # reads the images of rows
    trains_vision: bool  # whether a parameter is trained that only rows with images have a gradient for
    gather: WeightGather | None  # of updated weights between replicas; None if updates wait for it
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

    def see(self, batch: Batch, images: Tensor, token_of: Tensor) -> Any:
        """What `forward` takes as `images`, from the `Images` of a micro-batch's rows on the host: for slots of the model's input that hold
        these of the rows' tokens (flat numbers; -1: none). None if no row has an image.

        Raises ConfigError if the model cannot see, DataError if an image cannot be read.
        """

    def settle(self) -> None:
        """Wait for weights that an update has left under way between the replicas; whatever reads weights beside `forward` calls it."""

    def whole_sequences(self, hidden: Tensor, *, grads_are_partial: bool) -> Tensor:
        """[S, B, H] without the split of sequence parallelism; `grads_are_partial`: ranks contribute parts of the gradient."""


@runtime_checkable
class WholeChunk(Chunk, Protocol):
    """A chunk that is the whole model on every rank, and knows how its files are read and written."""

    def read_files(self, directory: Path, *, with_head: bool) -> None:
        """Fill the chunk from the files of a Hugging Face directory; a head that they lack keeps its initialisation, and every head does
        without `with_head`."""

    def file_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name in Hugging Face's files, tensor) of the whole model with its adapters merged; the head's, by our names, last."""


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


def global_name(chunk: Chunk, name: str) -> str:
    """The parameter's name in the whole model: this chunk's layers and this rank's experts are numbered from where they start.

    Transformer Engine's names for norms that it fuses with the matrix behind them are those of the norms, and those of experts that are one
    module are the experts' own.
    """
    name = _GROUPED_EXPERT.sub(r"\1local_experts.\4.\2\3", name)
    for fused, plain in _FUSED_NORMS.items():
        name = name.replace(fused, plain)
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(chunk.decoder.layers[int(parts[2])].layer_number - 1)
    if "local_experts" in parts:
        place = parts.index("local_experts") + 1
        ep = chunk.pg_collection.ep
        parts[place] = str(int(parts[place]) + ep.rank() * (chunk.architecture.num_experts // ep.size()))
    return ".".join(parts)


class WeightGather:
    """Updated weights travel between data-parallel replicas while the next batch is prepared and the first layers already compute.

    With a distributed optimizer (ZeRO stage 1; Rajbhandari et al. 2020, 1910.02054) a rank updates its share of each bucket of weights, and
    an all-gather exchanges the shares. Here `start` issues it for all buckets in the order in which a forward pass needs them, a layer
    waits for its own buckets, and everything else that reads weights calls `finish` first (`Chunk.settle`). All ranks issue the same
    collectives in the same order; the numbers are those of the synchronous exchange. Megatron-Core's own hooks would leave the others
    waiting for a replica without rows in a validation batch, and miss what is read without a module's call: the output layer's weight, an
    adapter's B. `runner`: the chunk's DistributedDataParallel, made with `overlap_param_gather`.
    """

    def __init__(self, runner: Any) -> None:
        runner.disable_forward_pre_hook(param_sync=False)
        group_of = runner.param_to_bucket_group
        everything = (*runner.bucket_groups, *runner.expert_parallel_bucket_groups)
        order: dict[Any, None] = {}
        for module, parameters in _readers(runner.module):
            groups = list(dict.fromkeys(group_of[p] for p in parameters if p in group_of))
            order |= dict.fromkeys(groups)
            if groups:
                module.register_forward_pre_hook(lambda *_, groups=groups: _finish_gathers(groups))
        self._groups_in_order = [*order, *(group for group in everything if group not in order)]
        runner.module.register_forward_hook(lambda *_: self.finish())  # what heads read of the chunk

    def start(self) -> None:
        """Issue the gathers; after an update of the weights, on every rank."""
        for group in self._groups_in_order:
            group.start_param_sync()

    def finish(self) -> None:
        """Wait until all weights are there (on a GPU the stream waits, not the host). Does nothing where they are."""
        _finish_gathers(self._groups_in_order)


def _readers(chunk: Any) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """(module, the parameters that its forward pass may read) in the order of a pass through the chunk."""
    whole = [*([chunk.embedding] if chunk.pre_process else []), *chunk.decoder.layers]
    inside = {id(module) for one in whole for module in one.modules()}
    for one in whole:
        yield one, list(one.parameters())
    for module in chunk.modules():
        if id(module) not in inside:
            yield module, list(module.parameters(recurse=False))


def _finish_gathers(groups: Iterable[Any]) -> None:
    for group in groups:
        if group.param_gather_handle is not None:
            group.finish_param_sync(skip_next_bucket_dispatch=True)
