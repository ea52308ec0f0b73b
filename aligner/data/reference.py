"""A frozen reference's log-probs of the examples of a run, computed once and kept on disk.

<directory>/manifest.json             the inputs (`aligner.data.parts`)
<directory>/part_000000.safetensors   of the rows of `part_size` examples, in their order: number of trained tokens, and their log-probs

Log-probs are float32 and only of trained tokens: 4 bytes each. A run reads rows as it needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from aligner.data.parts import Parts
from aligner.data.supervised import SupervisedExample
from aligner.errors import DataError
from aligner.files import publish


class Referenced(Protocol):
    """An example whose rows a reference judges: a pair, or a single response."""

    @property
    def rows(self) -> Sequence[SupervisedExample]: ...

    def with_reference(self, logprobs: Sequence[Tensor]) -> Any:
        """The same example with the log-probs of the trained tokens of each row."""


Example = TypeVar("Example", bound=Referenced)


def write_part(parts: Parts, number: int, rows: Sequence[Tensor]) -> None:
    """Write the log-probs, float32 [trained tokens], of each row of a part. A file that has its name is complete and on disk."""
    tensors = {"learnt": torch.tensor([len(row) for row in rows], dtype=torch.int64), "logprobs": torch.cat(list(rows))}
    publish(parts.path(number), lambda new: save_file(tensors, new))


class _Part:
    """An open file: where its rows begin."""

    def __init__(self, parts: Parts, number: int, rows_per_example: int) -> None:
        path = parts.path(number)
        try:
            self._file = safe_open(path, framework="pt")
            learnt = self._file.get_tensor("learnt")
            shape = self._file.get_slice("logprobs").get_shape()
        except (SafetensorError, OSError) as error:
            raise DataError(f"{path} is not a file of a reference's log-probs: {error}; remove it, and it is computed again") from error
        expected = rows_per_example * min(parts.part_size, parts.num_items - number * parts.part_size)
        if len(learnt) != expected or shape != [int(learnt.sum())]:
            raise DataError(f"{path} has log-probs {shape} of {len(learnt)} rows, expected {expected} rows; remove it to compute it again")
        self.path = path
        self._starts = [0, *learnt.cumsum(0).tolist()]

    def row(self, row: int) -> Tensor:
        return self._file.get_slice("logprobs")[self._starts[row] : self._starts[row + 1]]


class WithReference(Sequence[Example]):
    """The examples, from number `first` of the parts on, with the log-probs that are stored for them, read when they are asked for.

    All have as many rows. Raises DataError if a file is damaged, or is of other rows.
    """

    def __init__(self, examples: Sequence[Example], parts: Parts, first: int) -> None:
        self._examples = examples
        self._parts = parts
        self._first = first
        self._open: dict[int, _Part] = {}

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Example:
        example = self._examples[index]
        number, place = divmod(self._first + range(len(self))[index], self._parts.part_size)
        rows = example.rows
        if number not in self._open:
            self._open[number] = _Part(self._parts, number, len(rows))
        part = self._open[number]
        found = [part.row(len(rows) * place + offset) for offset in range(len(rows))]
        for row, logprobs in zip(rows, found, strict=True):
            if len(logprobs) != sum(row.loss_mask):
                raise DataError(f"{part.path} has {len(logprobs)} log-probs of {row.source}, which has {sum(row.loss_mask)} learnt tokens")
        return example.with_reference(found)
