"""The forms in which records are published, and how each is read: one table, `FORMS`, and one function per form that is not our own.

A form is recognised by its fields. Its function names fields of ours, each with its value and with the fields of the record that it is
made of; what it does not name stays as it is. The readers of `aligner.data.records` then read all forms alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from aligner.data.config import RecordForm
from aligner.data.messages import shown
from aligner.data.published import (
    HELPSTEER_ATTRIBUTES,
    Made,
    Purpose,
    Record,
    alpaca,
    completion,
    helpsteer,
    helpsteer2_preference,
    helpsteer3,
    is_sharegpt,
    pair,
    sharegpt,
    ultrafeedback,
)
from aligner.data.records import WrongFields, has, refuse_two
from aligner.data.sources import Fields, RawRecord, read_records
from aligner.errors import DataError
from aligner.types.extras import read_from_records


class Recast(Fields):
    """A record in fields of ours, made of `origin`, where what is read here counts as read."""

    __slots__ = ("form", "origin", "sources")

    def __init__(self, form: RecordForm, origin: Fields, made: Made, hidden: Collection[str]) -> None:
        gone = {*hidden, *made, *(name for _, names in made.values() for name in names)}
        kept = [(name, value) for name, value in origin.items() if name not in gone]
        Fields.__init__(self, kept + [(name, value) for name, (value, _) in made.items()])
        self.form = form
        self.origin = origin
        self.sources = {name: names for name, (_, names) in made.items()}

    def uses(self) -> dict[str, tuple[str, ...]]:
        """Field of ours that was read -> fields of the record that it is made of."""
        return {name: self.sources.get(name, (name,)) for name in self if name in self.read and dict.get(self, name) is not None}

    def unused(self, prefix: str = "") -> Iterator[str]:
        """Names of the record's own non-empty fields that were not read."""
        self.origin.read.update(source for names in self.uses().values() for source in names)
        return self.origin.unused(prefix)


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """`shape` is shown to people. `needs`: for each purpose the fields, all of one choice, by which the form is recognised."""

    shape: str
    needs: dict[Purpose, tuple[tuple[str, ...], ...]]
    recast: Callable[[Fields, Purpose], Made] | None = None  # None: in our own fields already
    fits: Callable[[Record], bool] = lambda record: True  # where fields alone do not tell


def recognised(location: str, config: Any, purpose: Purpose, first: int | None) -> Iterator[RawRecord]:
    """The records at `location` in fields of ours; one whose form is unknown, or could be either of two, has an `error`.

    They stay as they are if the settings `config` name the fields.
    """
    for raw in read_records(location, first):
        yield raw if getattr(config, "prompt_field", "") else recast(raw, purpose, config.form)


def recast(raw: RawRecord, purpose: Purpose, named: RecordForm = RecordForm.auto) -> RawRecord:
    """One record as `recognised` has it."""
    record = raw.value
    if not isinstance(record, Fields):
        return raw
    name = named
    try:
        name = _form_of(record, purpose, named)
        if name is RecordForm.auto:
            return raw
        made = FORMS[name].recast
        hidden = _fields_of_others(name) if named is not RecordForm.auto else ()
        return replace(raw, value=Recast(name, record, made(record, purpose) if made else {}, hidden))
    except DataError as error:
        return replace(raw, value=record if isinstance(error, WrongFields) else None, error=str(error))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        return replace(raw, value=None, error=f"is not a record of the form {name.value} {FORMS[name].shape}: {error!r}")


def _fields_of_others(name: RecordForm) -> set[str]:
    """Fields by which other forms are recognised, and which this one does not have: where it is named, they do not count."""
    every = {field for form in FORMS.values() for choices in form.needs.values() for fields in choices for field in fields}
    return every - set(re.findall(r"\w+", FORMS[name].shape))


_MEANT = {  # what the fields of others are called
    "prompt": ("question", "query", "instruction", "problem", "input", "user", "q"),
    "response": ("reply", "answer", "output", "completion", "solution", "target", "assistant", "a"),
    "chosen": ("chosen_response", "preferred", "accepted", "winner", "better", "positive"),
    "rejected": ("rejected_response", "dispreferred", "loser", "worse", "negative"),
}
_TAKEN_BY = {
    Purpose.preference: ("pairs", "dpo"),
    Purpose.steps: ("steps with labels", "process_reward_model"),
    Purpose.judged: ("responses judged one by one", "kto"),
    Purpose.supervised: ("prompts with responses", "sft"),
    Purpose.prompts: ("prompts", "grpo"),
}
_OTHER_NAMES = {
    Purpose.prompts: "; data.prompt_field and data.answer_field name other fields",
    Purpose.supervised: "; data.prompt_field and data.response_field name other fields",
}


