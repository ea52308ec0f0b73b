"""Supervised examples: tokens with a mask on what is learnt.

A `Demonstration` is an example as a prompt with the response that is given: what SPIN compares its own responses with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from aligner.data.config import DemonstrationDataConfig, Learn, Overlong, SFTDataConfig
from aligner.data.encoding import (
    Encoded,
    PromptStyle,
    encode_conversation,
    encode_labelled,
    encode_plain,
    encode_response,
    everything,
    last_span,
    truncated,
)
from aligner.data.forms import Purpose, extras_of, recognised
from aligner.data.labelled import is_labelled, parse_labelled
from aligner.data.reading import reads_sources
from aligner.data.records import ConversationRecord, TextRecord, parse_supervised
from aligner.data.report import LoadReport, Tally, too_long
from aligner.data.sources import RawRecord
from aligner.data.tokenizer import Tokenizer
from aligner.errors import DataError
from aligner.types import Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisedExample:
    """One row: `loss_mask` is True on response tokens and their end token; `source` is `file:line`.

    `ref_logprobs`: a frozen reference's log-probs of the tokens in `loss_mask`, float32, where they are stored
    (`aligner.jobs.stored_reference`).
    """

    tokens: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    source: str
    ref_logprobs: Tensor | None = field(default=None, compare=False, repr=False)
    extras: Mapping[str, Tensor] = field(default_factory=dict, compare=False, repr=False)  # `aligner.types.extras`


@reads_sources
def load_supervised(
    location: str, config: SFTDataConfig, tokenizer: Tokenizer, *, first: int | None = None
) -> tuple[list[SupervisedExample], LoadReport]:
    """All usable examples at `location` (`config.train` or `config.validation`), and a report of dropped and cut ones.

    `first`: only of so many records.
    Raises: DataError listing all bad lines; DataError if no example is left.
    """
    tally = Tally(location, config)
    style = PromptStyle(apply_chat_template=config.apply_chat_template, add_bos=config.add_bos)

    def convert(raw: RawRecord) -> SupervisedExample:
        encoded = encode_record(raw, config, tokenizer, style)
        fitted = fit_length(encoded, config.max_length, config.overlong)
        tally.truncated += fitted is not encoded
        return row_of(fitted, raw)

    examples = tally.convert(recognised(location, config, Purpose.supervised, first), convert)
    return examples, tally.finish()


def encode_record(raw: RawRecord, config: SFTDataConfig, tokenizer: Tokenizer, style: PromptStyle) -> Encoded:
    """A record of any supervised format, not cut. Raises DataError for a bad one."""
    encoded = _encode_responses(raw, config, tokenizer, style)
    return everything(encoded) if config.learn is Learn.everything else encoded


def _encode_responses(raw: RawRecord, config: SFTDataConfig, tokenizer: Tokenizer, style: PromptStyle) -> Encoded:
    last_only = config.learn is Learn.last_response
    if is_labelled(raw):
        encoded = encode_labelled(tokenizer, parse_labelled(raw), style)
        return last_span(encoded) if last_only else encoded
    record = parse_supervised(raw, config.prompt_field, config.response_field)
    if isinstance(record, TextRecord):
        if last_only:
            raise DataError("is a text, of which no part is a response, expected a prompt with a response (data.learn=last_response)")
        return encode_plain(tokenizer, record.text, style, ends=True)
    tokenizer = tokenizer.offering(record.tools)
    if isinstance(record, ConversationRecord):
        return encode_conversation(tokenizer, record.messages, last_only=last_only)
    return encode_response(tokenizer, record.prompt, record.response, style)


def row_of(encoded: Encoded, raw: RawRecord) -> SupervisedExample:
    """The row of a record, with the tensors that the record has for it."""
    extras = extras_of(raw, len(encoded.tokens))
    return SupervisedExample(tokens=encoded.tokens, loss_mask=encoded.loss_mask, source=raw.source, extras=extras)


def fit_length(encoded: Encoded, max_length: int, overlong: Overlong) -> Encoded:
    """`encoded` itself if it fits (0: any does); else what `overlong` says: a DataError, `TooLong`, or its beginning."""
    if not max_length or len(encoded.tokens) <= max_length:
        return encoded
    if overlong is Overlong.truncate:
        return truncated(encoded, max_length)
    too_long(len(encoded.tokens), max_length, overlong)


@dataclass(frozen=True, kw_only=True, slots=True)
class Demonstration:
    """A prompt and the tokens of the given response, its end included."""

    prompt: Prompt
    response: tuple[int, ...]

    def row(self, response: Sequence[int]) -> SupervisedExample:
        """The prompt with a response; that alone is in the mask."""
        return answered(self.prompt, response)


def answered(prompt: Prompt, response: Sequence[int]) -> SupervisedExample:
    """The prompt with a response; that alone is in the mask."""
    head = prompt.tokens
    mask = (False,) * len(head) + (True,) * len(response)
    return SupervisedExample(tokens=(*head, *response), loss_mask=mask, source=prompt.source, extras=prompt.extras)


@reads_sources
def load_demonstrations(
    location: str, config: DemonstrationDataConfig, tokenizer: Tokenizer, *, first: int | None = None
) -> tuple[list[Demonstration], LoadReport]:
    """All usable records at `location`, and a report of dropped and cut ones. `first`: use only this many records.

    Of a conversation the last response is the given one, and all before it is the prompt; `Prompt.id` is the record's index.
    Raises: DataError listing all bad lines; DataError if none is left.
    """
    tally = Tally(location, config)
    style = PromptStyle(apply_chat_template=config.apply_chat_template, add_bos=config.add_bos)

    def convert(raw: RawRecord) -> Demonstration:
        encoded = encode_record(raw, config, tokenizer, style)
        fitted = fit_length(encoded, config.max_length, config.overlong)
        start = response_start(fitted.loss_mask)
        if 0 < config.max_prompt_length < start:
            too_long(start, config.max_prompt_length, config.overlong, "data.max_prompt_length")
        tally.truncated += fitted is not encoded
        text = tokenizer.decode(fitted.tokens[:start], skip_special=False)
        prompt = Prompt(id=raw.index, tokens=fitted.tokens[:start], source=raw.source, text=text, extras=extras_of(raw, start))
        return Demonstration(prompt=prompt, response=fitted.tokens[start:])

    found = tally.convert(recognised(location, config, Purpose.supervised, first), convert)
    return found, tally.finish()


def response_start(loss_mask: Sequence[bool]) -> int:
    """Where the last run of trained tokens begins; it ends the row. Raises DataError if there is none."""
    learnt = list(loss_mask)
    if not learnt[-1]:
        raise DataError("ends with a turn that is not learnt, expected a response at the end")
    return len(learnt) - learnt[::-1].index(False)
