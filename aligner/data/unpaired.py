"""Responses that are each judged good or bad, for KTO."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aligner.data.collate import EpochSampler, supervised_batch
from aligner.data.config import UnpairedDataConfig
from aligner.data.encoding import PromptStyle, encode_response
from aligner.data.forms import Purpose, recognised
from aligner.data.reading import reads_sources
from aligner.data.records import JudgedRecord, has, parse_judged, parse_preference, raw_object, refuse_two
from aligner.data.report import LoadReport, Tally
from aligner.data.sources import RawRecord
from aligner.data.supervised import SupervisedExample, fit_length, row_of
from aligner.data.tokenizer import Tokenizer
from aligner.types import LabeledBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class UnpairedExample:
    """A prompt with a response to it, and whether that was judged good."""

    row: SupervisedExample
    desirable: bool

    @property
    def rows(self) -> tuple[SupervisedExample, ...]:
        """The rows that a model reads."""
        return (self.row,)

    def with_reference(self, logprobs: Sequence[Tensor]) -> UnpairedExample:
        """The same response with a frozen reference's log-probs of its trained tokens."""
        (found,) = logprobs
        return replace(self, row=replace(self.row, ref_logprobs=found))

    @property
    def prompt(self) -> tuple[int, ...]:
        """The tokens before the response."""
        return self.row.tokens[: self.row.loss_mask.index(True)]

    @property
    def response(self) -> tuple[int, ...]:
        """The tokens after the prompt."""
        return self.row.tokens[self.row.loss_mask.index(True) :]


@reads_sources
def load_unpaired(
    location: str, config: UnpairedDataConfig, tokenizer: Tokenizer, *, first: int | None = None
) -> tuple[list[UnpairedExample], LoadReport]:
    """All usable responses at `location` (`config.train` or `config.validation`), and a report of dropped and cut ones.

    A record of a pair is two responses, its chosen one desirable. `first`: only of so many records.
    Raises: DataError listing all bad lines; DataError if no response is left.
    """
    tally = Tally(location, config)
    style = PromptStyle(apply_chat_template=config.apply_chat_template, add_bos=config.add_bos)

    def convert(item: tuple[RawRecord, str]) -> UnpairedExample:
        record = _judged(*item)
        encoded = encode_response(tokenizer.offering(record.tools), record.prompt, record.response, style)
        fitted = fit_length(encoded, config.max_length, config.overlong)
        tally.truncated += fitted is not encoded
        row = row_of(fitted, item[0])
        return UnpairedExample(row=row, desirable=record.desirable)

    examples = tally.convert(_responses(recognised(location, config, Purpose.judged, first)), convert, records=lambda item: item[:1])
    return examples, tally.finish()


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
        raise ValueError("there is one example, expected at least two: the response to another prompt is wanted")
    numbers: dict[tuple[int, ...], int] = {}
    prompts = torch.tensor([numbers.setdefault(example.prompt, len(numbers)) for example in examples])
    shift, least = 1, len(examples) + 1
    for places in range(1, len(examples)):
        own = int((prompts == prompts.roll(places)).sum())
        if own < least:
            shift, least = places, own
        if not own:
            break
    return [_with_response_of(example, examples[i - shift], max_length) for i, example in enumerate(examples)]


class MismatchedSteps(Sequence[UnpairedExample]):
    """`mismatched` of the examples of each of `num_steps` steps, one step after the other; made on demand."""

    def __init__(self, examples: Sequence[UnpairedExample], order: EpochSampler, max_length: int, num_steps: int) -> None:
        self._examples = examples
        self._order = order
        self._max_length = max_length
        self._num_steps = num_steps
        self._latest: tuple[int, list[UnpairedExample]] = (-1, [])  # only to save time: rows are asked for in their order

    def __len__(self) -> int:
        return self._num_steps * self._order.batch_size

    def __getitem__(self, index: int) -> UnpairedExample:
        step, row = divmod(index, self._order.batch_size)
        if step >= self._num_steps:
            raise IndexError(f"row {index} of {len(self)}")
        if step != self._latest[0]:
            self._latest = (step, mismatched([self._examples[i] for i in self._order.indices(step)], self._max_length))
        return self._latest[1][row]


def _with_response_of(example: UnpairedExample, other: UnpairedExample, max_length: int) -> UnpairedExample:
    prompt = example.prompt
    response = other.response[: max_length - len(prompt)]
    mask = (*[False] * len(prompt), *[True] * len(response))
    return replace(example, row=SupervisedExample(tokens=prompt + response, loss_mask=mask, source=example.row.source))


def _responses(records: Iterable[RawRecord]) -> Iterator[tuple[RawRecord, str]]:
    """Each record once, with an empty string; one of a pair twice, as `chosen` and `rejected`."""
    for raw in records:
        is_pair = isinstance(raw.value, dict) and ("chosen" in raw.value or "chosen_response" in raw.value)  # as it was recast
        yield from ((raw, which) for which in (("chosen", "rejected") if is_pair else ("",)))


def _judged(raw: RawRecord, which: str) -> JudgedRecord:
    """A record's response; of a pair the one that is asked for."""
    if not which:
        return parse_judged(raw)
    record = raw_object(raw)
    is_judged = has(record, "response") or has(record, "completion")
    refuse_two(["chosen", *(name for name in ("preference", "label") if is_judged and has(record, name))])
    pair = parse_preference(raw)
    response = pair.chosen if which == "chosen" else pair.rejected
    return JudgedRecord(prompt=pair.prompt, response=response, desirable=which == "chosen", tools=pair.tools)