def columns_of(raw: RawRecord) -> dict[str, Any]:
    """The fields of a record as they are in its file, whatever its form; none of them counts as read."""
    return _plain(raw.value.origin if isinstance(raw.value, Recast) else raw.value)


def extras_of(raw: RawRecord, num_tokens: int) -> dict[str, Tensor]:
    """The tensors that a record has for its row of `num_tokens` tokens. Raises DataError for one that does not fit."""
    record, found = raw.value.origin if isinstance(raw.value, Recast) else raw.value, {}
    for kind in read_from_records():
        if isinstance(record, Mapping) and record.get(kind.field) is not None:
            try:
                found[kind.name] = kind.read(record[kind.field])
                kind.check_row(found[kind.name], num_tokens)
            except (TypeError, ValueError) as error:
                raise DataError(f"field {kind.field!r} is {shown(record[kind.field])}, not the {kind.name} of the row: {error}") from error
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list) and value and isinstance(value[0], (dict, list)) else value


def forms_for(purpose: Purpose) -> str:
    """The forms that serve a purpose, with their fields, for messages."""
    return "; ".join(f"{name.value} {form.shape}" for name, form in FORMS.items() if purpose in form.needs)


def candidates(record: Record, purpose: Purpose) -> list[RecordForm]:
    """The forms by which a record can be read for a purpose; of two where one has all fields of the other and more, the former."""
    found = [(name, fields) for name, form in FORMS.items() for fields in form.needs.get(purpose, ()) if _matches(record, form, fields)]
    best = [name for name, fields in found if not any(set(fields) < set(others) for _, others in found)]
    if purpose in (Purpose.supervised, Purpose.preference) and set(best) != {RecordForm.text}:
        best = [name for name in best if name is not RecordForm.text]  # a rendering of the other fields
    return list(dict.fromkeys(best))


def advice(record: Mapping[str, Any], config: Any) -> str:
    """What may be meant by a record whose fields its reader did not find: settings that name them, another recipe, or other names."""
    meant = {ours: next((name for name in (ours, *others) if has(record, name)), "") for ours, others in _MEANT.items()}
    own = [ours for ours in ("prompt", "response") if hasattr(config, f"{ours}_field")]
    if own and all(meant[ours] for ours in own):
        return "did you mean " + " ".join(f"data.{ours}_field={meant[ours]}" for ours in own) + "?"
    fitting = next((one for one in _TAKEN_BY if candidates(record, one)), None)
    if fitting in (None, Purpose.prompts) and meant["chosen"] and meant["rejected"]:
        pairs = [f"{meant[ours]} to {ours}" for ours in ("chosen", "rejected") if meant[ours] != ours]
        return f"did you mean pairs? rename {' and '.join(pairs)}"
    return "these are {}: `aligner train {}` takes them".format(*_TAKEN_BY[fitting]) if fitting else ""


def _matches(record: Record, form: Form, fields: Sequence[str]) -> bool:
    return all(has(record, name) for name in fields) and form.fits(record)


def _form_of(record: Record, purpose: Purpose, named: RecordForm) -> RecordForm:
    """The form; `auto` where the reader is to say what is missing, or which two fields could be meant."""
    there = shown(sorted(map(str, record)))
    if named is not RecordForm.auto:
        form = FORMS[named]
        if purpose not in form.needs:
            raise DataError(f"data.form={named.value}: such records hold no {purpose.value} data, allowed: {forms_for(purpose)}")
        if not any(_matches(record, form, fields) for fields in form.needs[purpose]):
            raise DataError(f"has the fields {there}, expected {form.shape} (data.form={named.value})")
        return named
    found = candidates(record, purpose)
    if len(found) > 1 and any(FORMS[name].recast for name in found):
        refuse_two(_apart(record, purpose, found), f" (data.form names what is meant: {' or '.join(name.value for name in found)})")
    if found:
        return found[0] if len(found) == 1 else RecordForm.auto
    if not any(has(record, fields[0]) for form in FORMS.values() for fields in form.needs.get(purpose, ())):
        raise WrongFields(f"has the fields {there}, expected those of a form: {forms_for(purpose)}{_OTHER_NAMES.get(purpose, '')}")
    return RecordForm.auto


def _apart(record: Record, purpose: Purpose, found: Sequence[RecordForm]) -> list[str]:
    """For each of the first two forms a field by which it differs from the other."""
    first, second = (next(fields for fields in FORMS[name].needs[purpose] if _matches(record, FORMS[name], fields)) for name in found[:2])
    return [next(one for one in mine if one not in others) for mine, others in ((first, second), (second, first))]


