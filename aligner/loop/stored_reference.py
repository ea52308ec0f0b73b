"""The pass of a reference over all examples before a run's first step, in place of a frozen copy of its weights.

The policy is the reference until it has been trained or a checkpoint has been loaded. So every start of a run can make the files that are
missing: one that is killed goes on behind the last whole file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import ConcatDataset

from aligner.cluster.run_directory import RunDirectory
from aligner.data.collate import supervised_batch
from aligner.data.parts import Parts
from aligner.data.reference import Referenced, WithReference, write_part
from aligner.data.teacher import data_digest
from aligner.data.tokenizer import Tokenizer
from aligner.loop.config import TrainerRun
from aligner.loop.loop import LoopConfig
from aligner.loop.parts import run_loop
from aligner.loop.session import Session
from aligner.loop.sources import model_digest
from aligner.loop.writer_job import WrittenFiles
from aligner.loop.writing import Record, Writing
from aligner.models import create
from aligner.models.guard import GuardConfig
from aligner.models.manifest import digest
from aligner.models.peft import WEIGHTS_FILE
from aligner.models.policy import MegatronPolicy
from aligner.parallel.collectives import from_rank_0
from aligner.reporting.formats import Column

COLUMNS = (Column("records", "data/records", ".0f"), Column("speed", "data/tokens_per_second", "tokens/s"))
Made = tuple[list[Record], dict[str, float]]  # of the examples of a file, and metrics


def with_reference(
    session: Session, config: TrainerRun, policy: MegatronPolicy, tokenizer: Tokenizer, sets: Mapping[str, Any]
) -> list[Sequence[Any]] | None:
    """The examples of each set with the log-probs of `policy`, computed where they are not on disk yet. Every rank calls it.

    `sets`: by name examples that are in memory, or (examples, text that changes with any of their tokens).
    None where a signal, or the end of the job's time, came first: the run is to stop. Raises DataError where what is on disk was computed
    from another model, tokenizer or other data.
    """
    found = {name: one if isinstance(one, tuple) else (one, _digest(one)) for name, one in sets.items()}
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


def _digest(examples: Sequence[Referenced]) -> str:
    return data_digest([row for example in examples for row in example.rows])


def _frozen(config: TrainerRun, policy: MegatronPolicy, tokenizer: Tokenizer) -> dict[str, str]:
    """What the reference is: digests by name, the same on every rank. Every rank calls it."""
    model, source = config.model, create.source_directory(config.model)
    weights = from_rank_0(lambda: model_digest(source)) or f"random weights of run.seed={config.run.seed}, {policy.chunks[0].architecture}"
    adapter = Path(model.lora.path) / WEIGHTS_FILE if model.lora.is_on and model.lora.path else None
    return {
        "model": weights,
        "adapter": from_rank_0(lambda: f"{digest(adapter).sha256} in {model.lora}") if adapter else "",  # new ones add nothing
        "precision": str(policy.chunks[0].config.params_dtype),
        "tokenizer": tokenizer.digest,
    }


def _write(session: Session, config: TrainerRun, parts: Parts, make: Callable[[int, Sequence[int]], Made]) -> bool:
    """Make and write every file that is missing. False where the run is to stop before that is done."""

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
    """Of the rows of each example, by length and the longest first: a batch has little padding, and what does not fit is found at once."""
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
