"""`optimizer.kind=adam8bit`: AdamW whose moments have 8 bits, with a scale for each 256 elements (Dettmers et al. 2021, 2110.02861).

bitsandbytes computes the update, on a GPU and on a CPU; the shards, groups and learning rates are Megatron-Core's. Blocks run along this
rank's part of a parameter. A part below `SMALLEST` elements keeps float32 moments, as in bitsandbytes.

Checkpoints have float32 moments, like those of `adam`, so that either kind continues from them at any layout. At the same layout the
resumed state is the saved one bit for bit: bitsandbytes' signed codes end at -0.993 and 1, so the element by which a block was scaled, if
it is negative, is written as -1 times the scale. The largest magnitude of a block then is its scale.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from aligner.models.modules.linear import operators

BLOCK = 256  # elements with one scale
SMALLEST = 4096
_MOMENTS = ("exp_avg", "exp_avg_sq")


class Adam8bit(torch.optim.AdamW):
    """The state of a parameter: `step`, its moments as codes (uint8) or float32, and for codes `<moment>_scale` for each block."""

    def __init__(self, params: Any, **defaults: Any) -> None:
        super().__init__(params, **defaults)
        operators("optimizer.kind=adam8bit", "adam")
        self._functional = importlib.import_module("bitsandbytes.functional")
        maps = (self._functional.create_dynamic_map(signed=name == "exp_avg") for name in _MOMENTS)
        self._codes = dict(zip(_MOMENTS, maps, strict=True))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)

    def _update(self, p: Tensor, group: Mapping[str, Any]) -> None:
        state = self.state[p] or self._begin(p, 0)
        state["step"] += 1
        first, second = (state[name] for name in _MOMENTS)
        beta1, beta2 = group["betas"]
        common = {"eps": group["eps"], "step": state["step"], "lr": group["lr"], "weight_decay": group["weight_decay"]}
        if first.dtype == torch.float32:
            self._functional.optimizer_update_32bit("adam", p.grad, p, first, beta1, state2=second, beta2=beta2, **common)
            return
        maps = {f"qmap{number}": self._map(name, p) for number, name in enumerate(_MOMENTS, 1)}
        scales = {f"absmax{number}": state[f"{name}_scale"] for number, name in enumerate(_MOMENTS, 1)}
        self._functional.optimizer_update_8bit_blockwise(
            "adam", p.grad, p, first, second, beta1, beta2, 0.0, 0.0, **common, **maps, **scales
        )

    def begin(self, step: int) -> None:
        """A state of `step` steps whose moments are to be filled in."""
        for group in self.param_groups:
            for p in group["params"]:
                self._begin(p, step)

    def _begin(self, p: Tensor, step: int) -> dict[str, Any]:
        is_small = p.numel() < SMALLEST
        state: dict[str, Any] = {"step": step}
        for name in _MOMENTS:
            state[name] = torch.zeros_like(p, dtype=torch.float32 if is_small else torch.uint8, requires_grad=False)
            if not is_small:
                state[f"{name}_scale"] = torch.zeros(-(-p.numel() // BLOCK), device=p.device)
        self.state[p] = state
        return state

    def _map(self, name: str, p: Tensor) -> Tensor:
        """The numbers that codes stand for, ascending."""
        self._codes[name] = self._codes[name].to(p.device)
        return self._codes[name]

    def moments(self, p: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The names and float32 values from which `fill` makes the same state."""
        for name in _MOMENTS:
            held = self.state[p][name]
            if held.dtype == torch.uint8:
                numbers = self._map(name, p).clone()
                if numbers[0] < 0:
                    numbers[0] = -1.0
                scales = self.state[p][f"{name}_scale"].repeat_interleave(BLOCK)[: held.numel()]
                held = numbers[held.int()].mul_(scales.view_as(held)).cpu()  # of all parameters together they would fill the device
            yield name, held

    @torch.no_grad()
    def fill(self, p: Tensor, moments: Mapping[str, Tensor]) -> None:
        """Put float32 moments into the state; each becomes the nearest code."""
        for name in _MOMENTS:
            held, wanted = self.state[p][name], moments[name].to(p.device)
            if held.dtype == torch.uint8:
                numbers, scale = self._map(name, p), self.state[p][f"{name}_scale"]
                blocks = torch.nn.functional.pad(wanted.flatten(), (0, -wanted.numel() % BLOCK)).view(-1, BLOCK)
                scale.copy_(blocks.abs().amax(dim=1))
                shares = blocks / scale.where(scale > 0, 1.0)[:, None]
                codes = torch.bucketize(shares, (numbers[1:] + numbers[:-1]) / 2, out_int32=True)
                wanted = codes.flatten()[: held.numel()].view_as(held)
            held.copy_(wanted)
