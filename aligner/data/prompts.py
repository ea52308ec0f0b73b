"""Prompt sets for online RL."""

from __future__ import annotations

from aligner.data.config import Overlong, PromptDataConfig
from aligner.data.encoding import PromptStyle, encode_prompt
from aligner.data.records import parse_prompt
from aligner.data.report import LoadReport, Tally, too_long
from aligner.data.sources import RawRecord, read_records
from aligner.data.tokenizer import Tokenizer
from aligner.errors import DataError
from aligner.types import Prompt


def load_prompts(
    location: str, config: PromptDataConfig, tokenizer: Tokenizer, *, first: int | None = None
) -> tuple[list[Prompt], LoadReport]:
    """All usable prompts at `location` (`config.train` or `config.validation`), tokenized, and a report of dropped ones.

    `first`: only of so many records.
    `Prompt.id` is the record's index at `location`, whatever else was dropped, so it is stable across epochs and resumes.
    Raises: DataError listing all bad lines; DataError if no prompt is left.
    """
    tally = Tally(location, config.bad_lines)
    style = PromptStyle(apply_chat_template=config.apply_chat_template, add_bos=config.add_bos)

    def convert(raw: RawRecord) -> Prompt:
        record = parse_prompt(raw, config.prompt_field, config.answer_field)
        tokens = encode_prompt(tokenizer, record.prompt, style)
        if not tokens:
            raise DataError(f"prompt {record.prompt!r} has no token, expected at least one")
        whole, tokens = tokens, fit_prompt(tokens, config, tokenizer.bos_id)
        tally.truncated += tokens is not whole
        is_text = isinstance(record.prompt, str) and tokens is whole
        text = str(record.prompt) if is_text else tokenizer.decode(tokens, skip_special=False)
        return Prompt(id=raw.index, tokens=tuple(tokens), source=raw.source, text=text, answer=record.answer)

    prompts = tally.convert(read_records(location, first), convert)
    return prompts, tally.finish()


def fit_prompt(tokens: list[int], config: PromptDataConfig, bos_id: int | None) -> list[int]:
    """`tokens` itself if they fit (0: any do); else what `config.overlong` says: a DataError, `TooLong`, or their end.

    A begin token stays the first one.
    """
    limit = config.max_prompt_length
    if not limit or len(tokens) <= limit:
        return tokens
    if config.overlong is not Overlong.truncate:
        too_long(len(tokens), limit, config.overlong, "data.max_prompt_length")
    head = tokens[:1] if tokens[0] == bos_id and limit > 1 else []
    return [*head, *tokens[len(tokens) - limit + len(head) :]]