_PAIRS = (Purpose.preference, Purpose.judged)  # of a pair, KTO takes the better response and the worse
FORMS: dict[RecordForm, Form] = {
    RecordForm.prompt_response: Form(
        shape="{prompt, response, label? (or preference)}",
        needs={
            Purpose.prompts: (("prompt",),),
            Purpose.supervised: (("prompt", "response"),),
            Purpose.judged: (("response", "preference"), ("response", "label")),
            Purpose.regression: (("prompt", "response", "label"),),
        },
    ),
    RecordForm.prompt_completion: Form(
        shape="{prompt, completion, label? (or preference)}",
        needs={Purpose.supervised: (("prompt", "completion"),), Purpose.judged: (("completion", "label"), ("completion", "preference"))},
        recast=completion,
    ),
    RecordForm.messages: Form(
        shape="{messages, tools?}",
        needs={Purpose.prompts: (("messages",),), Purpose.supervised: (("messages",),), Purpose.regression: (("messages", "label"),)},
    ),
    RecordForm.text: Form(
        shape="{text}",
        needs={
            Purpose.prompts: (("text",),),
            Purpose.supervised: (("text",),),
            Purpose.preference: (("text",),),
            Purpose.regression: (("text", "label"),),
        },
    ),
    RecordForm.input_output: Form(
        shape="{input, output}", needs={Purpose.supervised: (("input", "output"),), Purpose.regression: (("input", "output", "label"),)}
    ),
    RecordForm.alpaca: Form(
        shape="{instruction, input?, output, system?, history?}",
        needs={
            Purpose.prompts: (("instruction",),),
            Purpose.supervised: (("instruction", "output"), ("instruction", "input", "output")),
            Purpose.preference: (("instruction", "chosen", "rejected"),),
            Purpose.judged: (("instruction", "output", "kto_tag"), ("instruction", "chosen", "rejected")),
        },
        recast=alpaca,
    ),
    RecordForm.sharegpt: Form(
        shape="{conversations: [{from: human, value}, ...], system?, tools?}",
        needs={
            Purpose.prompts: (("conversations",),),
            Purpose.supervised: (("conversations",),),
            Purpose.preference: (("conversations", "chosen", "rejected"),),
            Purpose.judged: (("conversations", "kto_tag"), ("conversations", "chosen", "rejected")),
        },
        recast=sharegpt,
        fits=is_sharegpt,
    ),
    RecordForm.steerlm: Form(
        shape="{conversations: [{from: User, value, label?}, ...], system?, mask?, type?}",
        needs=dict.fromkeys((Purpose.prompts, Purpose.supervised, Purpose.regression), (("conversations",),)),
        fits=lambda record: not is_sharegpt(record),
    ),
    RecordForm.pair: Form(shape="{prompt?, chosen, rejected}", needs=dict.fromkeys(_PAIRS, (("chosen", "rejected"),)), recast=pair),
    RecordForm.nemo_pair: Form(
        shape="{prompt, chosen_response, rejected_response}", needs=dict.fromkeys(_PAIRS, (("chosen_response", "rejected_response"),))
    ),
    RecordForm.ultrafeedback: Form(
        shape="{instruction, completions}",
        needs=dict.fromkeys((Purpose.prompts, *_PAIRS), (("instruction", "completions"),)),
        recast=ultrafeedback,
    ),
    RecordForm.helpsteer: Form(
        shape="{prompt, response, helpfulness, ...}",
        needs=dict.fromkeys((Purpose.prompts, Purpose.supervised, Purpose.regression), (("prompt", "response", *HELPSTEER_ATTRIBUTES),)),
        recast=helpsteer,
    ),
    RecordForm.helpsteer2_preference: Form(
        shape="{prompt, response_1, response_2, preference_strength}",
        needs=dict.fromkeys(_PAIRS, (("prompt", "response_1", "response_2", "preference_strength"),)),
        recast=helpsteer2_preference,
    ),
    RecordForm.helpsteer3: Form(
        shape="{context, response1, response2, overall_preference}",
        needs=dict.fromkeys((Purpose.prompts, *_PAIRS), (("context", "response1", "response2", "overall_preference"),)),
        recast=helpsteer3,
    ),
    RecordForm.steps: Form(
        shape="{prompt, steps (or completions), labels}",
        needs={Purpose.steps: (("steps", "labels"), ("completions", "labels"))},
    ),
}
