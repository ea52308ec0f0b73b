"""Responses with judgements: good or bad, for KTO; a number per attribute or a label per step, for reward models.

Attributes: HelpSteer (2311.09528), SteerLM's attribute prediction (2310.05344). Steps: process reward models (2305.20050, 2312.08935).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aligner.data.collate import SupervisedExample, supervised_batch
from aligner.data.encoding import Encoded, encode_conversation, encode_plain, encode_prompt, encode_response, plain_text
from aligner.data.forms import Purpose
from aligner.data.images import digests_of, images_in, only_images
from aligner.data.labelled import MISSING, attribute_text, is_labelled, parse_labelled, parse_labels, parse_step_labels
from aligner.data.messages import shown, text_of
from aligner.data.order import EpochSampler
from aligner.data.reading import Reader, loader
from aligner.data.records import (
    ConversationRecord,
    JudgedRecord,
    ResponseRecord,
    field_text,
    has,
    parse_judged,
    parse_preference,
    parse_prompt,
    parse_supervised,
    raw_object,
    refuse_two,
    supervised_readings,
    the_one,
)
from aligner.data.sources import RawRecord
from aligner.data.supervised import row_of
from aligner.errors import DataError
from aligner.types import LabeledBatch, StepBatch
from aligner.types.batches import of_kind


@dataclass(frozen=True, kw_only=True, slots=True)
class UnpairedExample:
    """A prompt with a response to it, and whether that was judged good."""

    row: SupervisedExample
    desirable: bool

    @property
    def rows(self) -> tuple[SupervisedExample, ...]:
        return (self.row,)

    def with_reference(self, logprobs: Sequence[Tensor]) -> UnpairedExample:
        """The same response with a frozen reference's log-probs of its trained tokens."""
        (found,) = logprobs
        return replace(self, row=replace(self.row, ref_logprobs=found))

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.row.tokens[: self.row.loss_mask.index(True)]

    @property
    def response(self) -> tuple[int, ...]:
        return self.row.tokens[self.row.loss_mask.index(True) :]


def _unpaired(item: tuple[RawRecord, str], reader: Reader) -> UnpairedExample:
    record = _judgement(*item)
    encoded = encode_response(reader.tokenizer.offering(record.tools), record.prompt, record.response, reader.style)
    return UnpairedExample(row=row_of(encoded, reader, item[0]), desirable=record.desirable)


def _responses(records: Iterable[RawRecord]) -> Iterator[tuple[RawRecord, str]]:
    """Each record once, with an empty string; a pair twice, as `chosen` and `rejected`."""
    for raw in records:
        is_pair = isinstance(raw.value, dict) and ("chosen" in raw.value or "chosen_response" in raw.value)  # as it was recast
        yield from ((raw, which) for which in (("chosen", "rejected") if is_pair else ("",)))


def _judgement(raw: RawRecord, which: str) -> JudgedRecord:
    if not which:
        return parse_judged(raw)
    record = raw_object(raw)
    is_judged = has(record, "response") or has(record, "completion")
    refuse_two(["chosen", *(name for name in ("preference", "label") if is_judged and has(record, name))])
    pair = parse_preference(raw)
    response = pair.chosen if which == "chosen" else pair.rejected
    return JudgedRecord(prompt=pair.prompt, response=response, desirable=which == "chosen", tools=pair.tools)


# A pair is two responses, its chosen one desirable.
load_unpaired = loader(UnpairedExample, _unpaired, purpose=Purpose.judged, items=_responses, records=lambda item: item[:1])


def unpaired_batch(examples: Sequence[UnpairedExample], pad_id: int) -> LabeledBatch:
    """Rows with labels [B, 1]: 1 for desirable, -1 for undesirable responses."""
    labels = [[1.0 if example.desirable else -1.0] for example in examples]
    return replace(supervised_batch([example.row for example in examples], pad_id), labels=torch.tensor(labels, dtype=torch.float32))


