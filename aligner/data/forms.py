"""The forms in which records are published, and how each is read: one table, `FORMS`, and one function per form that is not our own.

A form is recognised by its fields. Its function names fields of ours, each with its value and with the fields of the record that it is
made of; what it does not name stays as it is. The readers of `aligner.data.records` then read all forms alike.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from aligner.data.config import RecordForm
from aligner.data.messages import shown, text_of
from aligner.data.records import has, refuse_two
from aligner.data.sources import Fields, RawRecord
from aligner.errors import DataError

Record = dict[str, Any]
Made = dict[str, tuple[Any, tuple[str, ...]]]  # field of ours -> its value, and the record's fields that it is made of


class Purpose(str, Enum):
    """What a recipe wants of a record."""

    prompts = "prompts"
    supervised = "supervised"
    preference = "preference"
    judged = "judged"
    regression = "regression"
    steps = "steps"


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


def recognised(records: Iterable[RawRecord], purpose: Purpose, named: RecordForm, *, as_named: bool = False) -> Iterator[RawRecord]:
    """The records in fields of ours; one whose form is unknown, or could be either of two, has an `error`.

    `named`: the form that all are to have. `as_named`: the settings name the fields, so that records stay as they are.
    """
    for raw in records:
        yield raw if as_named else recast(raw, purpose, named)


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
        return replace(raw, value=None, error=str(error))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        return replace(raw, value=None, error=f"is not a record of the form {name.value} {FORMS[name].shape}: {error!r}")


def _fields_of_others(name: RecordForm) -> set[str]:
    """Fields by which other forms are recognised, and which this one does not have: where it is named, they do not count."""
    every = {field for form in FORMS.values() for choices in form.needs.values() for fields in choices for field in fields}
    return every - set(re.findall(r"\w+", FORMS[name].shape))


def columns_of(raw: RawRecord) -> dict[str, Any]:
    """The fields of a record as they are in its file, whatever its form; none of them counts as read."""
    return _plain(raw.value.origin if isinstance(raw.value, Recast) else raw.value)


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
        raise DataError(f"has the fields {there}, expected those of a form: {forms_for(purpose)}")
    return RecordForm.auto


def _apart(record: Record, purpose: Purpose, found: Sequence[RecordForm]) -> list[str]:
    """For each of the first two forms a field by which it differs from the other."""
    first, second = (next(fields for fields in FORMS[name].needs[purpose] if _matches(record, FORMS[name], fields)) for name in found[:2])
    return [next(one for one in mine if one not in others) for mine, others in ((first, second), (second, first))]


# --- TRL, and what is published in its forms


def _completion(record: Record, purpose: Purpose) -> Made:
    return {"response": (_peek(record, "completion"), ("completion",))} if purpose is Purpose.supervised else {}


_SCORES = (("score_chosen", "score_rejected"), ("chosen_score", "rejected_score"), ("chosen-rating", "rejected-rating"))


def _pair(record: Record, purpose: Purpose) -> Made:
    """Texts as they are. Conversations hold their prompt: what both begin with (UltraFeedback's binarized form has its text again)."""
    chosen, rejected, prompt = (_peek(record, name) for name in ("chosen", "rejected", "prompt"))
    made = _scores(record)
    if not isinstance(chosen, list) or not isinstance(rejected, list):
        return made
    shared = _shared(chosen, rejected)
    sources: tuple[str, ...] = ("chosen", "rejected")
    if isinstance(prompt, list):  # which the answers repeat, or not
        cut = len(prompt) if chosen[: len(prompt)] == prompt == rejected[: len(prompt)] else 0
        asked, sources = prompt, ("prompt",)
    elif not shared and isinstance(prompt, str):
        cut, asked, sources = 0, [{"role": "user", "content": prompt}], ("prompt",)
    else:
        cut, asked = shared, chosen[:shared]
        if isinstance(prompt, str) and any(turn.get("content") == prompt for turn in asked):
            sources = (*sources, "prompt")
    if not asked:
        raise DataError("fields 'chosen' and 'rejected' begin with different messages, expected the same ones, or a field 'prompt'")
    pair: Made = {"chosen": (chosen[cut:], ("chosen",)), "rejected": (rejected[cut:], ("rejected",))}
    return pair | {"prompt": (asked, sources)} | made


def _shared(chosen: list[Any], rejected: list[Any]) -> int:
    """How many messages both begin with; each keeps one at least."""
    most = min(len(chosen), len(rejected)) - 1
    return next((number for number in range(most) if chosen[number] != rejected[number]), max(0, most))


def _scores(record: Record) -> Made:
    for better, worse in _SCORES:
        if has(record, better) and has(record, worse) and not has(record, "chosen_reward"):
            return {"chosen_reward": (_peek(record, better), (better,)), "rejected_reward": (_peek(record, worse), (worse,))}
    return {}


# --- Alpaca, with the fields that LLaMA-Factory adds


def _alpaca(record: Record, purpose: Purpose) -> Made:
    """An instruction about an input; before it a system message and earlier turns, `[[question, answer], ...]`, if there are any."""
    if purpose in (Purpose.preference, Purpose.judged):
        refuse_two([*(["prompt"] if has(record, "prompt") else []), "instruction"])
    before = _before(record)
    sources = tuple(name for name in ("system", "history", "instruction", "input") if has(record, name))
    about = _peek(record, "input")
    asked = text_of(_peek(record, "instruction"), "field 'instruction'") + (
        f"\n\n{about}" if isinstance(about, str) and about.strip() else ""
    )
    turns = [*before, {"role": "user", "content": asked}]
    if purpose is Purpose.supervised:
        if not before:
            return {}
        return {"messages": ([*turns, {"role": "assistant", "content": _peek(record, "output")}], (*sources, "output"))}
    if purpose is Purpose.prompts and not before:
        return {}
    made: Made = {"prompt": (turns if before else asked, sources)}
    if purpose is Purpose.judged:
        made |= {"response": (_peek(record, "output"), ("output",)), "label": (_peek(record, "kto_tag"), ("kto_tag",))}
    return made


def _before(record: Record) -> list[Record]:
    turns = [{"role": "system", "content": _peek(record, "system")}] if has(record, "system") and _peek(record, "system") != "" else []
    for number, pair in enumerate(_peek(record, "history") or []):
        if not isinstance(pair, list) or len(pair) != 2:
            raise DataError(f"field 'history[{number}]' is {shown(pair)}, expected [question, answer]")
        turns += [{"role": role, "content": text} for role, text in zip(("user", "assistant"), pair, strict=True)]
    return turns


# --- ShareGPT

_SPEAKERS = {"human": "user", "user": "user", "system": "system", "observation": "tool", "tool": "tool", "function_response": "tool"}
_SPEAKERS |= dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "function_call"), "assistant")


