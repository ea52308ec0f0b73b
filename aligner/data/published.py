"""What the published forms of records mean: one function per form, from a record's fields to fields of ours (`aligner.data.forms`)."""

from __future__ import annotations

import json
import re
from enum import Enum
from typing import Any

from aligner.data.messages import is_blank, shown, text_of
from aligner.data.records import has, refuse_two
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


# --- TRL, and what is published in its forms


def completion(record: Record, purpose: Purpose) -> Made:
    return {"response": (_peek(record, "completion"), ("completion",))} if purpose is Purpose.supervised else {}


_SCORES = (("score_chosen", "score_rejected"), ("chosen_score", "rejected_score"), ("chosen-rating", "rejected-rating"))


def pair(record: Record, purpose: Purpose) -> Made:
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


def alpaca(record: Record, purpose: Purpose) -> Made:
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
    """Whether its speakers are ShareGPT's; those of NeMo-Aligner's conversations are `User` and `Assistant`."""
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
