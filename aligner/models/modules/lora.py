"""Low-rank adapters on Megatron-Core's linear layers (LoRA; Hu et al. 2021, 2106.09685): W x becomes W x + scaling B A x, and only A and B
learn. B starts at zero; A's entries are uniform in +-1 / sqrt(inputs), as PEFT's.

With `model.lora.dora` (Liu et al. 2024, 2402.09353) it becomes m (W + scaling B A) x / ||W + scaling B A||, with the norm of each row of
the sum: A and B give the direction of a row, and the magnitude m of each output, at first ||W||, learns too. The norm gets no gradient, as
in the paper (section 4.3) and in PEFT. Without dropout: what scales the layer's own product would have to see dropped inputs, too.

With `model.lora.init=pissa` it becomes W x + scaling (B A - B0 A0) x with the frozen first pair (`aligner.models.modules.peft`).

A layer that holds several of Hugging Face's projections (query, key and value; gate and up) has a pair for each of them, as PEFT's adapters
do. The A's lie one below the other and are one product; each B gives its own rows of the fused output.

Tensor parallelism splits the pairs as it splits W, and only [tokens, rank] is exchanged. Where W's output is split, A is on every rank;
where its input is split, B is. An expert's tokens are exchanged outside of it, for adapter and weight together; there the gradients of what
is on every rank are summed instead. A magnitude lies as its B does; the squares of a row that is split are summed.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from aligner.errors import ConfigError
from aligner.models.config import Architecture, HFArchitecture, LoraConfig, LoraTarget
from aligner.models.families import weight_names
from aligner.models.families.mapping import ADAPTER, Layout, Rule
from aligner.models.families.own_modules import has_adapter
from aligner.models.modules.chunk import global_name
from aligner.models.modules.layers import KINDS, SPLIT_INPUTS
from aligner.models.modules.linear import LinearWeight, linear_weight
from aligner.parallel import mcore
from aligner.types.rows import upload

_ALL_PARTS = {name: target for kind in KINDS for name, target in kind.linears.items()}
_LINEAR = re.compile(
    r"decoder\.layers\.\d+\.(?:self_attention|mlp)\.(experts\.local_experts\.\d+\.)?(?:shared_experts\.)?"
    rf"({'|'.join(_ALL_PARTS)})\.weight"
)
_FEED_FORWARD = {"linear_fc1": {LoraTarget.fc1, LoraTarget.gate, LoraTarget.up}, "linear_fc2": {LoraTarget.fc2}}
LORA_B = "is_lora_b"  # the mark of a B, by which LoRA+ finds it
MERGED_ROWS = 1024  # of a weight that get their adapter at a time
_WHOLE = "out"  # the one part of a layer that is one projection
_PARTS = {
    Layout.plain: (_WHOLE,),
    Layout.qkv: ("q", "k", "v"),
    Layout.packed_qkv: ("q", "k", "v"),
    Layout.fused_qkv: (_WHOLE,),
    Layout.gate_up: ("gate", "up"),
    Layout.packed_gate_up: ("gate", "up"),
    Layout.alternating_gate_up: ("gate", "up"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """The pairs that one linear layer gets, anywhere in the model."""

    rule: Rule  # the Hugging Face projections that its weight holds
    parts: tuple[str, ...]  # of the fused output, in its order
    trained: tuple[str, ...]  # those that get a pair
    splits_output: bool  # tensor parallelism splits the layer's output, else its input
    is_expert: bool

    @property
    def shares_a(self) -> bool:
        """Whether Hugging Face has all parts in one projection, which has one A."""
        return self.rule.layout in (Layout.packed_qkv, Layout.packed_gate_up)

    @property
    def projections(self) -> dict[str, tuple[str, ...]]:
        """Hugging Face's projections that have a pair, in the order of the A's, and the parts whose B's make up theirs."""
        names = [name.removesuffix(".weight") for name in self.rule.hf_names]
        if len(names) == 1:
            return {names[0]: self.trained}
        return {names[self.parts.index(part)]: (part,) for part in self.trained}


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSite:
    """A linear layer of this rank's chunk that gets an adapter."""

    name: str  # of the layer in the chunk
    weight: LinearWeight
    pairs: Pairs
    allreduce: bool  # Megatron-Core's mark on the weight; False: its replicas are the expert-data-parallel ranks
    sizes: Mapping[str, int]  # rows of each part on this rank
    groups: int  # the fused output repeats [a share of each part] this many times


