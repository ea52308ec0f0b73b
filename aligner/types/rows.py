"""Rows and columns of any batch: a part of its rows, other widths, another device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from aligner.types.batches import FIELDS, Batch, BatchT, tensors_of
from aligner.types.extras import RowTensor


def num_rows(batch: Batch) -> int:
    """B, or 2P for preference pairs."""
    return batch.tokens.shape[0]


def take_rows(batch: BatchT, rows: Tensor | slice) -> BatchT:
    """The rows from one number to another, or those with these numbers (int64), in this order; of pairs whole ones."""

    def part(name: str, tensor: Tensor) -> Tensor:
        per = num_rows(batch) // tensor.shape[0] if tensor.shape[0] else 1  # 2 for one entry per pair
        if isinstance(rows, slice):
            return tensor[rows.start // per : rows.stop // per]
        return tensor[rows if per == 1 else rows[::per] // per]

    return _mapped(batch, part, lambda extra: extra.take(rows))


def trim_columns(batch: BatchT, width: int) -> BatchT:
    """The first `width` columns of every [B, S] (and [B, S, K]) tensor; narrower batches are padded with zeros (False) up to it."""

    def part(name: str, tensor: Tensor) -> Tensor:
        if "S" not in FIELDS[name][1]:
            return tensor
        return pad_columns(tensor, width) if tensor.shape[1] < width else tensor[:, :width]

    return _mapped(batch, part, lambda extra: extra.trimmed(width))


def pad_columns(tensor: Tensor, width: int) -> Tensor:
    """[B, width, ...] with zeros behind what `tensor` [B, S, ...] has."""
    return torch.nn.functional.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, width - tensor.shape[1]))


def to_device(batch: BatchT, device: torch.device) -> BatchT:
    """The same batch with every tensor on `device`."""
    return _mapped(batch, lambda _, tensor: upload(tensor, device), lambda extra: type(extra)(upload(extra.data, device)))


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on `device`; to a GPU from page-locked memory, so that the host does not wait for what the GPU has to do before."""
    return tensor.contiguous().pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _mapped(batch: BatchT, of_field: Callable[[str, Tensor], Tensor], of_extra: Callable[[RowTensor], RowTensor]) -> BatchT:
    """A batch of the same class whose tensors and extras these functions return."""
    tensors = {name: of_field(name, tensor) for name, tensor in tensors_of(batch).items()}
    extras = {name: of_extra(extra) for name, extra in batch.extras.items()}
    return replace(batch, extras=extras, **tensors)
