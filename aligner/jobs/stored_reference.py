"""Log-probs of a reference for all examples, computed before a run's first step: replaces a frozen weight copy.

The policy is the reference until it has been trained or a checkpoint has been loaded. So every start can compute the missing files: a
killed run continues after the last complete file.

    <directory>/manifest.json             what was computed from what (`aligner.loop.writing`)
    <directory>/part_000000.safetensors   for the rows of `part_size` examples, in order: number of trained tokens, their log-probs

Log-probs are float32, trained tokens only: 4 bytes each. A run reads rows on demand.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import ConcatDataset

from aligner.cluster.run_directory import RunDirectory
from aligner.data.collate import SupervisedExample, supervised_batch
from aligner.data.distillation import data_digest
from aligner.data.mixture import Mixture
from aligner.data.tokenizer import Tokenizer
from aligner.errors import DataError
from aligner.files import publish
from aligner.jobs.parts import run_loop
from aligner.jobs.sources import model_digest
from aligner.loop.writing import Parts, Record, Writing, WrittenFiles
from aligner.models import create
from aligner.models.checkpoint.manifest import digest
from aligner.models.modules.peft import WEIGHTS_FILE
from aligner.models.training.guard import GuardConfig
from aligner.models.training.policy import MegatronPolicy
from aligner.parallel.collectives import from_rank_0
from aligner.reporting.formats import Column
from aligner.run.session import Session
from aligner.run.settings import LoopConfig, TrainerRun


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
    """An open file and its row offsets."""

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
    """Examples from number `first` of the parts on, with log-probs read on access. Raises DataError for a damaged or other file."""

    def __init__(self, examples: Sequence[Example], parts: Parts, first: int) -> None:
        self.mixture: Mixture | None = getattr(examples, "mixture", None)
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


COLUMNS = (Column("records", "data/records", ".0f"), Column("speed", "data/tokens_per_second", "tokens/s"))
Made = tuple[list[Record], dict[str, float]]  # of the examples of a file, and metrics


def with_reference(
    session: Session, config: TrainerRun, policy: MegatronPolicy, tokenizer: Tokenizer, sets: Mapping[str, Any]
) -> list[Sequence[Any]] | None:
    """The examples of each set (in memory; or with a text that changes with any of their tokens) with the log-probs of `policy`, computed
    where they are not on disk yet; None if the run must stop first. Raises DataError if the files on disk were computed from something
    else. Every rank calls it."""
    whole = {name: one for name, one in sets.items() if not isinstance(one, tuple)}
    found = dict(sets) | {name: (own, data_digest([row for one in own for row in one.rows])) for name, own in whole.items()}
    parts_of = [own for own, _ in found.values()]
    examples = ConcatDataset(parts_of)
    parts = Parts(
        directory=session.directory.reference,
        made_of=_frozen(config, policy, tokenizer) | {name: digest for name, (_, digest) in found.items()},
        num_items=len(examples),
        part_size=config.algorithm.reference_part_size,
        suffix="safetensors",
    )
    from_rank_0(parts.begin)
    if from_rank_0(parts.num_complete) < parts.num_parts:
        make = partial(_logprobs, policy, examples, pad_id=tokenizer.pad_id, batch_size=config.algorithm.batch_size)
        if not _write(session, config, parts, make):
            return None
    firsts = accumulate(map(len, parts_of), initial=0)
    return [WithReference(own, parts, first) for own, first in zip(parts_of, firsts, strict=False)]


def _frozen(config: TrainerRun, policy: MegatronPolicy, tokenizer: Tokenizer) -> dict[str, str]:
    """Digests of the reference by name, the same on every rank. Every rank calls it."""
    model, source = config.model, create.source_directory(config.model)
    weights = from_rank_0(lambda: model_digest(source)) or f"random weights of run.seed={config.run.seed}, {policy.chunks[0].architecture}"
    adapter = Path(model.lora.path) / WEIGHTS_FILE if model.lora.is_on and model.lora.path else None
    packed = [model.quantization.value] * model.quantization.is_on + ["scales of 8 bits"] * model.double_quantization
    return {
        "model": weights,
        "adapter": from_rank_0(lambda: f"{digest(adapter).sha256} in {model.lora}") if adapter else "",  # new ones add nothing
        "precision": " in ".join([str(policy.chunks[0].config.params_dtype), *packed]),
        "tokenizer": tokenizer.digest,
    }


def _write(session: Session, config: TrainerRun, parts: Parts, make: Callable[[int, Sequence[int]], Made]) -> bool:
    """Make and write every missing file. False if the run must stop before that is done."""

    def write(number: int, records: Sequence[Record]) -> None:
        from_rank_0(lambda: write_part(parts, number, [row for record in records for row in record["rows"]]))

    work = Writing(range(parts.num_items), parts.part_size, make=make, write=write)
    session.say(f"the reference's log-probs of {parts.num_items:,} examples go to {parts.directory}")
    last = run_loop(
        replace(session, directory=RunDirectory(parts.directory)),  # its steps are not those of the run: neither are its metrics
        work,
        WrittenFiles(parts.num_complete),
        LoopConfig(max_steps=work.num_steps, table_every=0),
        logging=replace(config.logging, tensorboard=False, wandb_project="", mlflow_tracking_uri=""),
        shown=COLUMNS,
        guard=GuardConfig(),
    )
    return last == work.num_steps


def _logprobs(
    policy: MegatronPolicy, examples: Sequence[Referenced], part: int, numbers: Sequence[int], *, pad_id: int, batch_size: int
) -> Made:
    """Log-probs of each example's rows. Batches go from long to short rows: little padding, and out-of-memory errors come first."""
    rows = {number: examples[number].rows for number in numbers}
    by_length = sorted(rows, key=lambda number: max(len(row.tokens) for row in rows[number]), reverse=True)
    found: dict[int, list[Tensor]] = {}
    began = time.perf_counter()
    for start in range(0, len(by_length), batch_size):
        together = by_length[start : start + batch_size]
        batch = supervised_batch([row for number in together for row in rows[number]], pad_id)
        logprobs = (own[mask] for own, mask in zip(policy.logprobs(batch), batch.loss_mask, strict=True))
        found |= {number: [next(logprobs) for _ in rows[number]] for number in together}
    num_tokens = sum(len(row.tokens) for own in rows.values() for row in own)
    return [{"rows": found[number]} for number in numbers], {"data/tokens_per_second": num_tokens / (time.perf_counter() - began)}
