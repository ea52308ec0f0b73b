"""Decides a run's maximum sequence lengths. Unset lengths (0) are derived from the context: the shortest among the models that
read the sequences.

    data.max_length                        the context
    rollout.sampling.max_response_length   256, but at most half of the context, or the rest after data.max_prompt_length
    data.max_prompt_length                 the context minus the response
    data.max_history_length                2048, but at most the context minus the response; prompts get the same limit, since
                                           longer ones could not be criticised

Lengths that are set must fit the context. If the policy judges itself, its question about a response must fit too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from aligner.errors import ConfigError

RESPONSE = "rollout.sampling.max_response_length"


class Lengthy(Protocol):
    """Settings of a run with lengths to fill in: `aligner.run.settings.JobRun`."""

    data: Any

    def with_lengths(self, context: Context) -> Any: ...


J = TypeVar("J", bound=Lengthy)


@dataclass(frozen=True, slots=True)
class Context:
    """A model's context in tokens, the model's name, and the part available to unset lengths."""

    size: int
    owner: str
    room: int

    def check(self, lengths: Mapping[str, int]) -> None:
        """Raise ConfigError if they do not fit together, or no room is left for one."""
        parts = {name: length for name, length in lengths.items() if length > 0}
        fault = f"leaves nothing for {' and '.join(lengths.keys() - parts.keys())} in"
        if len(parts) == len(lengths):
            if sum(parts.values()) <= self.size:
                return
            fault = "longer than"
        said = " + ".join(f"{name}={length}" for name, length in parts.items())
        raise ConfigError(f"{said}: {fault} {self.owner}'s context of {self.size} tokens")

    def response_length(self, sampling: Any, given: int) -> int:
        """Response length for prompts of `given` tokens (0: unset too)."""
        return sampling.max_response_length or min(sampling.longest, self.room - given if given else self.room // 2)


def fill(config: J, contexts: Mapping[str, int], *, reserved: int = 0) -> J:
    """The config with every length filled in, for models with these contexts (by setting name).

    `reserved`: tokens kept free beside prompt and response if either length is unset (a judge's question and answer).
    Raises ConfigError naming the lengths that do not fit.
    """
    key = min(contexts, key=lambda name: contexts[name])
    return config.with_lengths(Context(contexts[key], "the model" if key == "model" else key, contexts[key] - reserved))


def examples(config: J, context: Context) -> J:
    """The config with the length of an example; `JobRun.with_lengths` of runs on examples."""
    length = config.data.max_length or context.size
    context.check({"data.max_length": length})
    return replace(config, data=replace(config.data, max_length=length))


def sampled(config: J, context: Context) -> J:
    """The config with the lengths of prompts and of sampled responses; `JobRun.with_lengths` of runs that sample."""
    given, sampling = config.data.max_prompt_length, config.rollout.sampling
    if (reserved := context.size - context.room) and context.room < 2 and not (given and sampling.max_response_length):
        raise ConfigError(
            f"{reserved} tokens of the judge's question and answer (algorithm.judge_template, algorithm.max_judgement_length) leave "
            f"nothing for prompts and responses in {context.owner}'s context of {context.size} tokens"
        )
    response = context.response_length(sampling, given)
    prompt = given or context.room - response
    context.check({"data.max_prompt_length": prompt, RESPONSE: response})
    return with_response(replace(config, data=replace(config.data, max_prompt_length=prompt)), response)


def with_response(config: J, response: int) -> J:
    """The config with this length of a response."""
    sampling = replace(config.rollout.sampling, max_response_length=response)
    return replace(config, rollout=replace(config.rollout, sampling=sampling))
