"""Checkpointing of Megatron-Core's distributed optimizer where neither Transformer Engine nor Apex brings a fused Adam."""

from __future__ import annotations

from typing import Any

import torch


def repair(optimizer: type) -> None:
    """Make `optimizer` (DistributedOptimizer) save and load torch's AdamW.

    It assumes a fused Adam: state always allocated, no per-parameter `step`.

    torch's AdamW allocates state at its first step and counts `step` per parameter; and upstream gives all parameters *one* shared `step`
    tensor on load, which AdamW would advance once per parameter (a resumed run then diverges by 3e-3).
    """
    save, load = optimizer.state_dict, optimizer.load_state_dict

    @torch.no_grad()
    def set_main_param_and_optimizer_states(self: Any, model_param: torch.Tensor, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        main = self.optimizer.param_groups[group]["params"][order]
        destination = {"param": main, **self.optimizer.state[main]}
        for key, value in tensors.items():
            if key != "step" and torch.is_tensor(value):
                destination[key].copy_(value)

    def state_dict(self: Any) -> Any:
        if not self.is_stub_optimizer and not self.optimizer.state:
            for group in self.optimizer.param_groups:
                for p in group["params"]:
                    self.optimizer.state[p] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(p),
                        "exp_avg_sq": torch.zeros_like(p),
                    }
        return save(self)

    def load_state_dict(self: Any, state: Any) -> None:
        load(self, state)
        for parameter_state in self.optimizer.state.values():
            if "step" in parameter_state:
                parameter_state["step"] = parameter_state["step"].clone()

    optimizer._set_main_param_and_optimizer_states = set_main_param_and_optimizer_states
    optimizer.state_dict = state_dict
    optimizer.load_state_dict = load_state_dict
