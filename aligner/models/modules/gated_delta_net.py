"""Qwen3-Next's attention: gated delta nets (2412.06464) in most layers, and in the others attention with a gate on what it gives.

Megatron-Core's own delta net needs Transformer Engine and flash-linear-attention, and refuses packed rows; this one is of torch's
operations. A tensor-parallel rank has whole key heads with the value heads that they serve: the projections' rows, and here the
convolution's channels too, are ordered by key head ([query, key, values, gates] each). In a packed row every sequence begins with an empty
state and an empty window of the convolution, and a row that continues a shared prompt with the prompt's.

The gated delta rule: every head has a state S [K, V]. A token with key k, value v, decay g <= 0 and rate b changes it to
S' = exp(g) S + b k (v - exp(g) k S)^T; its output is q S'. Within a chunk of tokens the changes are the solution of one triangular system
(the paper's section 3.3), from chunk to chunk the state is handed on, of all sequences at once. All is in float32, as transformers'
`torch_chunk_gated_delta_rule` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.models.config import Architecture
from aligner.models.modules.attention import Segments, placed, split_for_checkpoint, split_parameter
from aligner.models.modules.shared_prompts import SegmentedPackedSeqParams
from aligner.parallel import mcore
from aligner.types.rows import upload

CHUNK = 64  # tokens, at most
_EPSILON = 1e-6  # of the norm of queries and keys


def _on(array: np.ndarray, device: torch.device) -> Tensor:
    return upload(torch.tensor(array), device)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """What a delta net makes of T tokens: `query`, `key` [T, heads, K], `value` [T, heads, V], `decay` (its logarithm) and `rate`
    [T, heads]; one query and key for each head of values."""

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    rate: Tensor

    def normed(self) -> Tokens:
        """In float32, queries and keys of length 1, queries then over sqrt(K)."""
        query, key, value, decay, rate = (x.float() for x in (self.query, self.key, self.value, self.decay, self.rate))
        query, key = (x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + _EPSILON) for x in (query, key))
        return Tokens(query=query * query.shape[-1] ** -0.5, key=key, value=value, decay=decay, rate=rate)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Chunks in the order in which they are computed: the first of every sequence, the second of every one that has two, ..."""

    places: np.ndarray  # int64 [chunks, size]: which token is there; T: none
    counts: tuple[int, ...]  # chunks of each round
    order: np.ndarray  # int64 [N]: the sequences, those with most chunks first
    back: np.ndarray  # int64 [T]: where in [chunks * size] each token is