def mismatched(examples: Sequence[UnpairedExample], max_length: int) -> list[UnpairedExample]:
    """Every prompt with the response of another example, cut at `max_length` tokens; each response is used once.

    Responses shift by the smallest number of places that gives the fewest prompts one of their own responses (from another example).
    Raises ValueError for a single example.
    """
    if len(examples) < 2:
        raise ValueError("got one example, expected at least two: each prompt gets the response to another one")
    numbers: dict[Hashable, int] = {}
    prompts = torch.tensor([numbers.setdefault((example.prompt, images_in(example.row.extras)), len(numbers)) for example in examples])
    shift, least = 1, len(examples) + 1
    for places in range(1, len(examples)):
        own = int((prompts == prompts.roll(places)).sum())
        if own < least:
            shift, least = places, own
        if not own:
            break
    return [_with_response_of(example, examples[i - shift], max_length) for i, example in enumerate(examples)]


@dataclass(eq=False)
class MismatchedSteps(Sequence[UnpairedExample]):
    """`mismatched` examples of each of `num_steps` consecutive steps; made on demand."""

    examples: Sequence[UnpairedExample]
    order: EpochSampler
    max_length: int
    num_steps: int
    _latest: tuple[int, Sequence[UnpairedExample]] = (-1, ())  # only to save time: rows are requested in order

    def __len__(self) -> int:
        return self.num_steps * self.order.batch_size

    def __getitem__(self, index: int) -> UnpairedExample:
        step, row = divmod(index, self.order.batch_size)
        if step >= self.num_steps:
            raise IndexError(f"row {index} of {len(self)}")
        if step != self._latest[0]:
            self._latest = (step, mismatched([self.examples[i] for i in self.order.indices(step)], self.max_length))
        return self._latest[1][row]


def _with_response_of(example: UnpairedExample, other: UnpairedExample, max_length: int) -> UnpairedExample:
    prompt = example.prompt
    response = other.response[: max_length - len(prompt)]
    mask = (*[False] * len(prompt), *[True] * len(response))
    extras = only_images(example.row.extras)  # responses have none
    return replace(example, row=SupervisedExample(tokens=prompt + response, loss_mask=mask, source=example.row.source, extras=extras))


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledExample:
    """A row to be scored, and one number per attribute; `aligner.data.labelled.MISSING` for an attribute that was not judged."""

    row: SupervisedExample
    labels: tuple[float, ...]


def _scored(raw: RawRecord, reader: Reader) -> list[LabelledExample]:
    """A conversation is one example for each of its turns with a label."""
    return [LabelledExample(row=row_of(encoded, reader, raw), labels=labels) for encoded, labels in _judged(raw, reader)]


def _judged(raw: RawRecord, reader: Reader) -> Iterator[tuple[Encoded, tuple[float, ...]]]:
    record, tokenizer, style, attributes = raw_object(raw), reader.tokenizer, reader.style, reader.config.attributes
    if is_labelled(raw):
        yield from _judged_turns(raw, reader)
        return
    if "label" not in record:
        raise DataError(f"has the fields {sorted(map(str, record))}, expected a field 'label' with a number for each attribute")
    labels = parse_labels(record["label"], attributes, "field 'label'")
    if "text" in record:
        refuse_two(["text", *supervised_readings(record)])
        yield encode_plain(tokenizer, field_text(record, "text"), style), labels
        return
    parsed = parse_supervised(raw)
    if isinstance(parsed, ConversationRecord):
        yield encode_conversation(tokenizer.offering(parsed.tools), parsed.messages), labels
    elif isinstance(parsed, ResponseRecord):
        yield encode_response(tokenizer.offering(parsed.tools), parsed.prompt, parsed.response, style), labels


