"""The forms in which records are published, and how each is read: one table, `FORMS`, and one function per form that is not our own.

A form is recognised by its fields. Its function returns fields of ours, each with its value and the fields of the record that it is made
of; all other fields stay unchanged. The readers of `aligner.data.records` then read all forms in the same way."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from torch import Tensor

from aligner.data.config import RecordForm
from aligner.data.messages import Image, is_blank, shown, text_of
from aligner.data.records import WrongFields, has, refuse_two
from aligner.data.sources import Fields, RawRecord, read_records
from aligner.errors import DataError
from aligner.types.extras import read_from_records

Record = dict[str, Any]
Made = dict[str, tuple[Any, tuple[str, ...]]]  # field of ours -> its value, and the record's fields that it is made of


class Purpose(str, Enum):
    """What a recipe needs records for."""

    prompts = "prompts"
    supervised = "supervised"
    preference = "preference"
    judged = "judged"
    regression = "regression"
    steps = "steps"


# --- TRL, and what is published in its forms


def completion(record: Record, purpose: Purpose) -> Made:
    return {"response": (_peek(record, "completion"), ("completion",))} if purpose is Purpose.supervised else {}


_SCORES = (("score_chosen", "score_rejected"), ("chosen_score", "rejected_score"), ("chosen-rating", "rejected-rating"))


def pair(record: Record, purpose: Purpose) -> Made:
    """Texts stay unchanged. Conversations contain their prompt: the common beginning (UltraFeedback's binarized form repeats its text)."""
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
    """The number of messages that both begin with; each keeps at least one."""
    most = min(len(chosen), len(rejected)) - 1
    return next((number for number in range(most) if chosen[number] != rejected[number]), max(0, most))


def _scores(record: Record) -> Made:
    for better, worse in _SCORES:
        if has(record, better) and has(record, worse) and not has(record, "chosen_reward"):
            return {"chosen_reward": (_peek(record, better), (better,)), "rejected_reward": (_peek(record, worse), (worse,))}
    return {}


# --- Alpaca, with the fields that LLaMA-Factory adds


def alpaca(record: Record, purpose: Purpose) -> Made:
    """An instruction about an input, after an optional system message and earlier turns, `[[question, answer], ...]`."""
    if purpose in (Purpose.preference, Purpose.judged):
        refuse_two([*(["prompt"] if has(record, "prompt") else []), "instruction"])
    before = _before(record)
    sources = tuple(name for name in ("system", "history", "instruction", "input") if has(record, name))
    about = _peek(record, "input")
    asked = text_of(_peek(record, "instruction"), "field 'instruction'") + (
        f"\n\n{about}" if isinstance(about, str) and about.strip() else ""
    )
    turns = [*before, {"role": "user", "content": asked}]
    is_conversation = "system" in record or "history" in record  # empty ones too: all records of a file then have one format
    if purpose is Purpose.supervised:
        if not is_conversation:
            return {}
        return {"messages": ([*turns, {"role": "assistant", "content": _peek(record, "output")}], (*sources, "output"))}
    if purpose is Purpose.prompts and not is_conversation:
        return {}
    made: Made = {"prompt": (turns if is_conversation else asked, sources)}
    if purpose is Purpose.judged and has(record, "kto_tag"):
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


def is_sharegpt(record: Record) -> bool:
    """Whether the speakers are ShareGPT's; NeMo-Aligner's are `User` and `Assistant`."""
    turns = _peek(record, "conversations")
    first = turns[0] if isinstance(turns, list) and turns else None
    if has(record, "mask") or has(record, "type") or not isinstance(first, dict):
        return False
    return dict.get(first, "from") in _SPEAKERS or dict.get(first, "role") is not None


def sharegpt(record: Record, purpose: Purpose) -> Made:
    """Turns `{from, value}`, also `{role, content}`; `function_call` and `observation` are a tool's, `tools` may be JSON text."""
    system = _peek(record, "system")
    turns = [{"role": "system", "content": system}] if system else []
    sources = ("conversations", *(("system",) if system else ()))
    for number, turn in enumerate(_peek(record, "conversations")):
        turns.append(_turn(turn, f"field 'conversations[{number}]'"))
    if purpose in (Purpose.prompts, Purpose.supervised):
        return {"messages": (turns, sources)}
    if purpose is Purpose.judged and has(record, "kto_tag"):
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


def ultrafeedback(record: Record, purpose: Purpose) -> Made:
    """The completion with the best score against the one with the worst."""
    prompt: Made = {"prompt": ([{"role": "user", "content": _peek(record, "instruction")}], ("instruction",))}
    if purpose is Purpose.prompts:
        return prompt
    scored = [(ultrafeedback_score(one), one["response"].strip()) for one in _peek(record, "completions")]
    ordered = sorted(((score, text) for score, text in scored if score is not None and not is_blank(text)), key=lambda one: -one[0])
    if not ordered or ordered[0][0] == ordered[-1][0]:
        raise DataError(f"field 'completions' has the scores {shown([score for score, _ in scored])}, expected two that differ")
    (better, chosen), (worse, rejected) = ordered[0], ordered[-1]
    pair = {"chosen": chosen, "rejected": rejected, "chosen_reward": better, "rejected_reward": worse}
    return prompt | {name: (value, ("completions",)) for name, value in pair.items()}


def ultrafeedback_score(completion: Record) -> float | None:
    """Its overall score, else the mean of its ratings; None without either."""
    if completion.get("overall_score") is not None:
        return float(completion["overall_score"])
    ratings = [aspect["Rating"] for aspect in (completion.get("annotations") or {}).values()]
    numbers = [float(rating) for rating in ratings if str(rating).strip().isdigit()]  # some are "N/A"
    return sum(numbers) / len(numbers) if numbers else None


HELPSTEER_ATTRIBUTES = ("helpfulness", "correctness", "coherence", "complexity", "verbosity")
_HELPSTEER_TURN = re.compile(r"\n?<extra_id_1>(User|Assistant)\n")


def helpsteer_turns(prompt: str) -> list[dict[str, str]]:
    """The turns of a prompt, separated by marks; the first is the user's."""
    first, *others = _HELPSTEER_TURN.split(prompt)
    turns = zip(others[0::2], others[1::2], strict=True)
    return [{"role": "user", "content": first}, *({"role": speaker.lower(), "content": text} for speaker, text in turns)]


def helpsteer(record: Record, purpose: Purpose) -> Made:
    made: Made = {"prompt": (helpsteer_turns(text_of(_peek(record, "prompt"), "field 'prompt'")), ("prompt",))}
    if purpose is Purpose.regression:
        made["label"] = ({name: _peek(record, name) for name in HELPSTEER_ATTRIBUTES}, HELPSTEER_ATTRIBUTES)
    return made


def helpsteer2_preference(record: Record, purpose: Purpose) -> Made:
    prompt = (helpsteer_turns(text_of(_peek(record, "prompt"), "field 'prompt'")), ("prompt",))
    return {"prompt": prompt} | _stronger(record, "response_1", "response_2", "preference_strength")


def helpsteer3(record: Record, purpose: Purpose) -> Made:
    prompt: Made = {"prompt": (_peek(record, "context"), ("context",))}
    return prompt if purpose is Purpose.prompts else prompt | _stronger(record, "response1", "response2", "overall_preference")


def _stronger(record: Record, first: str, second: str, strength: str) -> Made:
    """A pair with a preference from -3 (the first response is much better) to 3 (the second is)."""
    preference = _peek(record, strength)
    if isinstance(preference, bool) or not isinstance(preference, (int, float)) or not 0 < abs(preference) <= 3:
        raise DataError(
            f"field {strength!r} is {shown(preference)}, expected a number from -3 to 3 that is not 0: 0 prefers neither response"
        )
    better, worse = (first, second) if preference < 0 else (second, first)
    pair: Made = {"chosen": (_peek(record, better), (better,)), "rejected": (_peek(record, worse), (worse,))}
    return pair | {"chosen_reward": (abs(preference), (strength,)), "rejected_reward": (0, (strength,))}


def _peek(record: Record, name: str) -> Any:
    """A field's value, without marking it as read: it counts as read with the field that is made of it."""
    return dict.get(record, name)


Recasting = Callable[[Fields, Purpose], Made]


class Recast(Fields):
    """A record in fields of ours, made of `origin`, whose fields count as read if these are."""

    __slots__ = ("form", "origin", "sources")

    def __init__(self, form: RecordForm, origin: Fields, made: Made, hidden: Collection[str]) -> None:
        gone = {*hidden, *made, *(name for _, names in made.values() for name in names)}
        kept = [(name, value) for name, value in origin.items() if name not in gone]
        Fields.__init__(self, kept + [(name, value) for name, (value, _) in made.items()])
        self.form = form
        self.origin = origin
        self.sources = {name: names for name, (_, names) in made.items()}

    def uses(self) -> dict[str, tuple[str, ...]]:
        """Field of ours that was read -> the fields of the record that it is made of."""
        return {name: self.sources.get(name, (name,)) for name in self if name in self.read and dict.get(self, name) is not None}

    def unused(self, prefix: str = "") -> Iterator[str]:
        """The record's own non-empty fields that were not read."""
        self.origin.read.update(source for names in self.uses().values() for source in names)
        return self.origin.unused(prefix)


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """`shape` is for people. `needs`: for each purpose the choices of fields by which the form is recognised."""

    shape: str
    needs: dict[Purpose, tuple[tuple[str, ...], ...]]
    recast: Recasting | None = None  # None: its fields are ours
    fits: Callable[[Record], bool] = lambda record: True  # if the fields alone are ambiguous


def recognised(location: str, config: Any, purpose: Purpose, first: int | None) -> Iterator[RawRecord]:
    """The records at `location` in fields of ours (unchanged if `config` names fields); `error` if the form is unknown or ambiguous."""
    for raw in read_records(location, first):
        yield raw if getattr(config, "prompt_field", "") else recast(raw, purpose, config.form)


def recast(raw: RawRecord, purpose: Purpose, named: RecordForm = RecordForm.auto) -> RawRecord:
    """One record, as in `recognised`."""
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
    """Fields by which only other forms are recognised: they are ignored if this form is named."""
    every = {field for form in FORMS.values() for choices in form.needs.values() for fields in choices for field in fields}
    return every - set(re.findall(r"\w+", FORMS[name].shape))


_MEANT = {  # other names of our fields
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
    """The fields of a record as in its file, whatever its form, with the digests of images that were read; none counts as read."""
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
    if isinstance(value, Image):
        return {"type": "image", "digest": value.digest}
    return [_plain(one) for one in value] if isinstance(value, list) and value and isinstance(value[0], (dict, list, Image)) else value


def forms_for(purpose: Purpose) -> str:
    """The forms for a purpose, with their fields, for messages."""
    return "; ".join(f"{name.value} {form.shape}" for name, form in FORMS.items() if purpose in form.needs)


def candidates(record: Record, purpose: Purpose) -> list[RecordForm]:
    """The forms by which a record can be read for a purpose, except forms whose fields are a subset of another's."""
    found = [(name, fields) for name, form in FORMS.items() for fields in form.needs.get(purpose, ()) if _matches(record, form, fields)]
    best = [name for name, fields in found if not any(set(fields) < set(others) for _, others in found)]
    if purpose in (Purpose.supervised, Purpose.preference) and set(best) != {RecordForm.text}:
        best = [name for name in best if name is not RecordForm.text]  # it renders the other fields
    return list(dict.fromkeys(best))


def advice(record: Mapping[str, Any], config: Any) -> str:
    """Advice on a record whose fields were not recognised: settings that name them, another recipe, or other names."""
    meant = {ours: next((name for name in (ours, *others) if has(record, name)), "") for ours, others in _MEANT.items()}
    own = [ours for ours in ("prompt", "response") if hasattr(config, f"{ours}_field")]
    if own and all(meant[ours] for ours in own):
        return "did you mean " + " ".join(f"data.{ours}_field={meant[ours]}" for ours in own) + "?"
    fitting = next((one for one in _TAKEN_BY if candidates(record, one)), None)
    if fitting in (None, Purpose.prompts) and meant["chosen"] and meant["rejected"]:
        pairs = [f"{meant[ours]} to {ours}" for ours in ("chosen", "rejected") if meant[ours] != ours]
        return f"did you mean pairs? rename {' and '.join(pairs)}"
    return "these are {}: `aligner train {}` accepts them".format(*_TAKEN_BY[fitting]) if fitting else ""


def _matches(record: Record, form: Form, fields: Sequence[str]) -> bool:
    return all(has(record, name) for name in fields) and form.fits(record)


def _form_of(record: Record, purpose: Purpose, named: RecordForm) -> RecordForm:
    """The form; `auto` if the reader should report what is missing or ambiguous."""
    there = shown(sorted(map(str, record)))
    if named is not RecordForm.auto:
        form = FORMS[named]
        if purpose not in form.needs:
            raise DataError(f"data.form={named.value}: such records have no {purpose.value} data, allowed: {forms_for(purpose)}")
        if not any(_matches(record, form, fields) for fields in form.needs[purpose]):
            raise DataError(f"has the fields {there}, expected {form.shape} (data.form={named.value})")
        return named
    found = candidates(record, purpose)
    if len(found) > 1 and any(FORMS[name].recast for name in found):
        refuse_two(_apart(record, purpose, found), f" (data.form names the intended one: {' or '.join(name.value for name in found)})")
    if found:
        return found[0] if len(found) == 1 else RecordForm.auto
    if not any(has(record, fields[0]) for form in FORMS.values() for fields in form.needs.get(purpose, ())):
        raise WrongFields(f"has the fields {there}, expected those of a form: {forms_for(purpose)}{_OTHER_NAMES.get(purpose, '')}")
    return RecordForm.auto


def _apart(record: Record, purpose: Purpose, found: Sequence[RecordForm]) -> list[str]:
    """For each of the first two forms a field that the other lacks."""
    first, second = (next(fields for fields in FORMS[name].needs[purpose] if _matches(record, FORMS[name], fields)) for name in found[:2])
    return [next(one for one in mine if one not in others) for mine, others in ((first, second), (second, first))]


def _form(shape: str, recast: Recasting | None = None, fits: Callable[[Record], bool] | None = None, **needs: str) -> Form:
    """A form; `needs`: the fields for each purpose, as `purpose="field field | field"`."""
    choices = {Purpose[name]: tuple(tuple(choice.split()) for choice in text.split("|")) for name, text in needs.items()}
    return Form(shape=shape, needs=choices, recast=recast, **({"fits": fits} if fits else {}))


def _pairs(fields: str) -> dict[str, str]:
    """The fields of a pair, of which KTO takes the better response and the worse."""
    return {"preference": fields, "judged": fields}


_HELPSTEER = dict.fromkeys(("prompts", "supervised", "regression"), " ".join(("prompt", "response", *HELPSTEER_ATTRIBUTES)))
_HELPSTEER3 = "context response1 response2 overall_preference"
FORMS: dict[RecordForm, Form] = {
    RecordForm.prompt_response: _form(
        "{prompt, response, label? (or preference)}",
        prompts="prompt",
        supervised="prompt response",
        judged="response preference | response label",
        regression="prompt response label",
    ),
    RecordForm.prompt_completion: _form(
        "{prompt, completion, label? (or preference)}",
        completion,
        supervised="prompt completion",
        judged="completion label | completion preference",
    ),
    RecordForm.messages: _form("{messages, tools?}", prompts="messages", supervised="messages", regression="messages label"),
    RecordForm.text: _form("{text}", prompts="text", supervised="text", preference="text", regression="text label"),
    RecordForm.input_output: _form("{input, output}", supervised="input output", regression="input output label"),
    RecordForm.alpaca: _form(
        "{instruction, input?, output, system?, history?}",
        alpaca,
        prompts="instruction",
        supervised="instruction output | instruction input output",
        preference="instruction chosen rejected",
        judged="instruction output kto_tag | instruction chosen rejected",
    ),
    RecordForm.sharegpt: _form(
        "{conversations: [{from: human, value}, ...], system?, tools?}",
        sharegpt,
        is_sharegpt,
        prompts="conversations",
        supervised="conversations",
        preference="conversations chosen rejected",
        judged="conversations kto_tag | conversations chosen rejected",
    ),
    RecordForm.steerlm: _form(
        "{conversations: [{from: User, value, label?}, ...], system?, mask?, type?}",
        None,
        lambda record: not is_sharegpt(record),
        prompts="conversations",
        supervised="conversations",
        regression="conversations",
    ),
    RecordForm.pair: _form("{prompt?, chosen, rejected}", pair, **_pairs("chosen rejected")),
    RecordForm.nemo_pair: _form("{prompt, chosen_response, rejected_response}", **_pairs("chosen_response rejected_response")),
    RecordForm.ultrafeedback: _form(
        "{instruction, completions}", ultrafeedback, prompts="instruction completions", **_pairs("instruction completions")
    ),
    RecordForm.helpsteer: _form("{prompt, response, helpfulness, ...}", helpsteer, **_HELPSTEER),
    RecordForm.helpsteer2_preference: _form(
        "{prompt, response_1, response_2, preference_strength}",
        helpsteer2_preference,
        **_pairs("prompt response_1 response_2 preference_strength"),
    ),
    RecordForm.helpsteer3: _form(
        "{context, response1, response2, overall_preference}", helpsteer3, prompts=_HELPSTEER3, **_pairs(_HELPSTEER3)
    ),
    RecordForm.steps: _form("{prompt, steps (or completions), labels}", steps="steps labels | completions labels"),
}
