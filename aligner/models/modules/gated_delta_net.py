"""Qwen3-Next's attention: gated delta nets (2412.06464) in most layers, and in the others attention with a gate on what it gives.

Megatron-Core's own delta net needs Transformer Engine and flash-linear-attention, and refuses packed rows; this one is of torch's
operations. A tensor-parallel rank has whole key heads with the value heads that they serve: the projections' rows, and here the
convolution's channels too, are ordered by key head ([query, key, values, gates] each). In a packed row every sequence begins with an empty
state and an empty window of the convolution, and a row that continues a shared prompt with the prompt's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.models.config import Architecture
from aligner.models.modules.attention import Segments, placed, split_for_checkpoint, split_parameter
from aligner.models.modules.delta_rule import Tokens, chunked, convolved
from aligner.models.modules.shared_prompts import SegmentedPackedSeqParams
from aligner.parallel import mcore
from aligner.types.rows import upload

_BY_HEAD = ("conv_weight", "A_log", "dt_bias")  # parameters of its own, of which each rank has its heads'


class GatedNorm(torch.nn.Module):
    """RMSNorm of each head, multiplied by silu(gate). Every rank norms its own heads: the weight's gradient is the sum of theirs."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: Any, group: Any) -> None:
        super().__init__()
        self.eps, self.group = eps, group
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=dtype, device=device))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """[..., D] of the same shapes."""
        return gated_norm(x, gate, mcore.copy_to_tensor_model_parallel_region(self.weight, group=self.group), self.eps)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension times silu(gate), in x's type."""
    normed = F.rms_norm(x.float(), weight.shape, eps=eps).to(x.dtype)
    return (weight * normed * F.silu(gate.float())).to(x.dtype)


def split_heads(mixed: Tensor, rates: Tensor, a: Architecture) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of the two projections' outputs [..., rows]: (what is convolved [..., channels], gates [..., value heads, V], the rates' logits, the
    decays' inputs [..., value heads]), of however many key heads there are."""
    share = a.linear_value_heads // a.linear_key_heads
    values = share * a.linear_value_head_dim
    by_head = mixed.unflatten(-1, (-1, 2 * a.linear_key_head_dim + 2 * values))
    convolved, gates = by_head.split([2 * a.linear_key_head_dim + values, values], dim=-1)
    rate, decay = rates.unflatten(-1, (-1, 2 * share)).chunk(2, dim=-1)
    return convolved.flatten(-2), gates.reshape(*gates.shape[:-2], -1, a.linear_value_head_dim), rate.flatten(-2), decay.flatten(-2)


def tokens_of(channels: Tensor, rate: Tensor, decay: Tensor, weights: tuple[Tensor, Tensor], a: Architecture) -> Tokens:
    """What the delta rule is of: [T, channels] behind the convolution, [T, value heads] of `split_heads`, and (A_log, dt_bias)."""
    share, (a_log, dt_bias) = a.linear_value_heads // a.linear_key_heads, weights
    key = a.linear_key_head_dim
    parts = F.silu(channels).unflatten(-1, (-1, 2 * key + share * a.linear_value_head_dim))
    queries, keys, values = parts.split([key, key, share * a.linear_value_head_dim], dim=-1)
    return Tokens(
        query=queries.repeat_interleave(share, dim=1),
        key=keys.repeat_interleave(share, dim=1),
        value=values.reshape(len(values), -1, a.linear_value_head_dim),
        decay=-a_log.float().exp() * F.softplus(decay.float() + dt_bias),
        rate=rate.sigmoid(),
    )


