"""Real Megatron-Core shards without their memory: one process plays any rank of a large world.

torch's `fake` process-group backend answers every collective at once, and fake tensors (meta tensors that remember the device they stand
for) have shapes but no storage. So a run's real modules are built, and their layers run forward and backward, at any size. The
data-parallel size does not change a shard's shapes: worlds here are as small as the layout allows.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from aligner.errors import AlignerError
from aligner.models.config import (
    OF_EXPERTS,
    Architecture,
    Family,
    HFArchitecture,
    Layers,
    LoraTarget,
    ModelConfig,
    PositionEmbedding,
    Quantization,
    Recompute,
)
from aligner.models.families.mapping import ADAPTER
from aligner.models.families.own_modules import PREFIX, has_adapter, is_multimodal, outline, packed_linears, part_of
from aligner.parallel.topology import ParallelConfig, initialize
from aligner.planner.config import Device
from aligner.planner.workload import BlockBytes, Component, Head, Parameter


@contextmanager
def fake_world(parallel: ParallelConfig, *, stage: int = 0) -> Iterator[None]:
    """The first rank of a pipeline stage in the smallest world of this layout. Raises AlignerError if this process is part of a world."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from aligner.parallel.mcore import parallel_state, tensor_parallel

    if dist.is_initialized():
        raise AlignerError("a plan needs a process of its own: this one has joined a torch.distributed world")
    experts = parallel.ep * parallel.etp
    replicas = experts // math.gcd(experts, parallel.tp * parallel.cp)
    per_stage = parallel.tp * parallel.cp * replicas
    dist.init_process_group("fake", store=FakeStore(), rank=stage * per_stage, world_size=per_stage * parallel.pp)
    try:
        initialize(parallel, seed=1)
        # This tracker forks no generator state, which fake tensors do not have.
        tensor_parallel.model_parallel_cuda_manual_seed(1, inference_rng_tracker=True, force_reset_rng=True)
        with FakeTensorMode():
            yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def build_chunks(component: Component) -> list[Any]:
    """This (fake) rank's chunks, without Transformer Engine, which a planning machine may lack: the parameters are the same."""
    from aligner.models.modules.build import build_model
    from aligner.models.modules.heads import add_value_head
    from aligner.models.modules.scalar_head import VALUES, HeadGradient

    head = None if component.head == Head.language else VALUES
    model = replace(component.model, layers=Layers.torch, fp8=False)
    chunks = build_model(component.architecture, model, replace(component.parallel, tp_comm_overlap=False), load=True, head=head)
    for chunk in chunks if component.has_values else ():
        add_value_head(chunk, HeadGradient.joint)
    return chunks


def shard_parameters(component: Component, stage: int) -> list[tuple[Parameter, ...]]:
    """The parameters of every chunk on a rank of a pipeline stage, counted on the real modules."""
    if isinstance(component.architecture, HFArchitecture):
        return [_of_own_modules(component, component.architecture)]
    _import_operators(component.model)
    with fake_world(component.parallel, stage=stage):
        return [tuple(_parameter(name, p) for name, p in chunk.named_parameters()) for chunk in build_chunks(component)]


def _import_operators(model: ModelConfig) -> None:
    """Those of packed weights, before tensors are fake."""
    if model.quantization is Quantization.nf4:
        from aligner.models.modules.linear import operators

        operators()


def _of_own_modules(component: Component, architecture: HFArchitecture) -> tuple[Parameter, ...]:
    """The parameters of a model of `transformers`' own modules."""
    model, lora, itemsize = outline(architecture), component.model.lora, component.model.dtype.num_bytes
    frozen = set() if lora.is_on or not is_multimodal(model) else {None, *component.model.freeze}
    output = model.get_output_embeddings().weight if component.head != Head.language else None
    packed = _packed_bytes(component, architecture)
    found = []
    for name, parameter in model.named_parameters():
        if parameter is output and output is not model.get_input_embeddings().weight:
            continue  # a model that scores has none
        found.append(
            Parameter(
                name=name,
                numel=parameter.numel(),
                itemsize=itemsize,
                packed_bytes=packed.get(name, 0),
                is_frozen=lora.is_on or bool(frozen) and part_of(name, model) in frozen,
            )
        )
        if lora.is_on and has_adapter(f"{PREFIX}{name}", architecture, lora):
            numel = lora.rank * sum(parameter.shape) + (parameter.shape[0] if lora.dora else 0)
            pair = Parameter(name=f"{name}{ADAPTER}", numel=numel, itemsize=itemsize, is_adapter=True)
            found += [pair, *([replace(pair, is_frozen=True)] if lora.is_pissa else [])]
    return tuple(found)