class Adapter(torch.nn.Module):
    """This rank's shares of the pairs of one linear layer: `a` [pairs * rank, in] and `b` by part, [rows, rank]; with DoRA the magnitudes
    `m` by part, [rows, 1]; with PiSSA what the pairs began with, `a0` and `b0`, frozen."""

    def __init__(
        self, site: AdapterSite, lora: LoraConfig, process_groups: mcore.ProcessGroupCollection, *, sequence_parallel: bool
    ) -> None:
        super().__init__()
        self.site = site
        self.pairs = site.pairs
        self.rank = lora.rank
        self.scaling = lora.scaling
        self.dropout = lora.dropout
        self.group: dist.ProcessGroup = process_groups.expt_tp if self.pairs.is_expert else process_groups.tp
        self.splits_sequence = sequence_parallel and not self.pairs.is_expert
        options = {"dtype": site.weight.dtype, "device": site.weight.device}
        self.a = torch.nn.Parameter(torch.empty(len(self.pairs.projections) * lora.rank, site.weight.shape[1], **options))
        self.b = torch.nn.ParameterDict({part: torch.zeros(site.sizes[part], lora.rank, **options) for part in self.pairs.trained})
        self.m = torch.nn.ParameterDict({part: torch.ones(len(b), 1, **options) for part, b in self.b.items()} if lora.dora else {})
        self.a0 = torch.nn.Parameter(torch.zeros_like(self.a), requires_grad=False) if lora.is_pissa else None
        self.b0 = torch.nn.ParameterDict({part: torch.zeros_like(b) for part, b in self.b.items()} if lora.is_pissa else {})
        self.b0.requires_grad_(False)
        for matrix in (self.a, *([] if self.a0 is None else [self.a0])):
            self._mark(matrix, split_dim=None if self.pairs.splits_output else 1)
        for matrix in (*self.b.values(), *self.b0.values(), *self.m.values()):
            self._mark(matrix, split_dim=0 if self.pairs.splits_output else None)
        for b in self.b.values():
            b.is_lora_b = True

    def _mark(self, parameter: torch.nn.Parameter, *, split_dim: int | None) -> None:
        # A whole parameter counts in gradient norms on the first tensor-parallel rank alone; of unsplit experts each rank has others.
        has_others = split_dim is not None or (self.pairs.is_expert and self.group.size() == 1)
        mcore.set_tensor_model_parallel_attributes(parameter, has_others, -1 if split_dim is None else split_dim, 1)
        parameter.allreduce = self.site.allreduce
        parameter.sequence_parallel = self.splits_sequence and split_dim is None  # each rank's gradient is of its part of the sequence

    def forward(self, x: Tensor) -> Tensor:
        """The adapter's addition to the layer's output, for the layer's input [..., in on this rank]."""
        whole_a, whole_b = self.pairs.splits_output, not self.pairs.splits_output
        hidden = F.linear(self._dropped(x), self._complete(self.a) if whole_a else self.a) * self.scaling
        if self.a0 is not None:  # without dropout, as the weight that it is a part of
            hidden = torch.cat([hidden, F.linear(x, self._complete(self.a0) if whole_a else self.a0) * self.scaling], dim=-1)
        hidden = self._exchanged(hidden)
        return self._added_up(hidden, self._complete if whole_b else lambda b: b)

    def added(self, x: Tensor, product: Tensor, bias: Tensor | None) -> Tensor:
        """The layer's output from its input and its own product; `bias` is what the product has of one."""
        if not self.m:
            return product + self(x)
        if bias is None:
            return self._scales() * (product + self(x))
        return self._scales() * (product - bias + self(x)) + bias

    def share(self, x: Tensor) -> Tensor:
        """This rank's rows of the addition, without dropout; where ranks have parts of the input, its term of them. No communication."""
        return self._added_up(F.linear(x, self._all_a()) * self.scaling, lambda b: b)

    @torch.no_grad()
    def merged(self, weight: LinearWeight) -> Tensor:
        """`weight` with the adapter in it, dense and in its dtype, added up in float32. The shares fit; only DoRA's norms of split rows
        are summed over the tensor-parallel ranks, which all call this."""
        merged = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
        scales = self._scales(weight).float()[:, None] if self.m else None
        for part, rows in self._sums(weight):
            merged[part] = rows if scales is None else rows * scales[part]
        return merged

    def _sums(self, weight: LinearWeight) -> Iterator[tuple[slice, Tensor]]:
        """(rows, W + scaling B A of them in float32): no whole matrix exists in float32."""
        a = self._all_a().float()
        fused = self._added_up(torch.eye(a.shape[0], device=weight.device), Tensor.float).t() * self.scaling  # [rows, pairs * rank]
        for first in range(0, weight.shape[0], MERGED_ROWS):
            part = slice(first, first + MERGED_ROWS)
            yield part, torch.addmm(weight.read(torch.float32, part), fused[part], a)

    @torch.no_grad()
    def norms(self, weight: LinearWeight) -> Tensor:
        """||W + scaling B A|| of each row of this rank's fused output, in the magnitudes' dtype. Every tensor-parallel rank calls it."""
        squares = torch.cat([rows.square().sum(dim=1) for _, rows in self._sums(weight)])
        if not self.pairs.splits_output and self.group.size() > 1:
            dist.all_reduce(squares, group=self.group)
        norms = squares.sqrt().to(self.a.dtype)
        return norms.clamp_min(torch.finfo(norms.dtype).tiny)  # a row of zeros stays one

    def _scales(self, weight: LinearWeight | None = None) -> Tensor:
        """What each of the outputs is multiplied by, [rows]: m / ||W + scaling B A||; 1 where a part has no pair."""
        magnitudes = {part: (m if self.pairs.splits_output else self._complete(m))[:, 0] for part, m in self.m.items()}
        absent = 1 - self._fused({part: torch.ones_like(m) for part, m in magnitudes.items()})
        return self._fused(magnitudes) / self.norms(weight or self.site.weight) + absent

    @torch.no_grad()
    def start_magnitudes(self) -> None:
        """Give every output its row's norm as its magnitude, with which the adapter changes nothing else."""
        if not self.m:
            return
        blocks = self.norms(self.site.weight).unflatten(0, (self.site.groups, -1))
        shares = [size // self.site.groups for size in self.site.sizes.values()]
        for part, own in zip(self.site.sizes, blocks.split(shares, dim=1), strict=True):
            if part in self.m:
                self.m[part].copy_(own.reshape(-1, 1))

    def _dropped(self, x: Tensor) -> Tensor:
        if not (self.training and self.dropout):
            return x
        # Ranks drop differently if they hold different parts, and equally if they hold the same: with sequence parallelism the generator
        # of the layers differs by rank, though the tokens of an expert are gathered.
        apart = self.splits_sequence or not self.pairs.splits_output
        generators = mcore.tensor_parallel.get_cuda_rng_tracker()
        with generators.fork() if apart else generators.fork(mcore.tensor_parallel.get_data_parallel_rng_tracker_name()):
            return F.dropout(x, self.dropout)

    def _exchanged(self, hidden: Tensor) -> Tensor:
        """[..., pairs * rank] as the B's need it."""
        if self.pairs.is_expert:
            return hidden
        if self.pairs.splits_output:
            if self.splits_sequence:
                return mcore.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=self.group)
            return mcore.copy_to_tensor_model_parallel_region(hidden, group=self.group)
        if self.splits_sequence:
            return mcore.reduce_scatter_to_sequence_parallel_region(hidden, group=self.group)
        return mcore.reduce_from_tensor_model_parallel_region(hidden, group=self.group)

    def _complete(self, parameter: Tensor) -> Tensor:
        """A replicated parameter whose gradient is summed over an expert's ranks, which hold parts of it."""
        return mcore.copy_to_tensor_model_parallel_region(parameter, group=self.group) if self.pairs.is_expert else parameter

    @torch.no_grad()
    def freeze_start(self) -> None:
        """Let the pairs add nothing until they are trained."""
        assert self.a0 is not None
        self.a0.copy_(self.a)
        for part, b in self.b.items():
            self.b0[part].copy_(b)

    def _all_a(self) -> Tensor:
        return self.a if self.a0 is None else torch.cat([self.a, self.a0])

    def _added_up(self, hidden: Tensor, given: Callable[[Tensor], Tensor]) -> Tensor:
        """[..., rows of the fused output on this rank] from A x, or from A x and A0 x side by side; `given` makes of a B what is used."""
        own, *start = hidden.split(self.a.shape[0], dim=-1)
        total = self._expanded(own, {part: given(b) for part, b in self.b.items()})
        return total - self._expanded(start[0], {part: given(b) for part, b in self.b0.items()}) if start else total

    def _expanded(self, hidden: Tensor, matrices: Mapping[str, Tensor]) -> Tensor:
        """[..., rows of the fused output on this rank]; zeros where a part has no pair."""
        blocks = [hidden] * len(matrices) if self.pairs.shares_a else hidden.split(self.rank, dim=-1)
        return self._fused({part: F.linear(block, matrices[part]) for part, block in zip(self.pairs.trained, blocks, strict=True)})

    def _fused(self, outputs: Mapping[str, Tensor]) -> Tensor:
        """[..., rows] of each part as [..., rows of the fused output]."""
        if len(self.site.sizes) == 1:
            return outputs[_WHOLE]
        one = next(iter(outputs.values()))
        every = [outputs[p] if p in outputs else one.new_zeros(*one.shape[:-1], size) for p, size in self.site.sizes.items()]
        return torch.cat([part.unflatten(-1, (self.site.groups, -1)) for part in every], dim=-1).flatten(-2)


