"""Random weights that do not depend on the layout: every tensor is drawn whole, by a generator of its own, and then cut.

So a model from scratch is the same with any tensor, pipeline or expert parallel size, and no two pipeline stages draw the same numbers.
Standard deviations are GPT-2's and Megatron-Core's: `initializer_range`, over sqrt(2 layers) for what is added to the residual stream.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

import torch
from torch import Tensor

from aligner.models.config import Normalization
from aligner.models.families.mapping import ADAPTER, EMBEDDING, OUTPUT_LAYER, Layout, shard
from aligner.models.modules.chunk import global_name
from aligner.models.modules.layer_kinds import KINDS, SPLIT_INPUTS
from aligner.models.modules.scalar_head import HEAD

_RESIDUAL = tuple(f"{name}.weight" for name in SPLIT_INPUTS)
_DECAY = "self_attention.A_log"
_ONES = tuple(f"self_attention.{name}" for kind in KINDS for name in kind.ones)


def initialise(chunks: list[Any], seed: int) -> None:
    """Fill the parameters of a model's chunks, but for a scalar model's head and for adapters. Norms start at one, biases at zero."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if name.startswith(HEAD) or ADAPTER in name or parameter.device.type == "meta":
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
    # Megatron marks split parameters with an attribute that others do not have at all.
    split = "tensor_model_parallel" in parameter.__dict__ and parameter.tensor_model_parallel
    group = chunk.pg_collection.expt_tp if "local_experts" in unique else chunk.pg_collection.tp
    shape = list(parameter.shape)
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
    parameter.copy_(full)
