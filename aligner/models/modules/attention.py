"""Core attention where Transformer Engine is absent: causal, grouped queries, packed sequences, context parallelism.

Padded rows need no mask: padding comes after every real token. Packed rows are attended one segment at a time; one that continues a shared
prompt attends to all of that too. Under context parallelism each rank gathers the keys and values of its group; its two chunks of queries
attend to everything before the chunk, and causally to the chunk itself (`aligner.parallel.context`).

The CPU kernel gives each part's output and log-sum-exp, which are combined as in ring attention (Liu et al. 2023, 2310.01889). Given the
combined ones, its backward pass over a part gives that part's share of the gradients. On a GPU, in 16 bits, FlashAttention takes all runs
of queries in one call, each with its keys; in float32 each run is a call, and the causal mask is aligned with the ends.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from aligner.models.architecture import rope
from aligner.models.architecture.rope import neighbours_apart
from aligner.models.config import Architecture
from aligner.models.modules.shared_prompts import KeySpans, SegmentedPackedSeqParams
from aligner.models.modules.windowed_attention import Form, attend, by_chunk, form_of, with_sinks
from aligner.parallel import mcore
from aligner.parallel.context import chunk_numbers, gather_ranks, gather_sequence, local_slots
from aligner.types.rows import upload

Segments = Sequence[tuple[int, int, int]]  # (first slot, one beyond the last, index of the segment that it continues or -1)

# Grouped queries are the kernel's own business: it takes fewer keys than queries, forward and backward.
_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_kernel_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_kernel_of_runs = torch.ops.aten._flash_attention_forward  # FlashAttention 2 (Dao 2023, 2307.08691)
if torch.__version__ < "2.9":  # there it takes as many heads of keys as of queries, and reads what is not there if they are fewer

    def _kernel(q: Tensor, k: Tensor, v: Tensor, *more: Any, scale: float) -> tuple[Tensor, Tensor]:
        times = q.shape[1] // k.shape[1]
        every = (x.repeat_interleave(times, 1) for x in (k, v))
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, *every, *more, scale=scale)

    def _kernel_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *more: Any, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        groups, times = k.shape[1], q.shape[1] // k.shape[1]
        every = (x.repeat_interleave(times, 1) for x in (k, v))
        grad_q, *grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, *every, *more, scale=scale)
        grad_k, grad_v = (x.unflatten(1, (groups, times)).sum(2) for x in grads)
        return grad_q, grad_k, grad_v


def shared_attention(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
    """Causal attention within each segment and to the prompt that it continues: [T, heads, D] from query [T, heads, D] and key, value
    [T, groups, D]. `segments` cover all T slots; those that continue a prompt directly follow it."""
    if query.is_cuda:
        return by_segment(query, key, value, segments, partial(_attend_to_past, scale=scale))
    return _SharedAttention.apply(query, key, value, segments, scale)


MOST_DIMENSIONS = 256  # of a head, in FlashAttention


def takes_all_runs(query: Tensor) -> bool:
    """Whether one kernel attends to the keys of all runs of queries [T, heads, D]."""
    dim = query.shape[2]
    return query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) and dim <= MOST_DIMENSIONS and dim % 8 == 0


def all_runs(query: Tensor, key: Tensor, value: Tensor, spans: KeySpans, scale: float) -> Tensor:
    """Attention of every run of queries to its keys, causal and aligned at the ends: [T, heads, D] from query [T, heads, D] and key,
    value [K, groups, D], which have the slots that `spans` names."""
    if spans.slots is not None:
        key, value = key[spans.slots], value[spans.slots]
    out, *_ = _kernel_of_runs(
        query, key, value, spans.queries, spans.keys, spans.most_queries, spans.most_keys, 0.0, True, False, scale=scale
    )
    return out


def by_segment(query: Tensor, key: Tensor, value: Tensor, segments: Segments, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    """As `shared_attention`, each segment by itself: `attend` gets [1, heads, L, D], with the keys of the segment that it continues."""
    outs = []
    for start, stop, prefix in segments:
        spans = [(start, stop)] if prefix < 0 else [segments[prefix][:2], (start, stop)]
        keys, values = (torch.cat([x[first:last] for first, last in spans]) for x in (key, value))
        outs.append(attend(*(_rows(x) for x in (query[start:stop], keys, values)))[0].transpose(0, 1))
    return torch.cat(outs)


class _SharedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Tensor:
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
        for block in _blocks(segments):
            part, part_lse = _kernel(*(block.of(x) for x in (q, k, v)), 0.0, True, scale=scale)
            block.of(out).copy_(part)
            block.of(lse).copy_(part_lse)
        for prompt, rest in _by_prompt(segments):
            early, early_lse = (
                x[0].transpose(0, 1) for x in _kernel(_rows(q[rest]), _rows(k[prompt]), _rows(v[prompt]), 0.0, False, scale=scale)
            )
            late, late_lse = out[rest], lse[rest]
            whole = torch.logaddexp(early_lse, late_lse)
            late.mul_((late_lse - whole).exp_()[..., None]).add_(early * (early_lse - whole).exp_()[..., None])
            late_lse.copy_(whole)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.segments, ctx.scale = segments, scale
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in (q, k, v)]
        for block in _blocks(ctx.segments):
            parts = _kernel_backward(*(block.of(x) for x in (grad, q, k, v, out, lse)), 0.0, True, scale=ctx.scale)
            for total, part in zip(grads, parts, strict=True):
                block.of(total).copy_(part)
        for prompt, rest in _by_prompt(ctx.segments):
            tensors = (grad[rest], q[rest], k[prompt], v[prompt], out[rest], lse[rest])
            parts = _kernel_backward(*(_rows(x) for x in tensors), 0.0, False, scale=ctx.scale)
            for total, slots, part in zip(grads, (rest, prompt, prompt), parts, strict=True):
                total[slots].add_(part[0].transpose(0, 1))
        return *grads, None, None


@dataclass(frozen=True, slots=True)
class _Block:
    """Neighbouring segments of the same size: one kernel call, without copies of its inputs."""

    start: int
    count: int
    size: int

    def of(self, x: Tensor) -> Tensor:
        """[count, heads, size, ...] of x [T, heads, ...], a view."""
        return x[self.start : self.start + self.count * self.size].unflatten(0, (self.count, self.size)).transpose(1, 2)


def _blocks(segments: Segments) -> list[_Block]:
    blocks: list[_Block] = []
    for start, stop, _ in segments:
        if blocks and blocks[-1].size == stop - start:
            blocks[-1] = _Block(blocks[-1].start, blocks[-1].count + 1, stop - start)
        else:
            blocks.append(_Block(start, 1, stop - start))
    return blocks


def _by_prompt(segments: Segments) -> Iterator[tuple[slice, slice]]:
    """(slots of a prompt, slots of all segments that continue it: they directly follow it)."""
    ends = {prefix: stop for _, stop, prefix in segments if prefix >= 0}
    for number, end in ends.items():
        start, stop, _ = segments[number]
        yield slice(start, stop), slice(stop, end)


def _rows(x: Tensor) -> Tensor:
    """[1, heads, L, ...] of [L, heads, ...], a view."""
    return x.transpose(0, 1)[None]


class CoreAttention(mcore.MegatronModule):
    """`core_attention` of Megatron-Core's self-attention over `scaled_dot_product_attention`."""

    def __init__(
        self,
        config: mcore.TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        pg_collection: mcore.ProcessGroupCollection | None = None,
        architecture: Architecture | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.form = form_of(architecture, layer_number - 1) if architecture else Form()
        self.tempered: Architecture | None = None  # whose temperature the queries get
        if architecture and architecture.attention_temperature and not architecture.rotates(layer_number - 1):
            self.tempered = architecture
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        if architecture and not architecture.latent_size:  # the config's scale has the factor of layers without a base of their own
            self.scale *= (rope.factor(architecture, layer_number - 1) / rope.factor_of_scores(architecture)) ** 2
        if architecture and architecture.attention_scale_by_layer:
            self.scale /= layer_number
        heads = config.num_attention_heads // config.tensor_model_parallel_size
        self.sinks = split_parameter(torch.zeros(heads, **placed(config))) if self.form.sinks else None
        self.cp_group = (pg_collection or mcore.ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])).cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: mcore.PackedSeqParams | None = None,
        **_: Any,
    ) -> Tensor:
        """query [S, B, heads, D], key and value [S, B, groups, D] -> [S, B, heads * D]; packed: [T, heads, D] -> [T, heads * D].

        Values may be narrower than keys: then the output's heads are as wide as they.
        """
        if (size := value.shape[-1]) < (wide := key.shape[-1]):
            value = F.pad(value, (0, wide - size))  # kernels need one width
            attended = self.forward(query, key, value, attention_mask, packed_seq_params=packed_seq_params)
            return attended.unflatten(-1, (-1, wide))[..., :size].flatten(-2)
        if self.tempered is not None:
            query = self._with_temperature(query, self.tempered, packed_seq_params)
        if packed_seq_params is None:
            return self._one_block(query, key, value).flatten(2)
        if not isinstance(packed_seq_params, SegmentedPackedSeqParams) or packed_seq_params.spans is None:
            raise TypeError(f"packed rows are described by SegmentedPackedSeqParams here, not by {type(packed_seq_params).__name__}")
        sizes = [stop - start for start, stop, _ in packed_seq_params.segments]
        ranks = self.cp_group.size()  # all of which come to the same decision
        plain = self.form.within(packed_seq_params.spans.most_keys if ranks == 1 else max(sizes) * ranks).is_plain
        if not plain and ranks == 1:
            return by_segment(query, key, value, packed_seq_params.segments, self._attend).flatten(1)
        if plain and takes_all_runs(query):
            if ranks > 1:
                key, value = (gather_ranks(tensor, self.cp_group) for tensor in (key, value))
            return all_runs(query, key, value, packed_seq_params.spans, self.scale).flatten(1)
        if ranks == 1:
            return shared_attention(query, key, value, packed_seq_params.segments, self.scale).flatten(1)
        parts = zip(*(tensor.unsqueeze(1).split(sizes) for tensor in (query, key, value)), strict=True)
        return torch.cat([self._one_block(*part) for part in parts]).flatten(1)

    def _with_temperature(
        self, query: Tensor, architecture: Architecture, packed: SegmentedPackedSeqParams | mcore.PackedSeqParams | None
    ) -> Tensor:
        ranks = self.cp_group.size()
        if packed is None:
            positions = upload(local_slots(query.shape[0] * ranks, self.cp_group.rank(), ranks), query.device)
        else:
            positions = packed.positions
        scale = rope.temperature(architecture, positions)
        return (query * scale.view(-1, *[1] * (query.dim() - 1))).to(query.dtype)

    def _one_block(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[S, B, heads, D] of sequences of equal length, this rank's part of each."""
        cp = self.cp_group
        if cp.size() == 1:
            return self._attend(*(t.permute(1, 2, 0, 3) for t in (query, key, value))).permute(2, 0, 1, 3)
        keys, values = torch.cat(gather_sequence(key, cp)), torch.cat(gather_sequence(value, cp))
        size = query.shape[0] // 2
        outs = []
        for number, queries in zip(chunk_numbers(cp.rank(), cp.size()), query.split(size), strict=True):
            stop = (number + 1) * size
            q, k, v = (t.permute(1, 2, 0, 3) for t in (queries, keys[:stop], values[:stop]))
            outs.append(self._attend(q, k, v).permute(2, 0, 1, 3))
        return torch.cat(outs)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of a sequence's last queries: q [B, heads, L, D] at the positions of the last L of k, v [B, groups, T, D]."""
        form = self.form.within(k.shape[2])
        if form.softcap or form.window:
            return attend(q, k, v, form, self.scale, self.sinks)
        return by_chunk(q, k, v, form.chunk, self._causal) if form.chunk else self._causal(q, k, v)

    def _causal(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.sinks is not None:
            return _attend_to_past(*with_sinks(q, k, v, self.sinks, self.scale), self.scale)[..., : v.shape[-1]]
        return _attend_to_past(q, k, v, self.scale)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        return {} if self.sinks is None else split_for_checkpoint({"sinks": self.sinks}, prefix, sharded_offsets)


def split_for_checkpoint(tensors: dict[str, Tensor], prefix: str, sharded_offsets: tuple, *, splits: bool = True) -> dict:
    """Sharded tensors of parameters whose first dimension tensor-parallel ranks split; without `splits` they are whole on all."""
    state, dims = mcore.parallel_state, dict.fromkeys(tensors, 0) if splits else {}
    groups = {"tp_group": state.get_tensor_model_parallel_group(), "dp_cp_group": state.get_data_parallel_group(True)}
    return mcore.make_sharded_tensors_for_checkpoint(tensors, prefix, dims, sharded_offsets, **groups)


def placed(config: mcore.TransformerConfig) -> dict[str, Any]:
    """Type and device of new parameters."""
    # None is torch's default device: the CPU, or the meta device while a plan is made.
    return {"dtype": config.params_dtype, "device": None if config.use_cpu_initialization else torch.cuda.current_device()}


def split_parameter(share: Tensor) -> torch.nn.Parameter:
    """This rank's share of a parameter whose first dimension the tensor-parallel ranks split."""
    parameter = torch.nn.Parameter(share)
    mcore.set_tensor_model_parallel_attributes(parameter, True, 0, 1)
    return parameter


def _attend_to_past(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    if q.shape[2] == k.shape[2]:  # a plan's fake tensors know no other form
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    if q.is_cuda:
        mask = causal_lower_right(q.shape[2], k.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return _PastAttention.apply(q, k, v, scale)


class _PastAttention(torch.autograd.Function):
    """`_attend_to_past` on a CPU in two parts, past and chunk: its kernel knows square causal masks only, and an explicit [L, P + L] mask
    of a long context would not fit in memory. The queries of a group share its keys: over the past they are extra rows; within the chunk
    each is attended in turn.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        batch, heads, length, dim = q.shape
        groups, past = k.shape[1], k.shape[2] - length
        rows = q.reshape(batch, groups, heads // groups * length, dim)
        early, early_lse = _kernel(rows, k[:, :, :past], v[:, :, :past], 0.0, False, scale=scale)
        early, early_lse = early.reshape(q.shape), early_lse.reshape(q.shape[:3])
        parts = [_kernel(own, k[:, :, past:], v[:, :, past:], 0.0, True, scale=scale) for own in _members(q, groups)]
        late, late_lse = (_interleave([part[i] for part in parts]).reshape(shape) for i, shape in ((0, q.shape), (1, q.shape[:3])))
        lse = torch.logaddexp(early_lse, late_lse)
        out = early * (early_lse - lse).exp()[..., None] + late * (late_lse - lse).exp()[..., None]
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        # With the whole's output and log-sum-exp, the kernel's backward pass over one part gives that part's share of the gradients.
        q, k, v, out, lse = ctx.saved_tensors
        batch, heads, length, dim = q.shape
        groups, past = k.shape[1], k.shape[2] - length

        def as_rows(x: Tensor) -> Tensor:
            return x.reshape(batch, groups, heads // groups * length, *x.shape[3:])

        grad_q, past_k, past_v = _kernel_backward(
            as_rows(grad), as_rows(q), k[:, :, :past], v[:, :, :past], as_rows(out), as_rows(lse), 0.0, False, scale=ctx.scale
        )
        parts = [
            _kernel_backward(*own[:2], k[:, :, past:], v[:, :, past:], *own[2:], 0.0, True, scale=ctx.scale)
            for own in zip(*(_members(x, groups) for x in (grad, q, out, lse)), strict=True)
        ]
        own_q, own_k, own_v = zip(*parts, strict=True)
        grad_q = grad_q.reshape(q.shape) + _interleave(own_q).reshape(q.shape)
        return grad_q, torch.cat([past_k, sum(own_k)], dim=2), torch.cat([past_v, sum(own_v)], dim=2), None


def _members(x: Tensor, groups: int) -> list[Tensor]:
    """The first query of every group, the second of every group, ...: each [B, groups, L, ...], from [B, heads, L, ...]."""
    return [part.contiguous() for part in x.reshape(x.shape[0], groups, -1, *x.shape[2:]).unbind(dim=2)]


def _interleave(members: Sequence[Tensor]) -> Tensor:
    """The inverse of `_members`, [B, groups, queries per group, L, ...]."""
    return torch.stack(members, dim=2)


LATENT_EPS = 1e-6  # of the latents' norms, whatever a model's own rms_norm_eps is: in `transformers` too


class WholeLinear(torch.nn.Linear):
    """A linear layer without bias that every tensor-parallel rank has whole; under sequence parallelism for its part of a sequence."""

    def __init__(self, config: mcore.TransformerConfig, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False, **placed(config))
        self.weight.sequence_parallel = config.sequence_parallel


class LatentAttention(mcore.SelfAttention):
    """Multi-head latent attention (DeepSeek-V2, 2405.04434, 2.1): keys and values of all heads are made of one small vector per token, the
    latent, beside which each token has one rotated key for all heads.

    Megatron-Core's own module makes its own angles, so packed rows and shared prompts would not reach it, and splits the projections onto
    the latents. Here these are whole on every rank, and the rotated key's gradient is summed over the heads of all. A head's rotated
    dimensions come first, as Megatron-Core rotates them. There is no `linear_qkv`: the specification's is an `IdentityOp`.
    """

    def __init__(
        self,
        config: mcore.TransformerConfig,
        submodules: Any,
        *args: Any,
        architecture: Architecture,
        norm: mcore.ModuleSpec,
        linear: type[torch.nn.Module],
        **options: Any,
    ) -> None:
        config = copy.copy(config)
        config.kv_channels = architecture.value_head_dim  # of what the layer behind attention reads
        super().__init__(config, submodules, *args, **options)
        self.architecture = a = architecture
        self.heads = a.num_attention_heads // config.tensor_model_parallel_size

        def normed(size: int) -> torch.nn.Module:
            return mcore.build_module(norm, config=config, hidden_size=size, eps=LATENT_EPS)

        def split(inputs: int, outputs: int) -> torch.nn.Module:
            settings = {"init_method": config.init_method, "bias": False, "tp_group": self.pg_collection.tp}
            return linear(inputs, outputs, config=config, gather_output=False, skip_bias_add=False, **settings)

        if a.query_latent_size:
            self.linear_q_down_proj = WholeLinear(config, a.hidden_size, a.query_latent_size)
            self.q_layernorm = normed(a.query_latent_size)
            self.linear_q_up_proj = split(a.query_latent_size, a.num_attention_heads * a.head_dim)
        else:
            self.linear_q_proj = split(a.hidden_size, a.num_attention_heads * a.head_dim)
        self.linear_kv_down_proj = WholeLinear(config, a.hidden_size, a.latent_size + a.rotated)
        self.kv_layernorm = normed(a.latent_size)
        self.linear_kv_up_proj = split(a.latent_size, a.num_attention_heads * (a.head_dim - a.rotated + a.value_head_dim))

    def get_query_key_value_tensors(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [S, B, heads, D] before they are rotated, values [S, B, heads, value D]; S is of the whole sequence."""
        a = self.architecture
        plain = a.head_dim - a.rotated
        latent, shared = self.linear_kv_down_proj(hidden_states).split([a.latent_size, a.rotated], dim=-1)
        if a.query_latent_size:
            queries = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden_states)))[0]
        else:
            queries = self.linear_q_proj(hidden_states)[0]
        query_plain, query_rotated = queries.unflatten(-1, (self.heads, -1)).split([plain, a.rotated], dim=-1)
        expanded, _ = self.linear_kv_up_proj(self.kv_layernorm(latent))
        key_plain, value = expanded.unflatten(-1, (self.heads, -1)).split([plain, a.value_head_dim], dim=-1)
        # The whole sequence's rotated keys, whose gradient is the sum over all ranks' heads.
        group = self.pg_collection.tp
        if self.config.sequence_parallel:
            shared = mcore.gather_from_sequence_parallel_region(shared, tensor_parallel_output_grad=True, group=group)
        else:
            shared = mcore.copy_to_tensor_model_parallel_region(shared, group=group)
        key_rotated = shared[..., None, :].expand(*key_plain.shape[:-1], -1)
        if a.rope_attention_factor != 1:
            query_rotated, key_rotated = query_rotated * a.rope_attention_factor, key_rotated * a.rope_attention_factor
        query, key = torch.cat([query_rotated, query_plain], dim=-1), torch.cat([key_rotated, key_plain], dim=-1)
        if a.rotary_interleaved:
            query, key = (neighbours_apart(x, a.rotated) for x in (query, key))
        return query, key, value
