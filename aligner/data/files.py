"""Data files as bytes and rows: compressed ones, CSV and Arrow. `aligner.data.sources` reads the rest, and makes records of all."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from aligner.errors import DataError

PACKED = (".gz", ".bz2", ".xz", ".zst")
TEXTUAL = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")  # which may be compressed; the others compress themselves
SUFFIXES = (*TEXTUAL, ".parquet", ".arrow", *(suffix + packed for packed in PACKED for suffix in TEXTUAL))
READABLE = f"{', '.join((*TEXTUAL, '.parquet', '.arrow'))}, and {', '.join(TEXTUAL)} with {', '.join(PACKED)}"  # for messages
# Columns of a CSV file that hold numbers, truth values or lists; a cell of any other holds text, unless it is a list of objects.
_NOT_TEXT = frozenset(
    ("label", "labels", "preference", "kto_tag", "chosen_reward", "rejected_reward", "score_chosen", "score_rejected")
    + ("chosen_score", "rejected_score", "chosen-rating", "rejected-rating", "helpfulness", "correctness", "coherence", "complexity")
    + ("verbosity", "preference_strength", "overall_preference", "history", "steps", "completions", "messages", "conversations", "tools")
)
_TRUTHS = {"true": True, "false": False}


def suffix_of(name: str) -> str:
    """The suffix that says what a file is, without that of its compression; empty if it cannot be read."""
    found = next((suffix for suffix in SUFFIXES if name.lower().endswith(suffix)), "")
    return next((found.removesuffix(packed) for packed in PACKED if found.endswith(packed)), found)


def opened(file: Path) -> IO[bytes]:
    """A file's bytes, unpacked."""
    packed = file.suffix.lower()
    if packed == ".zst":
        import pyarrow

        return io.BufferedReader(pyarrow.input_stream(str(file), compression="zstd"))
    openers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    return openers.get(packed, open)(file, "rb")


def lines_of(file: Path) -> Iterator[bytes]:
    """The lines of a file, unpacked. Raises DataError if it is damaged."""
    try:
        with opened(file) as stream:
            yield from stream
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        if (packed := file.suffix.lower()) not in PACKED:
            raise
        kind = {".gz": "gzip", ".zst": "zstd"}.get(packed, packed[1:])
        raise DataError(f"{file}: is not a readable {kind} file: {error}") from error


def read_csv(file: Path) -> Iterator[dict[str, Any]]:
    """The rows below the header; .tsv has tabs between cells. An empty cell holds null. Raises DataError for a row with more or fewer."""
    csv.field_size_limit(sys.maxsize)  # of the process: 128 KiB otherwise, and a text may be longer
    lines = (line.decode("utf-8-sig" if number == 0 else "utf-8") for number, line in enumerate(lines_of(file)))
    rows = csv.reader(lines, strict=True, delimiter="\t" if suffix_of(file.name) == ".tsv" else ",")
    try:
        header = next(rows, None)
        if not header or len(set(header)) < len(header):
            raise DataError(f"{file}:1: the header is {header}, expected names of columns, each once")
        for number, row in enumerate((row for row in rows if row), start=1):
            if len(row) != len(header):
                raise DataError(f"{file}:{number}: has {len(row)} cells, expected {len(header)} as the header")
            yield {name: _cell(name, cell) for name, cell in zip(header, row, strict=True)}
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{file}: is not CSV in UTF-8: {error}") from error


def _cell(name: str, cell: str) -> Any:
    if not cell:
        return None
    if name not in _NOT_TEXT and not cell.startswith("[{"):
        return cell
    try:
        value = _TRUTHS[cell.lower()] if cell.lower() in _TRUTHS else json.loads(cell)
    except ValueError:
        return cell
    return value if name in _NOT_TEXT or all(isinstance(one, dict) for one in value) else cell


def read_arrow(file: Path) -> Iterator[dict[str, Any]]:
    """The rows of a parquet file, or of an Arrow file or stream, memory-mapped. Raises DataError for anything else."""
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    kind = suffix_of(file.name)
    try:
        with ParquetFile(file) if kind == ".parquet" else pa.memory_map(str(file)) as stream:
            for batch in stream.iter_batches() if kind == ".parquet" else _batches(stream):
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file}: is not a readable {kind[1:]} file: {error}") from error


def _batches(stream: Any) -> Iterator[Any]:
    import pyarrow as pa

    try:
        table = pa.ipc.open_file(stream)
    except pa.ArrowInvalid:  # what `datasets` writes is a stream
        stream.seek(0)
        yield from pa.ipc.open_stream(stream)
        return
    yield from (table.get_batch(number) for number in range(table.num_record_batches))
