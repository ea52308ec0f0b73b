"""Killing a run with SIGKILL, and comparing what two runs left to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from training_jobs import Job, kill


def kill_after(job: Job, step: int) -> None:
    """SIGKILL to every process of the job once metrics.jsonl has this step."""
    job.reached(step)
    while processes := job.processes():  # again for what was being started meanwhile
        for pid in processes:
            kill(pid)
        job.process.poll()


def weights(directory: Path) -> bytes:
    """The exported model's file."""
    return (directory / "export" / "model.safetensors").read_bytes()


def optimizer_and_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint's weights and optimizer, by part and name, read with torch alone."""
    return {
        f"{part}/{name}": tensor
        for part in ("weights", "optimizer")
        for name, tensor in _leaves(_read(checkpoint / part))
        if tensor.numel()
    }


def same_tensors(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Raise AssertionError naming the tensors that differ."""
    assert one.keys() == other.keys()
    assert any(name.startswith("optimizer/") for name in one) and any(name.startswith("weights/") for name in one)
    assert [name for name, tensor in one.items() if not torch.equal(tensor, other[name])] == []


def _read(directory: Path) -> dict[str, Any]:
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict[str, Any] = {}
    _load_state_dict(state, storage_reader=FileSystemReader(directory), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return state


def _leaves(node: Any, prefix: str = ""):
    if isinstance(node, torch.Tensor):
        yield prefix, node
    elif isinstance(node, dict):
        for key, value in node.items():
            yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))
