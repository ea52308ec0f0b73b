"""Shared code of the programs that convert published data sets into this project's records: reading local files, and writing jsonl."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from aligner.data.records import raw_object
from aligner.data.sources import read_records
from aligner.errors import DataError

Record = dict[str, Any]
SYSTEM = (  # that of SteerLM's published models
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)


def converter(description: str) -> argparse.ArgumentParser:
    """The arguments that every converter has: where to read, where to write."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="a file (jsonl, also gzipped, json or parquet), or a directory of them")
    parser.add_argument("target", type=Path, help="the jsonl file to write")
    return parser


def each_record(convert: Callable[[Record], Iterable[Record]]) -> Callable[[str], Iterator[Record]]:
    """The records of a location that `convert` makes of each of its records. Raises DataError naming file and line."""

    def converted(location: str) -> Iterator[Record]:
        for raw in read_records(location):
            try:
                yield from convert(raw_object(raw))
            except (DataError, KeyError, TypeError, ValueError, AttributeError) as error:
                what = error if isinstance(error, DataError) else f"not a record of this data set ({error!r})"
                raise DataError(f"{raw.source}: {what}") from error

    return converted


def run(source: str, target: Path, convert: Callable[[str], Iterable[Record]]) -> int:
    """Convert `source` with `convert` into `target`, all of it or nothing. Prints; returns the exit code: 2 if data do not fit."""
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    number = 0
    try:
        with draft.open("w", encoding="utf-8") as file:
            for record in convert(source):
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
                number += 1
        draft.replace(target)
    except (DataError, OSError) as error:
        draft.unlink(missing_ok=True)
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{number} records written to {target}")
    return 0


def steerlm(turns: Iterable[Mapping[str, str]], labels: Iterable[str | None], system: str = SYSTEM) -> Record:
    """SteerLM's record of messages {role, content}, with the label of each (None: none)."""
    speakers = {"user": "User", "assistant": "Assistant"}
    conversations = [
        {"from": speakers[turn["role"]], "value": turn["content"], "label": label} for turn, label in zip(turns, labels, strict=True)
    ]
    return {"system": system, "conversations": conversations, "mask": "User", "type": "VALUE_TO_TEXT"}


def label_text(labels: Mapping[str, float]) -> str:
    """`quality:4,toxicity:0`, whole numbers."""
    return ",".join(f"{name}:{round(value)}" for name, value in labels.items())