def _judged_turns(raw: RawRecord, reader: Reader) -> Iterator[tuple[Encoded, tuple[float, ...]]]:
    parsed = parse_labelled(raw, judged=True)
    judged = [number for number, turn in enumerate(parsed.turns) if turn.label]
    if not judged:
        raise DataError("field 'conversations' has no turn with a label, expected at least one")
    for number in judged:
        labels = parse_labels(parsed.turns[number].label, reader.config.attributes, f"field 'conversations[{number}]': label")
        yield encode_plain(reader.tokenizer, attribute_text(reader.tokenizer, parsed, number), reader.style), labels


load_regression = loader(LabelledExample, _scored, purpose=Purpose.regression)


def labelled_batch(examples: Sequence[LabelledExample], pad_id: int) -> LabeledBatch:
    labels = torch.tensor([example.labels for example in examples], dtype=torch.float32)
    return replace(supervised_batch([example.row for example in examples], pad_id), labels=labels)


_STEPS_FORMAT = "{prompt, steps (or completions), labels}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SteppedExample:
    """A prompt and a response; `row.loss_mask` is True on the last token of every judged step, whose labels are `labels` in order."""

    row: SupervisedExample
    labels: tuple[float, ...]


def _stepped(raw: RawRecord, reader: Reader) -> SteppedExample:
    """Each step with its separator continues the text before it; after a plain prompt, the prompt's text."""
    steps, all_labels = _steps(raw)
    asked, tokenizer = parse_prompt(raw, "prompt", None).prompt, reader.tokenizer
    tokens = encode_prompt(tokenizer, asked, reader.style)
    prompt = asked if isinstance(asked, str) and not reader.style.apply_chat_template else ""
    written, mask = plain_text(tokenizer, prompt), [False] * len(tokens)
    for step, label in zip(steps, all_labels, strict=True):
        text = plain_text(tokenizer, step, behind=prompt) + reader.config.step_separator
        ids = tokenizer.continuation(written or "\n", text)  # a step is never the beginning of a text
        tokens, written = [*tokens, *ids], written + text
        mask += [False] * (len(ids) - 1) + [label != MISSING]
    labels, whole = [label for label in all_labels if label != MISSING], len(tokens)
    if reader.exceeds(whole):
        most = reader.config.max_length
        tokens, mask = tokens[:most], mask[:most]
        if not (labels := labels[: sum(mask)]):
            raise DataError(f"has no judged step within max_length={most} ({whole} tokens), expected a shorter prompt")
    extras = only_images(reader.extras(raw, tokens, digests_of(asked), whole))
    row = SupervisedExample(tokens=tuple(tokens), loss_mask=tuple(mask), source=raw.source, extras=extras)
    return SteppedExample(row=row, labels=tuple(labels))


def _steps(raw: RawRecord) -> tuple[tuple[str, ...], tuple[float, ...]]:
    record = raw_object(raw)
    name = the_one(record, ("steps", "completions"), _STEPS_FORMAT)
    if "labels" not in record:
        raise DataError(f"has the fields {shown(sorted(map(str, record)))}, expected {_STEPS_FORMAT}")
    steps = record[name]
    if not isinstance(steps, list) or not steps:
        raise DataError(f"field {name!r} is {shown(steps)}, expected a non-empty list of strings")
    texts = tuple(text_of(step, f"field '{name}[{i}]'") for i, step in enumerate(steps))
    return texts, parse_step_labels(record["labels"], len(texts), "field 'labels'")


load_steps = loader(SteppedExample, _stepped, purpose=Purpose.steps)


def step_batch(examples: Sequence[SteppedExample], pad_id: int) -> StepBatch:
    """Rows with the labels of their steps in place."""
    rows = supervised_batch([example.row for example in examples], pad_id)
    labels = torch.zeros(rows.tokens.shape, dtype=torch.float32)
    labels[rows.loss_mask] = torch.tensor([label for example in examples for label in example.labels], dtype=torch.float32)
    return of_kind(StepBatch, rows, step_labels=labels)
