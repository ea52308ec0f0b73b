"""The device a component computes on, and the collective backend that goes with it: CUDA with NCCL, else CPU with gloo."""

from __future__ import annotations

import torch


def backend() -> str:
    """Name of the torch.distributed backend for this machine's device."""
    return "nccl" if torch.cuda.is_available() else "gloo"


def device() -> torch.device:
    """The device of this process (`select_device` has made it the current one)."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def select_device(local_rank: int) -> None:
    """Make the GPU with this rank's number on its node the current device. Does nothing on a CPU machine."""
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank % torch.cuda.device_count())


def default_dtype() -> torch.dtype:
    """bfloat16 where the hardware multiplies it fast, float32 on CPU."""
    return torch.bfloat16 if torch.cuda.is_available() else torch.float32


def synchronize() -> None:
    """Wait for the device, so that a wall-clock reading means what it says."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
