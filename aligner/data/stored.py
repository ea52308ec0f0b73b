"""Examples in memory-mapped files: a run opens millions of them at once, and holds only a batch in memory.

    <directory>/shard_000.arrow   an Arrow stream: blocks of examples, one record batch each, with the schema of the example's dataclass
    <directory>/blocks.npy        int64 [blocks, 5]: shard, offset and size in bytes, examples, CRC-32
    <directory>/counts.npy        int32 [examples, rows, 2]: tokens and trained tokens of each row of an example

A block's CRC-32 is checked when its first example is read.
"""

from __future__ import annotations

import functools
import json
import os
import typing
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from aligner.errors import AlignerError, DataError
from aligner.settings.schema import without_none
from aligner.types.extras import from_json, to_json

try:
    import pyarrow as pa
except ImportError as error:  # pip cannot know: pyarrow does not declare that it requires NumPy
    raise AlignerError(f"the package pyarrow does not import: {error}; beside NumPy 1: pip install 'pyarrow<26'") from error

Example = TypeVar("Example")
Array = np.ndarray[Any, Any]
BLOCKS, COUNTS = "blocks.npy", "counts.npy"
_SIMPLE = {int: pa.int64(), float: pa.float64(), bool: pa.bool_(), str: pa.large_string()}
_END = b"\xff\xff\xff\xff\0\0\0\0"  # of an Arrow stream
_EXTRAS = Mapping[str, Tensor]  # `aligner.types.extras`, as JSON
_OPEN_BLOCKS = 64  # kept open, only to save time


class NotStorable(Exception):
    """A field has a type that these files cannot hold."""


def shard_name(number: int) -> str:
    return f"shard_{number:03d}.arrow"


def schema_of(kind: type) -> pa.Schema:
    """The columns of a dataclass of examples. Raises NotStorable for a field without a column."""
    return pa.schema([(name, _type(hint)) for name, hint in _hints(kind).items()])


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    """The types of a dataclass's fields, except tensors: they are added to an example later, and None until then."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind) if hints[field.name] != Tensor | None}


def _type(hint: Any) -> pa.DataType:
    hint = without_none(hint)
    if _is_json(hint):
        return pa.large_string()
    if hint in _SIMPLE:
        return _SIMPLE[hint]
    if typing.get_origin(hint) is tuple and (item := typing.get_args(hint)[0]) is not None:
        return pa.large_list(pa.int32() if item is int else _type(item))
    if is_dataclass(hint):
        return pa.struct(list(schema_of(hint)))  # type: ignore[arg-type]
    raise NotStorable(str(hint))


def _is_json(hint: Any) -> bool:
    """Whether a field holds arbitrary objects, kept as JSON: a mapping, or a tuple of them."""
    arguments = typing.get_args(hint)
    return typing.get_origin(hint) is Mapping or (typing.get_origin(hint) is tuple and _is_json(arguments[0]))


def _plain(value: Any, hint: Any, source: str = "") -> Any:
    """A value of an example as pyarrow accepts it; `source` is its origin, for messages."""
    hint = without_none(hint)
    if value is None:
        return None
    if is_dataclass(hint):
        return {name: _plain(getattr(value, name), own, getattr(value, "source", source)) for name, own in _hints(hint).items()}  # type: ignore[arg-type]
    if hint == _EXTRAS:
        return json.dumps(to_json(value))
    if _is_json(hint):
        return _json(value, "", source)
    if typing.get_origin(hint) is tuple and is_dataclass(item := typing.get_args(hint)[0]):
        return [_plain(one, item, source) for one in value]
    return value


def _json(value: Any, name: str, source: str) -> str:
    """A value as JSON. Raises DataError, with the field's name, if JSON cannot hold it."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        for inner, one in value.items() if isinstance(value, Mapping) else ():
            _json(one, f"{name}.{inner}" if name else inner, source)
        what = f"{source}: field {name!r} is {value!r:.80}"
        raise DataError(f"{what}, which data.cache cannot keep: {error}; allowed: values of JSON, or data.cache=''") from error


def rows_of(example: Any) -> Sequence[Any]:
    """The rows of an example that a model reads: itself, its row, or all of them."""
    if isinstance(rows := getattr(example, "rows", None), tuple):
        return rows
    return (getattr(example, "row", None) or getattr(example, "prompt", None) or example,)


def _counts(example: Any) -> list[tuple[int, int]]:
    return [(len(row.tokens), sum(getattr(row, "loss_mask", ()))) for row in rows_of(example)]


def row_counts(examples: Sequence[Any]) -> Array:
    """int32 [examples, rows, 2]: tokens and trained tokens of each row; all examples have equally many. From the files, if any."""
    if (stored := getattr(examples, "row_counts", None)) is not None:
        return stored()  # type: ignore[no-any-return]
    return np.array([_counts(example) for example in examples], dtype=np.int32)


