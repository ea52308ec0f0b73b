"""How a reward function is called, by the names of its parameters: texts, fields of the records, or TRL's signature.

- `f(prompts, responses, answers)`, and behind these any field of the records by its name, or all of them as `**columns`; `reasoning` and
  `answer_text`, which no record has, are parts of the responses, here and below;
- TRL's `f(completions, **columns)`: a parameter `completions` says so, and all arguments are passed by name. A conversation's prompt and
  completion are lists of messages then, as there. An entry of the result may be None: the function has nothing to say of that sample.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aligner.rewards.forms import Factory, OnSamples, Sample

_TEXTS = 3  # prompts, responses, answers
_PARTS = ("reasoning", "answer_text")  # of a Sample
_MADE = ("prompts", "completions", "completion_ids", "trainer_state")  # of no field, for TRL's functions
_OWN = ("prompt", "completion", "completion_ids")  # TRL passes these in the plural, or makes them


class TrainerState:
    """What is known here of TRL's `trainer_state`: the step that the samples' policy comes from."""

    def __init__(self, global_step: int) -> None:
        self.global_step = global_step

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"trainer_state.{name} is not known here, only trainer_state.global_step")


def is_trl(function: object) -> bool:
    """Whether a function has TRL's signature."""
    return "completions" in _parameters(function)


def columns_read(function: object) -> frozenset[str] | None:
    """The fields of the records that a reward function has to be passed; None: all, or nobody knows which."""
    parameters = _parameters(function)
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    if takes_all or isinstance(function, (Factory, OnSamples)):
        return None
    return frozenset(parameters).difference(_MADE) if is_trl(function) else frozenset(list(parameters)[_TEXTS:])


def called(function: Callable[..., Any], samples: Sequence[Sample], version: int) -> object:
    """What the function returns for the samples of a policy version. Raises TypeError for a parameter that no record has a field for."""
    if isinstance(function, OnSamples):
        return function(list(samples))
    parameters = _parameters(function)
    if "completions" in parameters:
        return function(**_by_name(parameters, list(parameters), samples, _trl(samples, version)))
    texts = [sample.prompt for sample in samples], [sample.response for sample in samples], [sample.answer for sample in samples]
    if any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters.values()):
        return function(*texts)
    return function(*texts, **_by_name(parameters, list(parameters)[_TEXTS:], samples, {}))


def _parameters(function: object) -> Mapping[str, inspect.Parameter]:
    """None for a function that does not say (one of native code)."""
    try:
        return inspect.signature(function).parameters  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return {}


def _trl(samples: Sequence[Sample], version: int) -> dict[str, object]:
    asked = [sample.rollout.prompt.messages for sample in samples]
    return {
        "prompts": [list(turns) if turns else sample.prompt for sample, turns in zip(samples, asked, strict=True)],
        "completions": [
            [{"role": "assistant", "content": sample.response}] if turns else sample.response
            for sample, turns in zip(samples, asked, strict=True)
        ],
        "completion_ids": [list(sample.rollout.response) for sample in samples],
        "trainer_state": TrainerState(version),
    }


def _by_name(
    parameters: Mapping[str, inspect.Parameter],
    wanted: Sequence[str],
    samples: Sequence[Sample],
    made: dict[str, object],
) -> dict[str, object]:
    """The arguments that are passed by name: those of `made`, and a field of the records, None where a record lacks it."""
    records = [sample.rollout.prompt.columns for sample in samples]
    there = list(dict.fromkeys(name for record in records for name in record))
    parts = {name: [getattr(sample, name) for sample in samples] for name in _PARTS if name in parameters and name not in there}
    columns = {name: [record.get(name) for record in records] for name in there if not made or name not in _OWN} | parts | made
    taken = list(parameters)[:_TEXTS] if not made else []
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return {name: values for name, values in columns.items() if name not in taken}
    found = {}
    for name in wanted:
        if name in columns:
            found[name] = columns[name]
        elif parameters[name].default is inspect.Parameter.empty:
            raise TypeError(f"it takes {name!r}, which is no field of the records (there are {', '.join(sorted(there)) or 'none'})")
    return found
