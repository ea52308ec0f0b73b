"""Supervised examples as prompts with the given response, with which SPIN compares its own responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aligner.data.config import DemonstrationDataConfig
from aligner.data.encoding import PromptStyle
from aligner.data.report import LoadReport, Tally, too_long
from aligner.data.sources import RawRecord, read_records
from aligner.data.supervised import SupervisedExample, encode_record, fit_length
from aligner.data.tokenizer import Tokenizer
from aligner.errors import DataError
from aligner.types import Prompt


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
    return SupervisedExample(tokens=(*head, *response), loss_mask=(False,) * len(head) + (True,) * len(response), source=prompt.source)


def load_demonstrations(
    location: str, config: DemonstrationDataConfig, tokenizer: Tokenizer, *, first: int | None = None
) -> tuple[list[Demonstration], LoadReport]:
    """All usable records at `location`, and a report of dropped and cut ones. `first`: use only this many records.

    Of a conversation the last response is the given one, and all before it is the prompt; `Prompt.id` is the record's index.
    Raises: DataError listing all bad lines; DataError if none is left.
    """
    tally = Tally(location, config.bad_lines)
    style = PromptStyle(apply_chat_template=config.apply_chat_template, add_bos=config.add_bos)

    def convert(raw: RawRecord) -> Demonstration:
        encoded = encode_record(raw, config, tokenizer, style)
        fitted = fit_length(encoded, config.max_length, config.overlong)
        start = response_start(fitted.loss_mask)
        if 0 < config.max_prompt_length < start:
            too_long(start, config.max_prompt_length, config.overlong, "data.max_prompt_length")
        tally.truncated += fitted is not encoded
        text = tokenizer.decode(fitted.tokens[:start], skip_special=False)
        prompt = Prompt(id=raw.index, tokens=fitted.tokens[:start], source=raw.source, text=text)
        return Demonstration(prompt=prompt, response=fitted.tokens[start:])

    found = tally.convert(read_records(location, first), convert)
    return found, tally.finish()


def response_start(loss_mask: Sequence[bool]) -> int:
    """Where the last run of trained tokens begins; it ends the row. Raises DataError if there is none."""
    learnt = list(loss_mask)
    if not learnt[-1]:
        raise DataError("ends with a turn that is not learnt, expected a response at the end")
    return len(learnt) - learnt[::-1].index(False)
