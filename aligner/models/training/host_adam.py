"""`optimizer.cpu_offload`: AdamW whose float32 weights, moments and computation are the host's, on Megatron-Core's HybridDeviceOptimizer.

Upstream's class (0.16.1 and 0.19 have the same) is kept where it splits groups, steps and hands on learning rates. Here it is mended:

- It copies the whole model's parameters to page-locked memory before it is made again of this rank's shards: `open` makes copies once.
- It locks memory in powers of two, and loses the lock where it makes float32 of bfloat16: uploads would be slow, and wait.
- It takes no views of float32 weights, which heads of reward models and critics are, and copies nothing on a machine without CUDA.
- It rounds to the model's type on the host.

Megatron-Core's precision-aware mode goes with it: gradients reach it in the buffers that reduced them, the device keeps no float32 weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from aligner.models.training.offload import LockedMemory
from aligner.parallel.mcore import HybridDeviceOptimizer


class HostAdam(HybridDeviceOptimizer):
    """The first `offload_fraction` of the parameters' elements is updated on the host; the rest by torch's AdamW on the device."""

    def __init__(self, params: Any, **defaults: Any) -> None:
        # The fused kernels on a GPU machine, the same as without offload on others: there the numbers are the same bit for bit.
        super().__init__(params, **defaults | {"gpu_optimizer_cls": torch.optim.AdamW, "fused": torch.cuda.is_available()})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, for shards of float32 weights too, which are no leaves."""
        for name, value in self.defaults.items():
            param_group.setdefault(name, value)
        self.param_groups.append(param_group)

    def _init_sub_optimizers(self) -> None:
        self.cpu_optimizers, self.gpu_optimizer = [], None  # until `open`

    def _register_load_state_dict_hooks(self) -> None:
        """States are read by `aligner.models.checkpoint.optimizer`, and nothing is made again for them."""

    def open(self) -> None:
        """Copy the weights, which Megatron-Core has cut by now, to the host, and get ready to step."""
        self._memory = LockedMemory()
        super()._init_sub_optimizers()
        hosts = list(self.cpu_copys_map_gpu_param)
        for inner, gradient in zip(hosts, self._memory.like(hosts), strict=True):
            self.cpu_copy_map_grad[inner] = inner.grad = gradient

    @torch.no_grad()
    def _get_sub_optimizer_param_groups(self, offload_fraction: float) -> tuple[Any, ...]:
        """Groups for the host and for the device; {shard: copy} and {copy: shard} of the host's, {shard: what is updated} of all."""
        everything = [p for group in self.param_groups for p in group["params"]]
        wanted, chosen = offload_fraction * sum(p.numel() for p in everything), []
        for p in everything:
            if wanted > 0:
                chosen.append(p)
            wanted -= p.numel()
        copies = self._memory.like([torch.empty(p.shape, dtype=torch.float32, device="meta") for p in chosen])
        on_host = dict(zip(chosen, copies, strict=True))
        inner = {p: on_host[p].copy_(p) if p in on_host else p.detach().float() for p in everything}  # float32 weights are their own
        parts = []
        for is_host in (True, False):
            groups = [group | {"params": [inner[p] for p in group["params"] if (p in on_host) is is_host]} for group in self.param_groups]
            parts.append([group for group in groups if group["params"]])
        return *parts, on_host, {copy: p for p, copy in on_host.items()}, inner

    def _register_param_copy_back_gpu_hook(self) -> None:
        """After each step of a part: its weights to the model's, rounded on the device. The next part's step does not wait for it."""

        def show(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            for inner in _parameters(optimizer):
                weight = self.inner_param_to_orig_param[inner].detach()
                weight.copy_(inner.to(weight.device, non_blocking=True))

        for optimizer in self.sub_optimizers:
            optimizer.register_step_post_hook(show)

    def begin(self, step: int) -> None:
        """A state of `step` steps whose moments are to be filled in."""
        for optimizer in self.sub_optimizers:
            for p in _parameters(optimizer):
                device = p.device if self.defaults["fused"] else None
                moments = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
                optimizer.state[p] = {"step": torch.tensor(float(step), device=device), **moments}
        self._sync_sub_optimizers_state_to_hdo()


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


def main_weights(optimizer: Any) -> list[Tensor]:
    """What Megatron-Core's (chained) optimizer updates, wherever it is: float32 tensors that may be views of the model's."""
    found: list[Tensor] = []
    for part in optimizer.chained_optimizers:
        own = part.optimizer
        found += own.param_to_fp32_param.values() if isinstance(own, HostAdam) else [p for g in part.param_groups for p in g["params"]]
    return [p.detach() for p in found]