@lru_cache(maxsize=8)  # the layers of a pass ask for the same
def _plan(lengths: tuple[int, ...]) -> _Plan:
    size, total = min(CHUNK, max(lengths)), sum(lengths)
    chunks = np.array([-(-length // size) for length in lengths])
    starts = np.cumsum([0, *lengths[:-1]])
    order = np.argsort(-chunks, kind="stable")
    places, counts = [], []
    for number in range(int(chunks.max())):
        running = order[chunks[order] > number]
        within = number * size + np.arange(size)
        places.append(np.where(within < np.array(lengths)[running, None], starts[running, None] + within, total))
        counts.append(len(running))
    grid = np.concatenate(places)
    back = np.empty(total + 1, np.int64)
    back[grid.reshape(-1)] = np.arange(grid.size)
    return _Plan(grid, tuple(counts), order, back[:total])


def chunked(tokens: Tokens, lengths: Sequence[int], state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The outputs [T, heads, V], and the states [N, heads, K, V] behind the N sequences, whose `lengths` (at least 1) sum to T.

    `state` [N, heads, K, V]: in front of them; None: zeros.
    """
    plan, device = _plan(tuple(lengths)), tokens.value.device
    places = _on(plan.places, device)
    x = tokens.normed()
    # [chunks, heads, size, ...]; where a chunk has no token left, zeros, which change no state.
    query, key, value, decay, rate = (
        torch.cat([one, one.new_zeros(1, *one.shape[1:])])[places].transpose(1, 2) for one in (x.query, x.key, x.value, x.decay, x.rate)
    )
    since = decay.cumsum(dim=-1)  # the chunk's first token, decay by decay
    later = torch.ones(places.shape[1], places.shape[1], dtype=torch.bool, device=device).triu(1)
    between = (since[..., :, None] - since[..., None, :]).masked_fill(later, -torch.inf).exp()
    rated = key * rate[..., None]
    system = (rated @ key.transpose(-1, -2)) * between
    solved = torch.linalg.solve_triangular(
        system, torch.cat([value * rate[..., None], rated * since[..., None].exp()], dim=-1), upper=False, unitriangular=True
    )
    written, read = solved.split([value.shape[-1], key.shape[-1]], dim=-1)
    scores = (query @ key.transpose(-1, -2)) * between
    parts = (
        written,
        read,
        scores,
        query * since[..., None].exp(),
        (key * (since[..., -1:] - since)[..., None].exp()).transpose(-1, -2),
        since[..., -1].exp()[..., None, None],
    )
    order = _on(plan.order, device)
    if state is None:
        state = value.new_zeros(len(lengths), value.shape[1], key.shape[-1], value.shape[-1])
    else:
        state = state.float()[order]
    out, state = _scan(parts, plan.counts, state)
    outputs = out.transpose(1, 2).flatten(0, 1)[_on(plan.back, device)]
    return outputs.to(tokens.value.dtype), state[order.argsort()]


def _scan(parts: tuple[Tensor, ...], counts: Sequence[int], state: Tensor) -> tuple[Tensor, Tensor]:
    """Hand the states on from round to round: (outputs of all chunks, the states behind the last ones)."""
    outs, ended = [], []
    for written, read, scores, query, key, decay in zip(*(part.split(counts) for part in parts), strict=True):
        ended.append(state[len(written) :])
        state = state[: len(written)]
        new = written - read @ state
        outs.append(query @ state + scores @ new)
        state = state * decay + key @ new
    return torch.cat(outs), torch.cat([state, *reversed(ended)])


def step(tokens: Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each of T sequences: the outputs [T, heads, V] and the states behind them, of those before, float32 [T, heads, K, V]."""
    x = tokens.normed()
    state = state * x.decay.exp()[..., None, None]
    change = (x.value - (x.key[..., None, :] @ state).squeeze(-2)) * x.rate[..., None]
    state = state + x.key[..., :, None] * change[..., None, :]
    return (x.query[..., None, :] @ state).squeeze(-2).to(tokens.value.dtype), state


@lru_cache(maxsize=8)
def _windows(lengths: tuple[int, ...], tail: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of rows [N tails of `tail` rows; T tokens]: every sequence behind its tail; where each token's output is; each one's next tail."""
    behind, outputs, tails, count, start, place = [], [], [], len(lengths), len(lengths) * tail, 0
    for number, length in enumerate(lengths):
        rows = np.concatenate([number * tail + np.arange(tail), start + np.arange(length)])
        behind.append(rows)
        tails.append(rows[length:])
        outputs.append(place + np.arange(length))
        start, place = start + length, place + length + tail
    return np.concatenate(behind), np.concatenate(outputs), np.concatenate(tails).reshape(count, tail)


def convolved(x: Tensor, weight: Tensor, lengths: Sequence[int], tails: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Each channel's causal convolution within its sequence: [T, C] of x [T, C] and weight [C, W]; and each sequence's last W - 1 rows,
    [N, W - 1, C], which are the `tails` of their continuations. None: zeros, as in front of a sequence's first token."""
    channels, tail = x.shape[1], weight.shape[1] - 1
    if tails is None:
        tails = x.new_zeros(len(lengths), tail, channels)
    behind, outputs, last = (_on(one, x.device) for one in _windows(tuple(lengths), tail))
    rows = torch.cat([tails.flatten(0, 1).to(x.dtype), x])
    out = F.conv1d(rows[behind].t()[None], weight[:, None], groups=channels)[0].t()
    return out[outputs], rows[last]


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
        shares = split_for_checkpoint({name: getattr(self, name) for name in _BY_HEAD}, prefix, sharded_offsets)
        return super().sharded_state_dict(prefix, sharded_offsets, metadata) | shares


class GatedAttention(mcore.SelfAttention):
    """Attention whose output is multiplied by a sigmoid of gates; rows of a group are [query, gate, query, gate, ..., key, value]."""

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
