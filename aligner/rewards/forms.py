"""Forms of reward functions, and how each is called, by the names of its parameters: texts, fields of the records, or TRL's signature.

- `f(prompts, responses, answers)`, optionally followed by any field of the records by its name, or by all of them as `**columns`;
  `reasoning` and `answer_text`, which no record has, are parts of the responses, here and below;
- TRL's `f(completions, **columns)`: recognised by the parameter `completions`; all arguments are passed by name. As in TRL, a
  conversation's prompt and completion are then lists of messages. An entry of the result may be None: no opinion on that sample.

Other forms are declared by a wrapper, never guessed."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aligner.rewards.reasoning import split_reasoning
from aligner.types import Rollout

# reward(prompts, responses, answers) -> one number per response. May be `async def`.
TextFunction = Callable[[list[str], list[str], list[str | None]], list[float] | Awaitable[list[float]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One response: its texts (special tokens too, without ends), where its prompt came from (`file:line`), and the rollout."""

    prompt: str
    response: str
    answer: str | None
    source: str
    rollout: Rollout

    @property
    def reasoning(self) -> str:
        """What the model wrote before its answer, by the marks of published models; empty if nothing (`aligner.rewards.reasoning`)."""
        return split_reasoning(self.response, self.prompt)[0]

    @property
    def answer_text(self) -> str:
        """The response without its reasoning; empty if the reasoning did not end."""
        return split_reasoning(self.response, self.prompt)[1]


@dataclass(frozen=True, slots=True)
class OnSamples:
    """Decorator for a reward function that needs more than texts: `function(samples) -> one number per sample`. May be `async def`."""

    function: Callable[[list[Sample]], list[float] | Awaitable[list[float]]]

    def __call__(self, samples: list[Sample]) -> list[float] | Awaitable[list[float]]:
        return self.function(samples)


@dataclass(frozen=True, slots=True)
class Factory:
    """Decorator for what builds a reward function from the config's `arguments`, even if they are empty.

    A function without it is a factory if arguments are given, and a reward function otherwise.
    """

    make: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.make(*args, **kwargs)


RewardFunction = TextFunction | OnSamples


def of_each_response(credit: Callable[[str], float]) -> TextFunction:
    """The reward function that scores every response by its text alone."""

    def reward(prompts: list[str], responses: list[str], answers: list[str | None]) -> list[float]:
        return [credit(response) for response in responses]

    return reward


_TEXTS = 3  # prompts, responses, answers
_PARTS = ("reasoning", "answer_text")  # of a Sample
_MADE = ("prompts", "completions", "completion_ids", "trainer_state")  # built for TRL's functions, not fields of records
_OWN = ("prompt", "completion", "completion_ids")  # TRL passes these in the plural, or builds them


class TrainerState:
    """The supported part of TRL's `trainer_state`: the step of the policy that sampled."""

    def __init__(self, global_step: int) -> None:
        self.global_step = global_step

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"trainer_state.{name} is not supported, only trainer_state.global_step")


def is_trl(function: object) -> bool:
    return "completions" in _parameters(function)


def columns_read(function: object) -> frozenset[str] | None:
    """The fields of the records that a reward function requires; None: all of them, or unknown."""
    parameters = _parameters(function)
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    if takes_all or isinstance(function, (Factory, OnSamples)):
        return None
    return frozenset(parameters).difference(_MADE) if is_trl(function) else frozenset(list(parameters)[_TEXTS:])


def called(function: Callable[..., Any], samples: Sequence[Sample], version: int) -> object:
    """What the function returns for the samples of a policy version. Raises TypeError for a parameter that no record has as a field."""
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
    """The parameters of a function; empty if they are unknown (native code)."""
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
    """The arguments passed by name: `made`, and fields of the records (None where a record lacks the field)."""
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