def _packed_bytes(component: Component, architecture: HFArchitecture) -> dict[str, int]:
    """Bytes of the packed weights of `transformers`' own modules, by name."""
    from aligner.models.modules.megatron_config import resolve_dtype
    from aligner.models.modules.packed import whole_packing

    kind, nested = component.model.quantization, component.model.double_quantization
    if not kind.is_on:
        return {}
    found, model, dtype = {}, outline(architecture), resolve_dtype(component.model.dtype)
    for name in packed_linears(architecture, kind):
        weight = model.get_parameter(f"{name}.weight")
        room = whole_packing(weight, kind, dtype, nested=nested).room(weight.shape, weight.device)
        found[f"{name}.weight"] = sum(one.nbytes for one in room)
    return found


def _parameter(name: str, parameter: Tensor) -> Parameter:
    from aligner.models.modules.linear import linear_weight
    from aligner.models.training.muon import is_matrix

    marks = parameter.__dict__  # Megatron-Core's attributes, which parameters of other kinds do not have at all
    weight = linear_weight(parameter)
    return Parameter(
        name=name,
        numel=weight.shape.numel(),
        itemsize=weight.dtype.itemsize,
        packed_bytes=sum(tensor.nbytes for tensor in weight.storage) if len(weight.storage) > 1 else 0,
        is_expert=not marks.get("allreduce", True),
        is_split=bool(marks.get("tensor_model_parallel", False)),
        own_bucket=bool(marks.get("shared_embedding", False)),
        is_frozen=not parameter.requires_grad,
        is_matrix=is_matrix(name, weight.shape),
        is_adapter=ADAPTER in name,
    )