def _is_sharegpt(record: Record) -> bool:
    """Whether its speakers are ShareGPT's; those of NeMo-Aligner's conversations are `User` and `Assistant`."""
    turns = _peek(record, "conversations")
    first = turns[0] if isinstance(turns, list) and turns else None
    if has(record, "mask") or has(record, "type") or not isinstance(first, dict):
        return False
    return dict.get(first, "from") in _SPEAKERS or dict.get(first, "role") is not None


def _sharegpt(record: Record, purpose: Purpose) -> Made:
    """Turns `{from, value}`, also `{role, content}`; `function_call` and `observation` are a tool's, `tools` may be JSON text."""
    system = _peek(record, "system")
    turns = [{"role": "system", "content": system}] if system else []
    sources = ("conversations", *(("system",) if system else ()))
    for number, turn in enumerate(_peek(record, "conversations")):
        turns.append(_turn(turn, f"field 'conversations[{number}]'"))
    if purpose in (Purpose.prompts, Purpose.supervised):
        return {"messages": (turns, sources)}
    if purpose is Purpose.judged:
        label: Made = {"label": (_peek(record, "kto_tag"), ("kto_tag",))}
        return {"prompt": (turns[:-1], sources), "response": (turns[-1:], ("conversations",))} | label
    answers: Made = {name: ([_turn(_peek(record, name), f"field {name!r}")], (name,)) for name in ("chosen", "rejected")}
    return {"prompt": (turns, sources)} | answers | _scores(record)


