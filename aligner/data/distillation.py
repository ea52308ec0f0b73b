"""Examples for distillation: a directory that `teacher_logprobs` wrote, or records with NeMo-Aligner's fields."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from aligner.data.collate import supervised_batch
from aligner.data.config import DistillationDataConfig, Overlong
from aligner.data.records import raw_object, shown
from aligner.data.report import LoadReport, Tally, too_long
from aligner.data.sources import RawRecord, read_records
from aligner.data.supervised import SupervisedExample
from aligner.data.teacher import MANIFEST, DistilledExample, TeacherFiles
from aligner.data.tokenizer import Tokenizer
from aligner.errors import DataError
from aligner.types import DistillationBatch

FIELDS = ("tokens", "labels", "loss_mask", "topk_logits", "topk_token_ids")


class Selected(Sequence[DistilledExample]):
    """Some of the examples of another sequence, each cut to `max_length` tokens if that is given."""

    def __init__(self, examples: Sequence[DistilledExample], chosen: Sequence[int], max_length: int | None) -> None:
        self._examples = examples
        self._chosen = chosen
        self._max_length = max_length

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: int) -> DistilledExample:
        return self._examples[self._chosen[index]].first(self._max_length)


def load_distillation(
    location: str, config: DistillationDataConfig, tokenizer: Tokenizer, *, first: int | None = None
) -> tuple[Sequence[DistilledExample], LoadReport]:
    """All usable examples at `location`, and a report of dropped and cut ones. `first`: use only this many records.

    Raises: DataError for a directory that is not complete; DataError listing all bad lines, or if no example is left; ConfigError if
    the teacher had another vocabulary.
    """
    tally = Tally(location, config.bad_lines)
    fit = _Fit(config, tally)
    if (Path(location) / MANIFEST).exists():
        files = TeacherFiles(Path(location))
        files.check_tokenizer(tokenizer.digest)
        rows = (RawRecord(file=location, line=row, index=row) for row in range(len(files) if first is None else min(first, len(files))))
        chosen = tally.convert(rows, lambda row: fit.row(files, row.index))
        return Selected(files, chosen, config.max_length or None), tally.finish()

    def convert(raw: RawRecord) -> DistilledExample:
        example = parse_distilled(raw, tokenizer.max_token_id)
        return fit.example(example)

    examples = tally.convert(read_records(location, first), convert)
    widths = {example.teacher_tokens.shape[1] for example in examples}
    if len(widths) > 1:
        raise DataError(f"{location}: the records name {shown(sorted(widths))} tokens per position, expected the same number in all")
    return examples, tally.finish()


def check_logprobs(examples: Sequence[DistilledExample]) -> None:
    """Raise DataError, naming the record, if a record's numbers are not log-probs over a vocabulary: K of them sum to more than 1."""
    if isinstance(examples, Selected):
        return  # teacher_logprobs wrote them
    for example in examples:
        if (mass := float(example.teacher_logprobs.logsumexp(dim=-1).max().exp())) > 1.001:
            raise DataError(
                f"{example.source}: field 'topk_logits' gives {example.teacher_logprobs.shape[1]} tokens a probability of {mass:.4g} "
                "together, expected log-probs over the whole vocabulary, or algorithm.tail_bucket=false"
            )


class _Fit:
    """What `overlong` says of examples longer than `max_length`."""

    def __init__(self, config: DistillationDataConfig, tally: Tally) -> None:
        self._config = config
        self._tally = tally

    def row(self, files: TeacherFiles, row: int) -> int:
        """The row's number. Raises as `example` does."""
        if 0 < self._config.max_length < files.length(row):
            self.example(files[row])
        return row

    def example(self, example: DistilledExample) -> DistilledExample:
        """The example, or its beginning. Raises TooLong, or DataError."""
        config, length = self._config, len(example.tokens)
        if not config.max_length or length <= config.max_length:
            return example
        if config.overlong is not Overlong.truncate:
            too_long(length, config.max_length, config.overlong)
        if not any(example.loss_mask[: config.max_length]):
            raise DataError(f"has no response token within max_length={config.max_length} ({length} tokens), expected a shorter prompt")
        self._tally.truncated += 1
        return example.first(config.max_length)