class LiveStorage(TorchDispatchMode):
    """Current and peak bytes of the still referenced storages that operations made while it is active; with `device`, of those there."""

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self._device = device
        self.live = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in given and self._device in ("", tensor.device.type):  # else a view, or an operation in place
                self._add(storage)
        return result

    def restart(self) -> None:
        """Measure the peak from here on."""
        self.peak = self.live

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        weakref.finalize(storage, self._remove, key, size)
        self.live += size
        self.peak = max(self.peak, self.live)

    def _remove(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def measure_block(component: Component, rows: int, length: int, device: Device) -> BlockBytes:
    """Run one and two of the component's layers on fake tensors and measure what they keep. `length` is the whole sequence's. An expert
    layer is measured as the dense layer with the same work per token; `expert_extra_bytes` adds the routing."""
    with _block(component, 1, rows, length, device) as (block, hidden, rotary):
        _without_gradient(block, hidden, rotary)  # allocates what stays, which counts for no layer
        with LiveStorage() as tracker:
            out = _forward(block, hidden, rotary)
            one = tracker.live
            del out
    with _block(component, 2, rows, length, device) as (block, hidden, rotary):
        forward, kept = _without_gradient(block, hidden, rotary)
        with LiveStorage() as tracker:
            out = _forward(block, hidden, rotary)
            two = tracker.live
            for parameter in (p for p in block.parameters() if p.requires_grad):
                parameter.register_post_accumulate_grad_hook(drop_grad)
            tracker.restart()
            out.backward(torch.zeros_like(out))
            backward = max(0, tracker.peak - two)
    return BlockBytes(layer=two - one, ends=2 * one - two, backward=backward, forward=forward, kept=kept)


@contextmanager
def _block(component: Component, num_layers: int, rows: int, length: int, device: Device) -> Iterator[tuple[Any, Tensor, Tensor | None]]:
    """(transformer block, its input, rotary embedding) of a rank of the component with this many layers, in a fake world."""
    p = component.parallel
    parallel = ParallelConfig(tp=p.tp, sequence_parallel=p.sequence_parallel, cp=p.cp)
    architecture = _widest(dense_twin(component.architecture)).with_layers(num_layers)
    small = replace(component, architecture=architecture, model=_twin_adapters(component), parallel=parallel)
    _import_operators(small.model)
    with fake_world(parallel):
        (chunk,) = build_chunks(small)
        if device == Device.gpu and not small.model.batch_invariant:
            _fuse_norms(chunk.decoder)
        hidden = torch.zeros(length // small.shards_sequences, rows, architecture.hidden_size, dtype=chunk.config.params_dtype)
        rotary = chunk.rotary_pos_emb(length) if architecture.position_embedding == PositionEmbedding.rope else None
        if rotary is not None and architecture.rope_local_theta:
            rotary = chunk.with_local_angles(rotary, packed=False)
        yield chunk.decoder, hidden, rotary


def _widest(architecture: Architecture) -> Architecture:
    """All layers like those that keep the most: without windows or chunks, or delta nets if there are any."""
    if architecture.linear_attention_layers:
        return replace(architecture, linear_attention_layers=list(range(architecture.num_layers)))
    if not architecture.full_attention_layers:
        return architecture
    return replace(architecture, sliding_window=0, attention_chunk=0, full_attention_layers=[], rope_local_theta=0.0)


def _forward(block: Any, hidden: Tensor, rotary: Tensor | None) -> Tensor:
    """The block's output for the previous stage's output; it keeps the tensors saved for backward alive."""
    block.train()
    return block(hidden.clone().requires_grad_(), attention_mask=None, rotary_pos_emb=rotary)


@torch.no_grad()
def _without_gradient(block: Any, hidden: Tensor, rotary: Tensor | None) -> tuple[int, int]:
    """(peak bytes of the first pass with its input, less what stays; bytes that stay)."""
    with LiveStorage() as tracker:
        block.eval()
        block(hidden, attention_mask=None, rotary_pos_emb=rotary)
        return tracker.peak - tracker.live + hidden.numel() * hidden.element_size(), tracker.live


def drop_grad(parameter: Tensor) -> None:
    parameter.grad = None  # as Megatron-Core does once it has been added to the main gradient


def dense_twin(architecture: Architecture) -> Architecture:
    """The dense architecture whose feed-forward layer does the work that each token's experts do."""
    if not architecture.num_experts:
        return architecture
    neutral = OF_EXPERTS | {"num_experts": 0, "normalize_expert_weights": True}
    # Mixtral is Llama with experts, and its family's files have no dense feed-forward layer.
    family = Family.llama if architecture.family == Family.mixtral else architecture.family
    return replace(architecture, **neutral, family=family, ffn_hidden_size=architecture.token_ffn_size)


def _twin_adapters(component: Component) -> ModelConfig:
    a, lora = component.architecture, component.model.lora
    if not a.num_experts or lora.rank == 0:
        return component.model
    dense = {LoraTarget.fc1, LoraTarget.gate, LoraTarget.up, LoraTarget.fc2, LoraTarget.experts}
    targets = [target for target in lora.targets if target not in dense or (a.shared_ffn_hidden_size and target != LoraTarget.experts)]
    if LoraTarget.experts in lora.targets:
        targets = [*dict.fromkeys([*targets, LoraTarget.fc1, LoraTarget.fc2])]
    return replace(component.model, lora=replace(lora, targets=targets or lora.targets))


def expert_extra_bytes(component: Component, tokens: int) -> int:
    """Bytes that routing keeps per layer beyond the dense twin: permuted copies of the tokens, experts' outputs, the router's
    float32 logits and probabilities. Assumes a balanced load."""
    architecture = component.architecture
    if not architecture.num_experts:
        return 0
    own = tokens // component.shards_sequences
    copies = 2 * architecture.experts_per_token * architecture.hidden_size * component.dtype_bytes
    whole = 1 if component.model.recompute != Recompute.full else 0
    return whole * own * (copies + 2 * 4 * architecture.num_experts)


class _FusedNorm(torch.autograd.Function):
    """Keeps what CUDA's fused RMSNorm and LayerNorm keep: their input, weight and one float32 per row. Shapes only."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        statistics = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(x, weight, statistics)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class _NormOnGpu(torch.nn.Module):
    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.weight = norm.weight

    def forward(self, x: Tensor) -> Tensor:
        return _FusedNorm.apply(x, self.weight)


def _fuse_norms(module: torch.nn.Module) -> None:
    """Replace the CPU's norms, which make float32 copies that the GPU's norms do not make."""
    for name, child in list(module.named_children()):
        if isinstance(child, (torch.nn.RMSNorm, torch.nn.LayerNorm)):
            setattr(module, name, _NormOnGpu(child))
        else:
            _fuse_norms(child)
