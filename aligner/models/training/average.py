"""An exponential moving average of the optimizer's float32 weights (`optimizer.ema_decay`).

After each update average = decay * average + (1 - decay) * weights, from the weights that training starts with. It lies in the optimizer's
state beside the moments: sharded, offloaded and saved as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

EMA = "ema"  # key of a parameter's state


def averaging_step(optimizer: Any, decay: float) -> Any:
    """A step of Megatron-Core's (chained) optimizer, with an average unless `decay` is 0; what its `step` returns."""
    held = list(_held(optimizer)) if decay else []
    starts = {weight: weight.detach().clone() for state, weight in held if EMA not in state.get(weight, {})}
    result = optimizer.step()
    for state, weight in held:
        if state.get(weight):  # without a gradient it has no moments yet, and is where it was
            state[weight].setdefault(EMA, starts.get(weight)).lerp_(weight.detach(), 1 - decay)
    return result


def make_room(optimizer: Any) -> None:
    """Averages of any contents beside the moments, to be read from a checkpoint."""
    for state, weight in _held(optimizer):
        state[weight][EMA] = torch.empty_like(weight, requires_grad=False)


@torch.no_grad()
def exchange(optimizer: Any) -> None:
    """Put the averages in the weights' place and the weights in theirs, in the optimizer and in this rank's share of the model."""
    for state, weight in _held(optimizer):
        if EMA in state.get(weight, {}):
            kept = weight.detach().clone()
            weight.copy_(state[weight][EMA])
            state[weight][EMA].copy_(kept)
    for part in (part for part in optimizer.chained_optimizers if not part.is_stub_optimizer):
        part._copy_main_params_to_model_params()


def _held(optimizer: Any) -> Iterator[tuple[dict[Tensor, Any], Tensor]]:
    """(states by weight, weight) of this rank's float32 weights."""
    for part in optimizer.chained_optimizers:
        if not part.is_stub_optimizer:
            yield from ((part.optimizer.state, weight) for group in part.optimizer.param_groups for weight in group["params"])
