"""The loss scale of a float16 model: what its losses are multiplied by before the backward pass, and its gradients divided by after it.

float16 has 10 bits of mantissa where bfloat16 has 7, so the log-probs of sampler and trainer differ by far less (2510.26788); but it holds
nothing below 6e-8 nor above 65504. The scale keeps small gradients from vanishing. It is halved when a gradient overflows, and that update
is left out; it doubles after a number of updates without an overflow (Micikevicius et al. 2017, 1710.03740, section 3.2). It is a power of
two, so that scaling rounds nothing. Losses are sums over tokens here, so it is smaller than where they are means.
"""

from __future__ import annotations

from typing import Any

import torch


class LossScale:
    """The scale of one model's optimizer, the same on every rank; without effect for a model that is not float16."""

    def __init__(self, optimizer: Any = None) -> None:
        parts = [] if optimizer is None else optimizer.chained_optimizers
        # Every part of a chained optimizer has its own. They stay alike: an update is made in all parts or left out in all.
        self._scalers = [part.grad_scaler for part in parts if getattr(part, "grad_scaler", None) is not None]

    @property
    def is_on(self) -> bool:
        return bool(self._scalers)

    @property
    def value(self) -> float:
        """The factor; 1 where there is none."""
        return float(self._scalers[0].scale) if self._scalers else 1.0

    def back_off(self) -> bool:
        """After a gradient that is not finite: lower the scale. False where it is the least already, or there is none."""
        if not self._scalers or self.value <= float(self._scalers[0].min_scale):
            return False
        for scaler in self._scalers:
            scaler.update(True)
        return True

    def state(self) -> dict[str, float] | None:
        """What a resumed run needs, JSON-able; None where there is none."""
        if not self._scalers:
            return None
        return {name: float(value) for name, value in self._scalers[0].state_dict().items()}

    def load_state(self, state: dict[str, float] | None) -> None:
        """Go on from a saved `state`. Keeps the initial scale where the saved model was not float16."""
        if state is None:
            return
        for scaler in self._scalers:
            counts = {name: int(value) for name, value in state.items() if name != "scale"}
            scaler.load_state_dict({"scale": torch.tensor([state["scale"]], dtype=torch.float), **counts})
