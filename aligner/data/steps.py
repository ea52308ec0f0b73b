"""Responses in judged steps, for process reward models (2305.20050, 2312.08935)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from aligner.data.collate import supervised_batch
from aligner.data.config import Overlong, StepDataConfig
from aligner.data.encoding import PromptStyle, encode_prompt, plain_text
from aligner.data.forms import Purpose, recognised
from aligner.data.labelled import MISSING, parse_step_labels
from aligner.data.messages import Conversation, shown, text_of
from aligner.data.reading import reads_sources
from aligner.data.records import parse_prompt, raw_object, the_one
from aligner.data.report import LoadReport, Tally, too_long
from aligner.data.sources import RawRecord
from aligner.data.supervised import SupervisedExample
from aligner.data.tokenizer import Tokenizer
from aligner.errors import DataError
from aligner.types import StepBatch

_FORMAT = "{prompt, steps (or completions), labels}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SteppedExample:
    """A prompt and a response; `row.loss_mask` is True on the last token of every judged step, and `labels` has theirs in order."""

    row: SupervisedExample
    labels: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Record:
    prompt: str | Conversation
    steps: tuple[str, ...]
    labels: tuple[float, ...]


@reads_sources
def load_steps(
    location: str, config: StepDataConfig, tokenizer: Tokenizer, *, first: int | None = None
) -> tuple[list[SteppedExample], LoadReport]:
    """All usable examples at `location` (`config.train` or `config.validation`), and a report of dropped and cut ones.

    `first`: only of so many records.
    Raises: DataError listing all bad lines; DataError if no example is left.
    """
    tally = Tally(location, config)
    style = PromptStyle(apply_chat_template=config.apply_chat_template, add_bos=config.add_bos)

    def convert(raw: RawRecord) -> SteppedExample:
        whole = _encode(_parse(raw), raw.source, config.step_separator, tokenizer, style)
        fitted = _fit(whole, config)
        tally.truncated += fitted is not whole
        return fitted

    return tally.convert(recognised(location, config, Purpose.steps, first), convert), tally.finish()


def step_batch(examples: Sequence[SteppedExample], pad_id: int) -> StepBatch:
    """Rows with the labels of their steps in place."""
    rows = supervised_batch([example.row for example in examples], pad_id)
    labels = torch.zeros(rows.tokens.shape, dtype=torch.float32)
    labels[rows.loss_mask] = torch.tensor([label for example in examples for label in example.labels], dtype=torch.float32)
    return StepBatch(tokens=rows.tokens, lengths=rows.lengths, loss_mask=rows.loss_mask, extras=rows.extras, step_labels=labels)


def _parse(raw: RawRecord) -> _Record:
    record = raw_object(raw)
    name = the_one(record, ("steps", "completions"), _FORMAT)
    if "labels" not in record:
        raise DataError(f"has the fields {shown(sorted(map(str, record)))}, expected {_FORMAT}")
    steps = record[name]
    if not isinstance(steps, list) or not steps:
        raise DataError(f"field {name!r} is {shown(steps)}, expected a non-empty list of strings")
    texts = tuple(text_of(step, f"field '{name}[{i}]'") for i, step in enumerate(steps))
    labels = parse_step_labels(record["labels"], len(texts), "field 'labels'")
    return _Record(prompt=parse_prompt(raw, "prompt", None).prompt, steps=texts, labels=labels)


def _encode(record: _Record, source: str, separator: str, tokenizer: Tokenizer, style: PromptStyle) -> SteppedExample:
    """Each step with its separator is the continuation of what is before it; the prompt's text is what a plain prompt has."""
    tokens = encode_prompt(tokenizer, record.prompt, style)
    prompt = record.prompt if isinstance(record.prompt, str) and not style.apply_chat_template else ""
    written = plain_text(tokenizer, prompt)
    mask = [False] * len(tokens)
    for step, label in zip(record.steps, record.labels, strict=True):
        text = plain_text(tokenizer, step, behind=prompt) + separator
        ids = tokenizer.continuation(written or "\n", text)  # nothing is the beginning of a text here
        tokens, written = [*tokens, *ids], written + text
        mask += [False] * (len(ids) - 1) + [label != MISSING]
    row = SupervisedExample(tokens=tuple(tokens), loss_mask=tuple(mask), source=source)
    return SteppedExample(row=row, labels=tuple(label for label in record.labels if label != MISSING))


def _fit(example: SteppedExample, config: StepDataConfig) -> SteppedExample:
    tokens, mask = example.row.tokens, example.row.loss_mask
    if not config.max_length or len(tokens) <= config.max_length:
        return example
    if config.overlong is not Overlong.truncate:
        too_long(len(tokens), config.max_length, config.overlong)
    kept = sum(mask[: config.max_length])
    if not kept:
        raise DataError(f"has no judged step within max_length={config.max_length} ({len(tokens)} tokens), expected a shorter prompt")
    row = SupervisedExample(tokens=tokens[: config.max_length], loss_mask=mask[: config.max_length], source=example.row.source)
    return SteppedExample(row=row, labels=example.labels[:kept])