def sites(chunk: Any, lora: LoraConfig) -> list[AdapterSite]:
    """The linear layers of a chunk that `lora` names. Raises ConfigError if none matches, or one cannot be split as its weight is."""
    own = isinstance(chunk.architecture, HFArchitecture)  # has other names
    weights = [name for name, _ in chunk.named_parameters() if name.endswith(".weight") and (own or _LINEAR.fullmatch(name))]
    linears = [name.removesuffix(".weight") for name in weights]
    found = [site for name in linears if (site := _site(chunk, name, chunk.get_submodule(name), lora)) is not None]
    if not found:
        raise ConfigError(
            f"model.lora.targets={[target.value for target in lora.targets]}: the model has no such layer "
            "(fc1 and fc2 are of dense models, experts of mixtures)"
        )
    return found


def pairs_of(weight: str, architecture: Architecture, lora: LoraConfig) -> Pairs | None:
    """The pairs of the layer with this weight (its global name); None where it gets none. Raises ConfigError for half of a projection."""
    if isinstance(architecture, HFArchitecture):
        if not has_adapter(weight, architecture, lora):
            return None
        own = weight_names(architecture).find(weight)
        return Pairs(rule=own, parts=(_WHOLE,), trained=(_WHOLE,), splits_output=True, is_expert=False)
    match, targets = _LINEAR.fullmatch(weight), lora.targets
    if match is None:
        return None
    is_expert, kind = match[1] is not None, match[2]
    if not is_expert and kind in _FEED_FORWARD and not _FEED_FORWARD[kind] & set(targets):
        return None  # also of the planner's dense twins, of which a mixture's family may have no rule
    rule = weight_names(architecture).find(weight)
    if rule.layout not in _PARTS:  # a delta net's
        if LoraTarget.qkv in targets:
            allowed = ", ".join(name for name in LoraTarget.__members__ if name != LoraTarget.qkv.value)
            raise ConfigError(f"model.lora.targets: qkv of family {architecture.family.value} is of its delta nets too; allowed: {allowed}")
        return None
    parts = _PARTS[rule.layout]
    if rule.expert is not None and LoraTarget.experts in targets:
        raise ConfigError(
            f"model.lora.targets: models of family {architecture.family.value} have all experts in one tensor, of which PEFT's format has "
            "no adapters by expert; allowed: the other targets"
        )
    if is_expert:
        trained = parts if LoraTarget.experts in targets else ()
    else:
        trained = parts if _ALL_PARTS[kind] in targets else tuple(part for part in parts if part in {target.value for target in targets})
        if kind in ("linear_q_proj", "linear_q_up_proj") and LoraTarget.q in targets:
            trained = parts
        if kind == "linear_kv_up_proj" and not trained and {LoraTarget.k, LoraTarget.v} & set(targets):
            raise ConfigError(f"model.lora.targets: models of family {architecture.family.value} have k and v in one; allowed: qkv, q")
    named = {target.value for target in targets}
    together = "qkv" if rule.layout.is_qkv else "fc1"
    separate = {"q", "k", "v"} if rule.layout.is_qkv else {"gate", "up"}
    if len(rule.hf_names) == 1 and len(parts) > 1 or rule.layout is Layout.fused_qkv:
        if not is_expert and together not in named and separate & named:
            several = "q, k and v" if rule.layout.is_qkv else "gate and up"
            raise ConfigError(
                f"model.lora.targets: models of family {architecture.family.value} have {several} in one; allowed: {together}"
            )
    if not trained:
        return None
    return Pairs(rule=rule, parts=parts, trained=trained, splits_output=kind not in SPLIT_INPUTS, is_expert=is_expert)