def _turn(turn: Any, what: str) -> Record:
    if isinstance(turn, dict) and "role" in turn:
        return turn
    if not isinstance(turn, dict) or "from" not in turn or "value" not in turn:
        raise DataError(f"{what} is {shown(turn)}, expected {{from, value}}")
    speaker = turn["from"]
    if speaker not in _SPEAKERS:
        raise DataError(f"{what}: from is {shown(speaker)}, allowed: {', '.join(_SPEAKERS)}")
    role = _SPEAKERS[speaker]
    text = text_of(turn["value"], f"{what}: value", empty=role in ("system", "tool"))
    if speaker != "function_call":
        return {"role": role, "content": text}
    try:
        calls = json.loads(text)
    except ValueError as error:
        raise DataError(f"{what}: value is {shown(text)}, expected the call as JSON: {{name, arguments}}") from error
    return {"role": role, "content": None, "tool_calls": calls if isinstance(calls, list) else [calls]}


# --- UltraFeedback and HelpSteer


def _ultrafeedback(record: Record, purpose: Purpose) -> Made:
    """The completion with the best score against the one with the worst."""
    prompt: Made = {"prompt": ([{"role": "user", "content": _peek(record, "instruction")}], ("instruction",))}
    if purpose is Purpose.prompts:
        return prompt
    scored = [(ultrafeedback_score(one), one["response"].strip()) for one in _peek(record, "completions")]
    ordered = sorted(((score, text) for score, text in scored if score is not None and text), key=lambda one: -one[0])
    if not ordered or ordered[0][0] == ordered[-1][0]:
        raise DataError(f"field 'completions' has the scores {shown([score for score, _ in scored])}, expected two that differ")
    (better, chosen), (worse, rejected) = ordered[0], ordered[-1]
    pair = {"chosen": chosen, "rejected": rejected, "chosen_reward": better, "rejected_reward": worse}
    return prompt | {name: (value, ("completions",)) for name, value in pair.items()}


def ultrafeedback_score(completion: Record) -> float | None:
    """Its overall score, else the mean of its ratings; None where there is none."""
    if completion.get("overall_score") is not None:
        return float(completion["overall_score"])
    ratings = [aspect["Rating"] for aspect in (completion.get("annotations") or {}).values()]
    numbers = [float(rating) for rating in ratings if str(rating).strip().isdigit()]  # some are "N/A"
    return sum(numbers) / len(numbers) if numbers else None


HELPSTEER_ATTRIBUTES = ("helpfulness", "correctness", "coherence", "complexity", "verbosity")
_HELPSTEER_TURN = re.compile(r"\n?<extra_id_1>(User|Assistant)\n")


def helpsteer_turns(prompt: str) -> list[dict[str, str]]:
    """The turns of a prompt, between which it has marks; the first is the user's."""
    first, *others = _HELPSTEER_TURN.split(prompt)
    turns = zip(others[0::2], others[1::2], strict=True)
    return [{"role": "user", "content": first}, *({"role": speaker.lower(), "content": text} for speaker, text in turns)]


def _helpsteer(record: Record, purpose: Purpose) -> Made:
    made: Made = {"prompt": (helpsteer_turns(text_of(_peek(record, "prompt"), "field 'prompt'")), ("prompt",))}
    if purpose is Purpose.regression:
        made["label"] = ({name: _peek(record, name) for name in HELPSTEER_ATTRIBUTES}, HELPSTEER_ATTRIBUTES)
    return made


