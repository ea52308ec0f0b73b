"""`aligner data inspect`: in which form a data set is, how its fields are used, and what a model will see of it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from aligner.commands.parts import InspectOptions
from aligner.commands.validate_data import BAD, config_of, inspect, show_samples
from aligner.data.config import RecordForm
from aligner.data.forms import FORMS, Purpose, candidates
from aligner.data.inspection import describe_fields
from aligner.data.records import raw_object
from aligner.data.sources import read_records
from aligner.data.tokenizer import Tokenizer, load_tokenizer
from aligner.errors import DataError
from aligner.run.from_hub import fetch_named

# What a data set is read for, the most telling first, and the kind of `aligner data validate` that does.
_KINDS = {
    Purpose.steps: "steps",
    Purpose.regression: "regression",
    Purpose.preference: "preference",
    Purpose.judged: "kto",
    Purpose.supervised: "sft",
    Purpose.prompts: "prompts",
}
_SAMPLE = 200  # records that are read; an even number: some forms have pairs of lines


def inspect_data(target: str, overrides: Sequence[str], options: InspectOptions) -> int:
    """Say what `target` holds, a file or a data set of the Hub, read as `options.kind`, or as what its first record is good for.

    Without a tokenizer samples are shown with a stand-in of bytes and ChatML. Returns the exit code: 1 if lines are bad.
    Raises ConfigError for settings that do not fit, DataError for a missing file or a form that nobody knows.
    """
    with TemporaryDirectory() as folder:
        chosen = InspectOptions(kind=options.kind or "sft", tokenizer=options.tokenizer or str(_stand_in(Path(folder))))
        config = config_of(target, overrides, chosen)
        fetch_named(config, weights=False)
        location, tokenizer = config.data.train, load_tokenizer(config.model.tokenizer_path)
        kinds = kinds_of(location) if not options.kind else [options.kind]
        if kinds[0] != chosen.kind:
            config = config_of(location, overrides, InspectOptions(kind=kinds[0], tokenizer=config.model.tokenizer))
        if not options.tokenizer or not tokenizer.has_chat_template:
            config.data.chat_template = config.data.chat_template or "chatml"
        tokenizer = tokenizer.chatting(config.data)
        return _show(config, location, tokenizer, kinds, options)


def _show(config: object, location: str, tokenizer: Tokenizer, kinds: Sequence[str], options: InspectOptions) -> int:
    finding, views = inspect(config, location, tokenizer, first=_SAMPLE)  # type: ignore[arg-type]
    report = finding.report
    print(f"{location}: read as {kinds[0]}" + (f" (also good for {', '.join(kinds[1:])}: --kind)" if kinds[1:] else ""))
    for line in [*describe_fields(report), *report.notes()]:
        print(f"  {line}")
    for problem in report.problems[: options.num_samples]:
        print(f"bad: {problem}")
    print(f"  {report.num_kept} of the first {report.num_records} records can be used, {report.num_bad} bad")
    if not options.tokenizer:
        print("  samples as ChatML; --tokenizer DIR shows them as a model will see them")
    show_samples(views[: options.num_samples], tokenizer, sys.stdout)
    return BAD if report.num_bad else 0


def kinds_of(location: str) -> list[str]:
    """What the first readable record is good for. Raises DataError if its form is unknown."""
    raw = next((raw for raw in read_records(location) if not raw.error), None)
    if raw is None:
        raise DataError(f"{location}: has no readable record")
    record = raw_object(raw)
    forms = {purpose: candidates(record, purpose) for purpose in _KINDS}
    found = [kind for purpose, kind in _KINDS.items() if forms[purpose]]
    if forms[Purpose.preference] == [RecordForm.text]:  # only if good and bad texts alternate
        found = [*(kind for kind in found if kind != "preference"), "preference"]
    if found:
        return found
    known = "; ".join(f"{name.value} {form.shape}" for name, form in FORMS.items())
    raise DataError(f"{raw.source}: has the fields {sorted(map(str, record))}, expected those of a form: {known}")


def _stand_in(folder: Path) -> Path:
    """A tokenizer whose tokens are bytes and the marks of ChatML."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in ("<|im_start|>", "<|im_end|>")])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>").save_pretrained(str(folder))
    return folder