def _site(chunk: Any, name: str, module: torch.nn.Module, lora: LoraConfig) -> AdapterSite | None:
    architecture, tp = chunk.architecture, chunk.pg_collection.tp.size()
    pairs = pairs_of(global_name(chunk, f"{name}.weight"), architecture, lora)
    if pairs is None:
        return None
    if pairs.is_expert and 1 < chunk.pg_collection.expt_tp.size() != tp:
        raise ConfigError(f"model.lora.targets: adapters of experts need parallel.etp to be 1 or parallel.tp={tp}")
    weight = linear_weight(module.weight)
    rows, groups = [weight.shape[0] // len(pairs.parts)] * len(pairs.parts), 1
    if name.endswith("linear_qkv") and len(pairs.parts) > 1:
        groups, rest = divmod(architecture.num_key_value_heads, tp)
        if rest:
            heads = architecture.num_key_value_heads
            raise ConfigError(f"model.lora.targets: adapters of q, k and v need parallel.tp={tp} to divide the {heads} key-value heads")
        keys = groups * architecture.head_dim
        rows = [architecture.num_attention_heads * architecture.head_dim * (1 + architecture.attention_gate) // tp, keys, keys]
    sizes, allreduce = dict(zip(pairs.parts, rows, strict=True)), module.weight.__dict__.get("allreduce", True)
    return AdapterSite(name=name, weight=weight, pairs=pairs, allreduce=allreduce, sizes=sizes, groups=groups)


def make_adapters(chunk: Any, lora: LoraConfig) -> dict[str, Adapter]:
    """New adapters by their layer's name in the chunk, on their layers' device, not attached; the A's are not filled yet."""
    splits = chunk.config.sequence_parallel
    return {site.name: Adapter(site, lora, chunk.pg_collection, sequence_parallel=splits) for site in sites(chunk, lora)}


def attach(chunk: Any, lora: LoraConfig) -> None:
    """Freeze the parameters of a chunk and give its layers adapters, as modules `adapter` of theirs that add to their outputs."""
    chunk.requires_grad_(False)
    for name, adapter in make_adapters(chunk, lora).items():
        linear = chunk.get_submodule(name)
        linear.adapter = adapter
        linear.register_forward_hook(_add)


def _add(module: Any, inputs: tuple[Tensor, ...], output: Any) -> Any:
    if isinstance(output, Tensor):  # torch's linear layer
        return module.adapter.added(inputs[0], output, module.bias)
    product, bias = output  # a bias that is returned is not in the product
    return module.adapter.added(inputs[0], product, module.bias if bias is None else None), bias


def named_adapters(chunk: Any) -> Iterator[tuple[str, Adapter]]:
    """(name of the layer in the chunk, adapter) of every layer that has one."""
    for name, module in chunk.named_modules():
        if isinstance(module, Adapter):
            yield name.removesuffix(ADAPTER.rstrip(".")), module


def initialise_adapters(chunks: Sequence[Any], seed: int) -> None:
    """Fill the A's: each drawn whole by a generator of its own and then cut, so that every layout starts from the same ones.

    With DoRA the magnitudes become the norms of the weights' rows: then every tensor-parallel rank calls it, after loading the weights.
    """
    for chunk in chunks:
        for name, adapter in named_adapters(chunk):
            _fill(adapter, global_name(chunk, name), seed)


@torch.no_grad()
def _fill(adapter: Adapter, unique: str, seed: int) -> None:
    pairs, group = adapter.pairs, adapter.group
    size = adapter.a.shape[1] * (1 if pairs.splits_output else group.size())
    for part, own in zip(pairs.trained, adapter.a.split(adapter.rank), strict=False):
        generator = torch.Generator(device="cpu").manual_seed(zlib.crc32(f"{seed}/{unique}{ADAPTER}{part}".encode()))
        whole = (torch.rand(adapter.rank, size, generator=generator, device="cpu") * 2 - 1) / math.sqrt(size)
        own.copy_(upload(whole if pairs.splits_output else whole.chunk(group.size(), dim=1)[group.rank()], own.device), non_blocking=True)
    for matrix in (*adapter.b.values(), *adapter.b0.values()):
        matrix.zero_()
    adapter.start_magnitudes()


class MergedWeights(Mapping[str, Tensor]):
    """This rank's parameters by global name, with adapters merged into the weights on access.

    The last tensor is cached, since callers may read several parts of it in a row: make a new mapping when the adapters change.
    """

    def __init__(self, parameters: Mapping[str, Tensor], chunks: Sequence[Any]) -> None:
        self._parameters = parameters
        self._adapters = {global_name(chunk, f"{name}.weight"): adapter for chunk in chunks for name, adapter in named_adapters(chunk)}
        self._last: tuple[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        weight = linear_weight(self._parameters[name])
        if name not in self._adapters:
            return weight.read()
        if self._last is None or self._last[0] != name:
            self._last = None  # before the next one is made
            self._last = (name, self._adapters[name].merged(weight))
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)
