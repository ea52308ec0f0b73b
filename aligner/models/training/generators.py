"""The random-number generators that a model's passes draw from, on this rank."""

from __future__ import annotations

from typing import Any

import torch

from aligner.parallel.mcore import tensor_parallel


def generator_state() -> dict[str, Any]:
    """The states of the generators: torch's for the CPU and the device, and Megatron-Core's."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "tracker": dict(tensor_parallel.get_cuda_rng_tracker().get_states())}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_generator_state(state: dict[str, Any]) -> None:
    """Restore a result of `generator_state`."""
    torch.set_rng_state(state["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
