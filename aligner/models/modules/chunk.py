"""This rank's part of a model, whoever made its layers: what training, weights, checkpoints and heads require of it, the names of its
parameters in the whole model, and the exchange of updated weights.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from aligner.data.vision import Vision
from aligner.models.config import Architecture, LoraConfig, Quantization
from aligner.models.modules.scalar_head import VALUES, HeadGradient, ScalarHead
from aligner.parallel.exact import EXACT
from aligner.parallel.logprobs import FAST, ROUNDED, Arithmetic
from aligner.parallel.mcore import MegatronModule, ProcessGroupCollection, gather_from_sequence_parallel_region
from aligner.types import Batch

_GROUPED_EXPERT = re.compile(r"(.*\.mlp\.experts\.)(linear_fc[12]\.)(weight|bias)(\d+)")
_FUSED_NORMS = {
    ".self_attention.linear_qkv.layer_norm_": ".input_layernorm.",
    ".mlp.linear_fc1.layer_norm_": ".pre_mlp_layernorm.",
}


class Chunk(MegatronModule, ABC):
    """A module whose `forward` gives hidden states; the model is a pipeline of chunks."""

    architecture: Architecture
    lora: LoraConfig
    quantization: Quantization = Quantization.none  # of the linear layers under its adapters
    double_quantization = False  # whether its scales have 8 bits
    head: ScalarHead | None = None  # of a value or reward model; None for a language model
    value_gradient: HeadGradient | None = None  # of a policy's head of values, which is its `score_head`; None: it has none
    score_head: torch.nn.Linear  # in float32, in its last chunk
    base = ""  # directory, or name on the Hub, of the weights that adapters belong to; empty: random ones
    base_digest = ""  # distinguishes these weights from others
    wrapper: Mapping[str, str] = MappingProxyType({})  # of a text part: what a marker says of the model around it, which exports restore
    vision: Vision | None = None  # reads the images of rows
    trains_vision = False  # whether a parameter is trained that only rows with images have a gradient for
    gather: WeightGather | None = None  # of updated weights between replicas; None if updates wait for it
    pre_process: bool  # holds the embedding
    post_process: bool  # holds the final norm and the head
    share_embeddings_and_output_weights: bool
    pg_collection: ProcessGroupCollection
    decoder: Any  # `layers`: each has `layer_number`, from 1 in the whole model, and `mlp`, with a `router` in mixtures
    output_parameter: Tensor  # the output layer's weight with its padding, in a language model's last chunk
    logits_chunk_size: int  # tokens whose logits exist at a time
    batch_invariant: bool
    float32_logits: bool

    @property
    def gives_values(self) -> bool:
        """Whether its head is one of values, as a critic's or a policy's."""
        return self.value_gradient is not None or self.head == VALUES

    @abstractmethod
    def see(self, batch: Batch, images: Tensor, token_of: Tensor) -> Any:
        """What `forward` takes as `images`, from the `Images` of a micro-batch's rows on the host: for slots of the model's input that hold
        these of the rows' tokens (flat numbers; -1: none). None if no row has an image.

        Raises ConfigError if the model cannot see, DataError if an image cannot be read.
        """

    def settle(self) -> None:
        """Wait for weights that an update has left under way between the replicas; whatever reads weights beside `forward` calls it."""
        if self.gather is not None:
            self.gather.finish()

    def whole_sequences(self, hidden: Tensor, *, grads_are_partial: bool) -> Tensor:
        """[S, B, H] without the split of sequence parallelism; `grads_are_partial`: ranks contribute parts of the gradient."""
        if not self.config.sequence_parallel:
            return hidden
        return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=grads_are_partial)

    @property
    def arithmetic(self) -> Arithmetic:
        """That of the output layer."""
        return EXACT if self.batch_invariant else FAST if self.float32_logits else ROUNDED

    def vocabulary_weight(self) -> tuple[Tensor, int]:
        """(this rank's rows of the output layer without padding [V_local, H], the token id of the first row); for the last stage."""
        weight = self.output_parameter
        start = self.pg_collection.tp.rank() * weight.shape[0]
        return weight[: max(0, min(weight.shape[0], self.architecture.vocab_size - start))], start


class WholeChunk(Chunk):
    """A chunk that is the whole model on every rank, and knows how its files are read and written."""

    @abstractmethod
    def read_files(self, directory: Path, *, with_head: bool, then: Callable[[str], None] | None = None) -> None:
        """Fill the chunk from a Hugging Face directory; a head that it lacks, and every one without `with_head`, stays as it is.

        `then` gets the name of each parameter as soon as it is filled: a packed one is dense until it returns, one at a time."""

    @abstractmethod
    def file_tensors(self, *, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
        """(name in Hugging Face's files, tensor) of the whole model, if `merged` with its adapters; the head's, by our names, last, without
        a policy's head of values."""


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

    With a distributed optimizer (ZeRO stage 1, 1910.02054) a rank updates its share of each bucket of weights. `start` issues all gathers
    in the order in which a forward pass needs them, a layer waits for its own, and everything else that reads weights calls
    `finish` first (`Chunk.settle`). Megatron-Core's own hooks would leave the others waiting for a replica without rows in a validation
    batch, and miss what is read without a module's call: the output layer's weight, an adapter's B. `runner`: the chunk's
    DistributedDataParallel, made with `overlap_param_gather`.
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
