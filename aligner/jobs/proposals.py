"""SteerLM 2's records: the job that adds one log-prob to sampled responses. One model a job, so that each has the layout it needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial

from aligner.algorithms.writing import Record
from aligner.data.collate import supervised_batch
from aligner.data.proposals import Quantity
from aligner.data.sampled import SampledGroup, load_sampled
from aligner.data.supervised import SupervisedExample
from aligner.data.tokenizer import Tokenizer
from aligner.errors import DataError
from aligner.jobs import columns
from aligner.jobs.checks import check_writer
from aligner.jobs.lengths import with_lengths
from aligner.jobs.parts import load_model_files
from aligner.jobs.session import Session, session
from aligner.jobs.sources import pinned
from aligner.jobs.writing import attribute_scorer, digest_of, write_parts
from aligner.models import create
from aligner.models.config import Architecture
from aligner.schemas import WriteProposals

Row = tuple[SupervisedExample, tuple[float, ...]]  # a response, the levels that are asked of it
LogProbs = Callable[[Sequence[Row]], list[float]]  # every rank calls it


def write_proposals(config: WriteProposals) -> int:
    """Sampled responses with `algorithm.adds` more, to `<run>/written/records.jsonl`. Every rank calls it; one that is killed goes on.

    All log-probs are at temperature 1, as the trainer's are.
    """
    with session(config, config.run, config.parallel, component="proposals") as here:
        config = with_lengths(replace(config, model=pinned(here, "model", config.model)))
        tokenizer, architecture = load_model_files(config.model)
        check_writer(config, architecture, here.topology.world_size)
        groups, report = load_sampled(config.data.train, config.data, tokenizer, config.algorithm.sought)
        here.say(report.summary())
        what = [(group.record, [row.tokens for row in group.rows]) for group in groups]
        made_of = {"settings": repr(asdict(config.algorithm)), "data": digest_of(what)}
        with _scorer(here, config, tokenizer, architecture) as log_probs:
            return write_parts(here, config, groups, partial(_add, config, log_probs), made_of=made_of, shown=columns.PROPOSALS)


def _add(config: WriteProposals, log_probs: LogProbs, part: int, groups: Sequence[SampledGroup]) -> tuple[list[Record], dict[str, float]]:
    """The records of these groups, and how much the responses differ: where they do not, their weights are equal."""
    size, adds = config.algorithm.batch_size, config.algorithm.adds
    rows = [(row, group.levels) for group in groups for row in group.rows]
    found = [one for start in range(0, len(rows), size) for one in log_probs(rows[start : start + size])]
    for (row, _), one in zip(rows, found, strict=True):
        if not math.isfinite(one):
            raise DataError(f"{row.source}: {adds.field} of a response is {one}: the model of model.path gives no finite number")
    remaining = iter(found)
    each = [[next(remaining) for _ in group.rows] for group in groups]
    records = [group.with_log_probs(adds, own) for group, own in zip(groups, each, strict=True)]
    spread = sum(max(own) - min(own) for own in each) / len(each)
    return records, {"proposals/log_prob": sum(found) / len(found), "proposals/spread": spread}


@contextmanager
def _scorer(here: Session, config: WriteProposals, tokenizer: Tokenizer, architecture: Architecture) -> Iterator[LogProbs]:
    """What gives the log-prob that is added: an attribute model, here or served, or a language model."""
    if config.algorithm.adds is Quantity.attributes:
        with attribute_scorer(here, config, tokenizer.pad_id) as scores:
            yield lambda rows: _of_attributes(config, scores([row.tokens for row, _ in rows]).tolist(), rows)
        return
    frozen = create.training(config.model, None)
    policy = create.create_policy(config.model, architecture, config.parallel, here.topology, frozen)
    yield lambda rows: policy.logprobs(supervised_batch([row for row, _ in rows], tokenizer.pad_id)).double().sum(dim=1).tolist()


def _of_attributes(config: WriteProposals, scores: Sequence[Sequence[float]], rows: Sequence[Row]) -> list[float]:
    found = []
    for own, (row, levels) in zip(scores, rows, strict=True):
        if not all(map(math.isfinite, own)):
            raise DataError(f"{row.source}: the attribute model's scores of a response are {list(own)}, expected finite numbers")
        found.append(config.algorithm.log_prob(own, levels))
    return found