def _helpsteer2_preference(record: Record, purpose: Purpose) -> Made:
    prompt = (helpsteer_turns(text_of(_peek(record, "prompt"), "field 'prompt'")), ("prompt",))
    return {"prompt": prompt} | _stronger(record, "response_1", "response_2", "preference_strength")


def _helpsteer3(record: Record, purpose: Purpose) -> Made:
    prompt: Made = {"prompt": (_peek(record, "context"), ("context",))}
    return prompt if purpose is Purpose.prompts else prompt | _stronger(record, "response1", "response2", "overall_preference")


def _stronger(record: Record, first: str, second: str, strength: str) -> Made:
    """From -3 (the first response is much better) to 3 (the second is)."""
    preference = _peek(record, strength)
    if isinstance(preference, bool) or not isinstance(preference, (int, float)) or not 0 < abs(preference) <= 3:
        raise DataError(
            f"field {strength!r} is {shown(preference)}, expected a number from -3 to 3 that is not 0: 0 prefers neither response"
        )
    better, worse = (first, second) if preference < 0 else (second, first)
    pair: Made = {"chosen": (_peek(record, better), (better,)), "rejected": (_peek(record, worse), (worse,))}
    return pair | {"chosen_reward": (abs(preference), (strength,)), "rejected_reward": (0, (strength,))}


def _peek(record: Record, name: str) -> Any:
    """A field's value, without counting as read: that is decided by the reader of what it goes into."""
    return dict.get(record, name)


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
        recast=_completion,
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
            Purpose.judged: (("instruction", "output", "kto_tag"),),
        },
        recast=_alpaca,
    ),
    RecordForm.sharegpt: Form(
        shape="{conversations: [{from: human, value}, ...], system?, tools?}",
        needs={
            Purpose.prompts: (("conversations",),),
            Purpose.supervised: (("conversations",),),
            Purpose.preference: (("conversations", "chosen", "rejected"),),
            Purpose.judged: (("conversations", "kto_tag"),),
        },
        recast=_sharegpt,
        fits=_is_sharegpt,
    ),
    RecordForm.steerlm: Form(
        shape="{conversations: [{from: User, value, label?}, ...], system?, mask?, type?}",
        needs=dict.fromkeys((Purpose.prompts, Purpose.supervised, Purpose.regression), (("conversations",),)),
        fits=lambda record: not _is_sharegpt(record),
    ),
    RecordForm.pair: Form(shape="{prompt?, chosen, rejected}", needs=dict.fromkeys(_PAIRS, (("chosen", "rejected"),)), recast=_pair),
    RecordForm.nemo_pair: Form(
        shape="{prompt, chosen_response, rejected_response}", needs=dict.fromkeys(_PAIRS, (("chosen_response", "rejected_response"),))
    ),
    RecordForm.ultrafeedback: Form(
        shape="{instruction, completions}",
        needs=dict.fromkeys((Purpose.prompts, *_PAIRS), (("instruction", "completions"),)),
        recast=_ultrafeedback,
    ),
    RecordForm.helpsteer: Form(
        shape="{prompt, response, helpfulness, ...}",
        needs=dict.fromkeys((Purpose.prompts, Purpose.supervised, Purpose.regression), (("prompt", "response", *HELPSTEER_ATTRIBUTES),)),
        recast=_helpsteer,
    ),
    RecordForm.helpsteer2_preference: Form(
        shape="{prompt, response_1, response_2, preference_strength}",
        needs=dict.fromkeys(_PAIRS, (("prompt", "response_1", "response_2", "preference_strength"),)),
        recast=_helpsteer2_preference,
    ),
    RecordForm.helpsteer3: Form(
        shape="{context, response1, response2, overall_preference}",
        needs=dict.fromkeys((Purpose.prompts, *_PAIRS), (("context", "response1", "response2", "overall_preference"),)),
        recast=_helpsteer3,
    ),
    RecordForm.steps: Form(
        shape="{prompt, steps (or completions), labels}",
        needs={Purpose.steps: (("steps", "labels"), ("completions", "labels"))},
    ),
}
