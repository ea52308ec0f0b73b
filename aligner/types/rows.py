"""Rows and columns of any batch: a part of its rows, other widths, another device."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from aligner.types import (
    Batch,
    DistillationBatch,
    LabeledBatch,
    PolicyBatch,
    PreferenceBatch,
    RolloutBatch,
    StepBatch,
    TokenBatch,
    ValueBatch,
)
from aligner.types.batches import FIELDS


def num_rows(batch: Batch) -> int:
    """B, or 2P for preference pairs."""
    return batch.tokens.shape[0]


BatchT = TypeVar("BatchT", TokenBatch, RolloutBatch, PolicyBatch, ValueBatch, PreferenceBatch, LabeledBatch, StepBatch, DistillationBatch)


def select_rows(batch: BatchT, start: int, stop: int) -> BatchT:
    """Rows `start` to `stop` of every tensor; fields of one entry per pair are sliced by pair."""
    rows = num_rows(batch)
    parts: dict[str, Any] = {}
    for f in fields(batch):
        tensor: Tensor | None = getattr(batch, f.name)
        if tensor is None:
            parts[f.name] = None
        else:
            per = rows // tensor.shape[0] if tensor.shape[0] else 1  # 2 for one entry per pair
            parts[f.name] = tensor[start // per : stop // per]
    return type(batch)(**parts)


def take_rows(batch: BatchT, rows: Tensor) -> BatchT:
    """The rows with these numbers (int64), in this order; where fields have one entry per pair, `rows` names whole pairs."""
    parts: dict[str, Any] = {}
    for f in fields(batch):
        tensor: Tensor | None = getattr(batch, f.name)
        if tensor is not None:
            per = num_rows(batch) // tensor.shape[0] if tensor.shape[0] else 1  # 2 for one entry per pair
            tensor = tensor[rows if per == 1 else rows[::per] // per]
        parts[f.name] = tensor
    return type(batch)(**parts)


_PER_TOKEN = {name for name, (_, axes) in FIELDS.items() if "S" in axes}


def trim_columns(batch: BatchT, width: int) -> BatchT:
    """The first `width` columns of every [B, S] (and [B, S, K]) tensor; narrower batches are padded with zeros (False) up to it."""
    parts: dict[str, Any] = {}
    for f in fields(batch):
        tensor: Tensor | None = getattr(batch, f.name)
        if tensor is not None and f.name in _PER_TOKEN:
            tensor = pad_columns(tensor, width) if tensor.shape[1] < width else tensor[:, :width]
        parts[f.name] = tensor
    return type(batch)(**parts)


def pad_columns(tensor: Tensor, width: int) -> Tensor:
    """[B, width, ...] with zeros behind what `tensor` [B, S, ...] has."""
    return torch.nn.functional.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, width - tensor.shape[1]))


def to_device(batch: BatchT, device: torch.device) -> BatchT:
    """The same batch with every tensor on `device`."""
    tensors = {f.name: getattr(batch, f.name) for f in fields(batch)}
    parts: dict[str, Any] = {name: tensor if tensor is None else upload(tensor, device) for name, tensor in tensors.items()}
    return type(batch)(**parts)


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on `device`; to a GPU from page-locked memory, so that the host does not wait for what the GPU has to do before."""
    return tensor.contiguous().pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
