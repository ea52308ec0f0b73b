"""Start and memory of a run on millions of records: examples from `data.cache`, against the same in memory.

    python benchmarks/data_scale.py [--records 10000 100000 1000000 10000000] [--tokenize 20000] [--workers 1 2]

The first part makes a jsonl file of N lines and, in place of their tokens, random ones of 8 to 64 (a tokenizer would take long for 10
million); all else is what a run does. Each figure is of a process of its own that loads the cache, describes its batches and reads those
of 200 steps: seconds of a start that computes the file's digest and of a later one, until the first batch is there; milliseconds a batch of
128; how far memory rose that the system cannot take back (RssAnon; mapped files are not in it), at the first batch and after the last. The
second part tokenizes `--tokenize` records with the stories260k tokenizer, or a model's (`--model`), by 1 and more processes. Linux only.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

BATCH_SIZE, STEPS = 128, 200
WIDTHS = (14, 10, 14, 8, 9, 19, 10)  # of the table's columns
IN_MEMORY = 100_000  # records, at most
LINE = '{"prompt": "Tell me of a day at the sea.", "response": "The wind was strong and the water cold. Number %09d."}\n'


def memory(field: str) -> float:
    """RssAnon or RssFile of this process, in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {field}: this benchmark needs Linux")


def write_lines(path: Path, records: int) -> None:
    """A jsonl file of so many records."""
    with path.open("w") as file:
        for start in range(0, records, 10_000):
            file.write("".join(LINE % number for number in range(start, min(start + 10_000, records))))


def blocks(records: int) -> Iterator[list[Any]]:
    """Lists of 1024 examples with random tokens; half of each is learnt."""
    from aligner.data.collate import SupervisedExample

    draw = np.random.default_rng(0)
    for start in range(0, records, 1024):
        made = []
        for row, length in enumerate(draw.integers(8, 65, min(1024, records - start)).tolist(), start + 1):
            mask = (False,) * (length // 2) + (True,) * (length - length // 2)
            tokens = tuple(draw.integers(3, 500, length).tolist())
            made.append(SupervisedExample(tokens=tokens, loss_mask=mask, source=f"lines.jsonl:{row}"))
        yield made


def reader(records: int) -> Any:
    """A `load_*` that writes random tokens instead of what a tokenizer makes of the records."""
    from aligner.data.collate import SupervisedExample
    from aligner.data.report import STORING, LoadReport
    from aligner.data.stored import ShardWriter, write_index

    def load_random(location, config, tokenizer, *, first=None) -> tuple[list[SupervisedExample], LoadReport]:
        directory = STORING.get().directory
        writer = ShardWriter(directory, 0, SupervisedExample)
        for examples in blocks(records):
            writer.write(examples)
        writer.close()
        write_index(directory, writer.blocks, writer.counts)
        counts = {"num_records": records, "num_kept": records, "num_too_long": 0, "num_truncated": 0, "num_bad": 0}
        return [], LoadReport(location=location, too_long=(), problems=(), unused={}, **counts)

    return load_random


def start(folder: Path, records: int, tokenizer_path: str, *, in_memory: bool) -> dict[str, float]:
    """Load, describe and read batches as a run does; the figures."""
    from aligner.data.cache import load_cached
    from aligner.data.collate import SupervisedExample, supervised_batch
    from aligner.data.config import SFTDataConfig
    from aligner.data.order import order_of
    from aligner.data.stored import row_counts
    from aligner.data.tokenizer import load_tokenizer

    path = str(folder / "lines.jsonl")
    config = SFTDataConfig(train=path, cache=str(folder / "cache"))
    tokenizer = load_tokenizer(tokenizer_path)
    before, began = memory("RssAnon"), time.perf_counter()
    examples, _ = load_cached(reader(records), SupervisedExample, path, config, tokenizer, first=None, heartbeat=lambda: None)
    if in_memory:
        examples = list(examples)
    lengths = row_counts(examples)[..., 0]
    described = f"{lengths.min()} to {lengths.max()} tokens, {lengths.sum():,} in all"
    order = order_of(examples, BATCH_SIZE, seed=1)
    supervised_batch([examples[number] for number in order.indices(0)], tokenizer.pad_id)
    seconds, at_first = time.perf_counter() - began, memory("RssAnon") - before
    began = time.perf_counter()
    for step in range(1, STEPS + 1):
        supervised_batch([examples[number] for number in order.indices(step)], tokenizer.pad_id)
    batch = (time.perf_counter() - began) / STEPS
    return {"seconds": seconds, "batch_ms": batch * 1000, "first": at_first, "last": memory("RssAnon") - before, "said": described}


def child(*arguments: object) -> dict[str, Any]:
    """This file in a process of its own; what it prints last."""
    done = subprocess.run([sys.executable, __file__, *map(str, arguments)], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def scale(sizes: list[int], tokenizer: str) -> None:
    heads = ("records", "files MiB", "first start s", "start s", "batch ms", "MiB at first batch", "after 200")
    print(" ".join(f"{head:>{width}}" for head, width in zip(heads, WIDTHS, strict=True)))
    for records in sizes:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_lines(folder / "lines.jsonl", records)
            time.sleep(3)  # a file that is newer is not taken for known
            child("--child", folder, records, tokenizer, "cache")
            for memo in (folder / "cache" / "digests").glob("*[0-9a-f]"):
                memo.unlink()
            cold = child("--child", folder, records, tokenizer, "cache")
            found = child("--child", folder, records, tokenizer, "cache")
            size = sum(path.stat().st_size for path in (folder / "cache").rglob("*")) / 2**20
            show(records, size, cold["seconds"], found)
            if records <= IN_MEMORY:
                show(f"{records} (list)", 0, 0, child("--child", folder, records, tokenizer, "list"))


def show(records: object, size: float, cold: float, found: dict[str, Any]) -> None:
    figures = (f"{size:.0f}", *(f"{one:.2f}" for one in (cold, found["seconds"], found["batch_ms"])))
    row = (str(records), *figures, f"{found['first']:.0f}", f"{found['last']:.0f}")
    print(" ".join(f"{one:>{width}}" for one, width in zip(row, WIDTHS, strict=True)), flush=True)


def tokenize(records: int, tokenizer_path: str, workers: list[int]) -> None:
    from aligner.data.config import SFTDataConfig
    from aligner.data.supervised import load_supervised
    from aligner.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(tokenizer_path)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "lines.jsonl"
        write_lines(path, records)
        for count in workers:
            config = SFTDataConfig(train=str(path), cache=f"{name}/{count}", num_workers=count)
            began = time.perf_counter()
            load_supervised(str(path), config, tokenizer)
            seconds = time.perf_counter() - began
            print(f"{records:,} records tokenized by {count} processes: {seconds:.1f} s, {records / seconds:,.0f} a second", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, nargs="*", default=[10_000, 100_000, 1_000_000, 10_000_000])
    parser.add_argument("--tokenize", type=int, default=20_000)
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--model", default=str(Path(__file__).resolve().parents[1] / "../shared/data/stories260k"))
    chosen = parser.parse_args()
    scale(chosen.records, chosen.model)
    tokenize(chosen.tokenize, chosen.model, chosen.workers)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        _, _, folder, records, tokenizer, how = sys.argv
        print(json.dumps(start(Path(folder), int(records), tokenizer, in_memory=how == "list")))
    else:
        main()