class ShardWriter:
    """Writes one shard, block by block; `blocks` and `counts` are its part of the other two files."""

    def __init__(self, directory: Path, number: int, kind: type) -> None:
        self.blocks: list[tuple[int, int, int, int, int]] = []
        self.counts: list[Array] = []
        self._number, self._kind = number, kind
        self._schema = schema_of(kind)
        self._file = (directory / shard_name(number)).open("wb")
        self._file.write(self._schema.serialize())

    def write(self, examples: Sequence[Any]) -> None:
        """One block, which may be empty. Raises DataError if examples differ in their numbers of rows."""
        counts = [_counts(example) for example in examples]
        try:
            self.counts.append(np.array(counts, dtype=np.int32) if counts else np.empty((0, 1, 2), dtype=np.int32))
        except ValueError as error:
            raise DataError("records have different numbers of responses, expected the same number in all") from error
        content = pa.RecordBatch.from_pylist([_plain(example, self._kind) for example in examples], schema=self._schema).serialize()
        self.blocks.append((self._number, self._file.tell(), content.size, len(examples), zlib.crc32(content)))
        self._file.write(content)

    def close(self) -> None:
        self._file.write(_END)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def write_index(directory: Path, blocks: Sequence[tuple[int, int, int, int, int]], counts: Sequence[Array]) -> None:
    """Write the index of the examples, in the order of `blocks`."""
    rows = [one for one in counts if len(one)]
    if len({one.shape[1] for one in rows}) > 1:
        raise DataError("records have different numbers of responses, expected the same number in all")
    np.save(directory / BLOCKS, np.array(blocks, dtype=np.int64).reshape(-1, 5))
    np.save(directory / COUNTS, np.concatenate(rows) if rows else np.empty((0, 1, 2), dtype=np.int32))


class StoredExamples(Sequence[Example]):
    """The examples of a directory, of the dataclass `kind`. Raises DataError, also later, if a file is damaged."""

    def __init__(self, directory: Path, kind: type[Example]) -> None:
        self._directory, self._kind, self._schema = directory, kind, schema_of(kind)
        self._blocks = np.load(directory / BLOCKS, mmap_mode="r")
        self._counts = np.load(directory / COUNTS, mmap_mode="r")
        self._starts = np.concatenate([[0], np.cumsum(self._blocks[:, 3])])
        self._whole = np.zeros(len(self._blocks), dtype=bool)  # checksums compared
        self._shards: dict[int, pa.Buffer] = {}
        self._open: dict[int, pa.RecordBatch] = {}

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        block = int(self._starts.searchsorted(number, side="right")) - 1
        return _example(self._block(block), number - int(self._starts[block]), self._kind)

    def row_counts(self) -> Array:
        """int32 [examples, rows, 2]: tokens and trained tokens of each row."""
        return self._counts

    def _block(self, number: int) -> pa.RecordBatch:
        if number not in self._open:
            while len(self._open) >= _OPEN_BLOCKS:
                del self._open[next(iter(self._open))]
            shard, start, size, _, checksum = self._blocks[number].tolist()
            if shard not in self._shards:
                self._shards[shard] = pa.memory_map(str(self._directory / shard_name(shard))).read_buffer()
            content = self._shards[shard].slice(start, size)
            if not self._whole[number] and zlib.crc32(content) != checksum:
                raise DataError(
                    f"{self._directory / shard_name(shard)} is damaged; remove {self._directory}, and it will be made again (data.cache)"
                )
            self._whole[number] = True
            self._open[number] = pa.ipc.read_record_batch(content, self._schema)
        return self._open[number]


def _example(columns: pa.RecordBatch | pa.StructArray, index: int, kind: type[Example]) -> Example:
    read = columns.column if isinstance(columns, pa.RecordBatch) else columns.field
    return kind(**{name: _value(read(name), index, hint) for name, hint in _hints(kind).items()})


def _value(array: pa.Array, index: int, hint: Any) -> Any:
    """One value of a column, as in the dataclass. A list of numbers is read at once, not one by one."""
    hint = without_none(hint)
    if array.null_count and not array[index].is_valid:
        return None
    if _is_json(hint):
        value = json.loads(array[index].as_py())
        if hint == _EXTRAS:
            return from_json(value)
        return tuple(value) if typing.get_origin(hint) is tuple else value
    if is_dataclass(hint):
        return _example(array, index, hint)  # type: ignore[arg-type]
    if typing.get_origin(hint) is not tuple:
        return array[index].as_py()
    start, stop = array.offsets[index].as_py(), array.offsets[index + 1].as_py()
    item = typing.get_args(hint)[0]
    if is_dataclass(item) or typing.get_origin(item) is tuple:
        return tuple(_value(array.values, place, item) for place in range(start, stop))
    return tuple(array.values.slice(start, stop - start).to_numpy(zero_copy_only=False).tolist())