def parse_distilled(raw: RawRecord, max_token_id: int) -> DistilledExample:
    """`{tokens, labels, loss_mask, topk_logits, topk_token_ids}` of S positions each, as NeMo-Aligner has them: entry t of all but
    `tokens` is about token t + 1. Logits do as well as log-probs: the loss normalises over the K."""
    record = raw_object(raw)
    if missing := [name for name in FIELDS if name not in record]:
        raise DataError(f"field {missing[0]!r} is missing, expected {{{', '.join(FIELDS)}}} or a directory that teacher_logprobs wrote")
    tokens, labels = (_ids(record[name], name, max_token_id) for name in ("tokens", "labels"))
    if len(labels) != len(tokens) or labels[:-1] != tokens[1:]:
        raise DataError("field 'labels' is not 'tokens' moved by one, expected labels[t] = tokens[t + 1]")
    mask = record["loss_mask"]
    if not isinstance(mask, list) or len(mask) != len(tokens) or any(value not in (0, 1) for value in mask) or not any(mask):
        raise DataError(f"field 'loss_mask' is {shown(mask)}, expected {len(tokens)} times 0 or 1, and a 1 among them")
    positions = [t for t, learnt in enumerate(mask) if learnt]
    named, logits = record["topk_token_ids"], record["topk_logits"]
    for name, value in (("topk_token_ids", named), ("topk_logits", logits)):
        if not isinstance(value, list) or len(value) != len(tokens):
            raise DataError(f"field {name!r} is {shown(value)}, expected a list of {len(tokens)} lists")
    ids = [_ids(named[t], f"topk_token_ids[{t}]", max_token_id) for t in positions]
    if len({len(row) for row in ids}) > 1 or any(len(set(row)) < len(row) for row in ids):
        raise DataError("field 'topk_token_ids' names another number of tokens in some positions, or a token twice")
    return DistilledExample(
        tokens=(*tokens, labels[-1]),
        loss_mask=(False, *map(bool, mask)),
        teacher_tokens=torch.tensor(ids, dtype=torch.int64),
        teacher_logprobs=torch.tensor([_numbers(logits[t], t, len(row)) for t, row in zip(positions, ids, strict=True)]),
        source=raw.source,
    )


def _ids(value: object, name: str, max_token_id: int) -> list[int]:
    if not isinstance(value, list) or not value or not all(type(one) is int and 0 <= one <= max_token_id for one in value):
        raise DataError(f"field {name!r} is {shown(value)}, expected a list of token ids from 0 to {max_token_id}")
    return value


def _numbers(value: object, position: int, count: int) -> list[float]:
    if not isinstance(value, list) or len(value) != count or not all(isinstance(x, (int, float)) and math.isfinite(x) for x in value):
        raise DataError(f"field 'topk_logits[{position}]' is {shown(value)}, expected {count} finite numbers")
    return [float(x) for x in value]


def distillation_batch(examples: Sequence[DistilledExample], pad_id: int) -> DistillationBatch:
    """Rows padded to the longest."""
    rows = [SupervisedExample(tokens=one.tokens, loss_mask=one.loss_mask, source=one.source) for one in examples]
    batch = supervised_batch(rows, pad_id)
    shape = (*batch.tokens.shape, examples[0].teacher_tokens.shape[1])
    named, logprobs = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
    named[batch.loss_mask] = torch.cat([one.teacher_tokens for one in examples])
    logprobs[batch.loss_mask] = torch.cat([one.teacher_logprobs for one in examples])
    return DistillationBatch(
        tokens=batch.tokens, lengths=batch.lengths, loss_mask=batch.loss_mask, teacher_tokens=named, teacher_logprobs=logprobs
    )


def distilled(
    examples: Sequence[SupervisedExample], mask: torch.Tensor, named: torch.Tensor, logprobs: torch.Tensor
) -> list[DistilledExample]:
    """The rows of a teacher's pass over a batch: `mask` bool [B, S], its output [B, S, K]."""
    return [
        DistilledExample(
            tokens=example.tokens,
            loss_mask=example.loss_mask,
            teacher_tokens=named[row][mask[row]],
            teacher_logprobs=logprobs[row][mask[row]],
            source=example.source,
        )
        for row, example in enumerate(examples)
    ]