class GatedDeltaNet(mcore.MegatronModule):
    """In the place of a layer's self-attention. `column_linear` and `row_linear` are the layers' linear modules."""

    def __init__(
        self,
        config: mcore.TransformerConfig,
        *,
        architecture: Architecture,
        column_linear: type[torch.nn.Module],
        row_linear: type[torch.nn.Module],
        pg_collection: mcore.ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.architecture = a = architecture
        self.pg_collection = pg_collection or mcore.ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp"])
        tp = self.pg_collection.tp
        options = {"config": config, "bias": False, "tp_group": tp}
        column = options | {"init_method": config.init_method, "gather_output": False, "skip_bias_add": False}
        keys, values = a.linear_key_heads * a.linear_key_head_dim, a.linear_value_heads * a.linear_value_head_dim
        self.linear_qkvz = column_linear(a.hidden_size, 2 * keys + 2 * values, **column)
        self.linear_ba = column_linear(a.hidden_size, 2 * a.linear_value_heads, **column)
        made, heads = placed(config), a.linear_value_heads // tp.size()
        self.conv_weight = split_parameter(torch.zeros((2 * keys + values) // tp.size(), 1, a.linear_conv_size, **made))
        self.A_log = split_parameter(torch.zeros(heads, **made))
        self.dt_bias = split_parameter(torch.ones(heads, **made))
        self.out_norm = GatedNorm(a.linear_value_head_dim, a.norm_eps, group=tp, **made)
        self.linear_out = row_linear(
            values, a.hidden_size, init_method=config.output_layer_init_method, input_is_parallel=True, skip_bias_add=True, **options
        )

    def forward(
        self, hidden_states: Tensor, *_: Any, packed_seq_params: mcore.PackedSeqParams | None = None, **__: Any
    ) -> tuple[Tensor, None]:
        """[S, B, H] -> the same shape, and no bias."""
        mixed, rates = self.linear_qkvz(hidden_states)[0], self.linear_ba(hidden_states)[0]
        length, rows = mixed.shape[:2]
        if packed_seq_params is None:
            segments: Segments = [(row * length, (row + 1) * length, -1) for row in range(rows)]
        elif isinstance(packed_seq_params, SegmentedPackedSeqParams):
            segments = packed_seq_params.segments
        else:
            raise TypeError(f"packed rows are described by SegmentedPackedSeqParams here, not by {type(packed_seq_params).__name__}")
        mixed, rates = (x.transpose(0, 1).flatten(0, 1) for x in (mixed, rates))  # sequence by sequence
        channels, gates, rate, decay = split_heads(mixed, rates, self.architecture)
        out = self.out_norm(self._by_segment(channels, rate, decay, segments), gates)
        return self.linear_out(out.flatten(1).unflatten(0, (rows, length)).transpose(0, 1))[0], None

    def _by_segment(self, channels: Tensor, rate: Tensor, decay: Tensor, segments: Segments) -> Tensor:
        """[T, value heads, V]: first what begins a sequence, then what continues one of these."""
        own = [number for number, (_, _, prefix) in enumerate(segments) if prefix < 0]
        if len(own) == len(segments):
            return self._run(channels, rate, decay, [stop - start for start, stop, _ in segments])[0]
        rest = [number for number, (_, _, prefix) in enumerate(segments) if prefix >= 0]
        before = upload(torch.tensor([own.index(segments[number][2]) for number in rest]), channels.device)
        places, outs, tails, states = [], [], None, None
        for numbers in (own, rest):
            spans = [segments[number][:2] for number in numbers]
            place = upload(torch.cat([torch.arange(*span) for span in spans]), channels.device)
            given = (x[place] for x in (channels, rate, decay))
            out, tails, states = self._run(*given, [stop - start for start, stop in spans], tails, states)
            tails, states = (None, None) if numbers is rest else (tails[before], states[before])
            places.append(place)
            outs.append(out)
        return torch.cat(outs)[torch.cat(places).argsort()]  # on the device: nothing is read back

    def _run(
        self, channels: Tensor, rate: Tensor, decay: Tensor, lengths: list[int], tails: Tensor | None = None, states: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(outputs [T, value heads, V], the convolution's tails and the states behind the sequences, given those in front of them)."""
        channels, tails = convolved(channels, self.conv_weight[:, 0], lengths, tails)
        tokens = tokens_of(channels, rate, decay, (self.A_log, self.dt_bias), self.architecture)
        out, states = chunked(tokens, lengths, states)
        return out, tails, states

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """For checkpoints: its own parameters by the rank's share."""
        shares = split_for_checkpoint({name: getattr(self, name) for name in _BY_HEAD}, prefix, sharded_offsets)
        return super().sharded_state_dict(prefix, sharded_offsets, metadata) | shares


class GatedAttention(mcore.SelfAttention):
    """Attention whose output is multiplied by a sigmoid of gates, which follow each head's query: rows of a group are
    [query, gate, query, gate, ..., key, value]."""

    def get_query_key_value_tensors(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries [S, B, heads, D], keys and values [S, B, groups, D], gates [S, B, heads, D]; S is of the whole sequence."""
        mixed, _bias = self.linear_qkv(hidden_states)
        sharers = max(1, self.world_size // self.config.num_query_groups)
        if sharers > 1:  # the ranks that share a group have parts of its rows
            mixed = mcore.all_gather_last_dim_from_tensor_parallel_region(mixed)
            mixed = mixed.chunk(self.config.num_query_groups, dim=-1)[self.pg_collection.tp.rank() // sharers]
        by_group = mixed.unflatten(-1, (self.num_query_groups_per_partition, -1, self.hidden_size_per_attention_head))
        heads = by_group[..., :-2, :].flatten(-3, -2).unflatten(-2, (-1, 2))
        if sharers > 1:
            heads = heads.chunk(sharers, dim=-3)[self.pg_collection.tp.rank() % sharers]
        query, gate = heads.unbind(dim=-2)
        key, value = by_group[..., -2, :], by_group[..., -1, :]
        if self.q_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        return query, key, value, gate
