"""How long the sequences of a run may be: the one place that decides it. Lengths that are not set (0) are made of the context, which is
that of the model with the shortest one among those that read the sequences.

    data.max_length                        the context
    rollout.sampling.max_response_length   256, but at most half of the context, or what data.max_prompt_length leaves of it
    data.max_prompt_length                 what the response leaves of the context
    data.max_history_length                2048, but at most what the response leaves; longer prompts could not be criticised, so these have
                                           the same limit

Lengths that are set must fit the context. Where the policy judges itself, its question about a response must fit too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from aligner.data.config import ExampleDataConfig
from aligner.errors import ConfigError
from aligner.jobs.programs import Job
from aligner.models import create
from aligner.models.config import ModelConfig
from aligner.schemas import ConstitutionalAI, Generate, OnlineRun, TrainPPO

J = TypeVar("J", bound=Job)
USUAL_HISTORY_LENGTH = 2048
RESPONSE = "rollout.sampling.max_response_length"


def with_lengths(config: J, *, reserved: int = 0) -> J:
    """`fill` from the models that the config names."""
    models = readers(config).items()
    contexts = {key: create.context_length(model, create.read_architecture(model, vocab_size=0)) for key, model in models}
    return fill(config, contexts, reserved=reserved)


def readers(config: Job) -> dict[str, ModelConfig]:
    """The models that read a run's sequences of tokens, by the names of their settings."""
    found = {"model": config.model}
    if isinstance(config, TrainPPO):
        found["critic.model"] = config.critic.model.or_else(config.model)
    if isinstance(config, OnlineRun) and config.reward.serve:
        found["reward.model"] = config.reward.model.or_else(config.model)
    return found


def fill(config: J, contexts: Mapping[str, int], *, reserved: int = 0) -> J:
    """The config with every length filled in, for models with these contexts (by the name of their settings).

    `reserved`: tokens of a judge's question and answer, to be left beside prompt and response where one of their lengths is not set.
    Raises ConfigError naming the lengths that do not fit.
    """
    key = min(contexts, key=lambda name: contexts[name])
    context = _Context(contexts[key], "the model" if key == "model" else key, contexts[key] - reserved)
    data = config.data
    if isinstance(data, ExampleDataConfig):
        data = replace(data, max_length=data.max_length or context.size)
        context.check({"data.max_length": data.max_length})
        config = replace(config, data=data)
    if isinstance(config, ConstitutionalAI):
        return _constitutional(config, context)
    if not isinstance(config, (OnlineRun, Generate)):
        return config
    prompt, response = data.max_prompt_length, config.rollout.sampling.max_response_length
    if reserved and context.room < 2 and not (prompt and response):
        raise ConfigError(
            f"{reserved} tokens of the judge's question and answer (algorithm.judge_template, algorithm.max_judgement_length) leave "
            f"nothing for prompts and responses in {context.owner}'s context of {context.size} tokens"
        )
    response = response or min(config.rollout.sampling.longest, context.room - prompt if prompt else context.room // 2)
    prompt = prompt or context.room - response
    context.check({"data.max_prompt_length": prompt, RESPONSE: response})
    return _with_response(replace(config, data=replace(data, max_prompt_length=prompt)), response)


@dataclass(frozen=True, slots=True)
class _Context:
    """The tokens that a model can read, whose they are, and how many of them lengths that are not set may be made of."""

    size: int
    owner: str
    room: int

    def check(self, lengths: Mapping[str, int]) -> None:
        """Raise ConfigError where they do not fit together, or where nothing is left for one of them."""
        parts = {name: length for name, length in lengths.items() if length > 0}
        fault = f"leaves nothing for {' and '.join(lengths.keys() - parts.keys())} in"
        if len(parts) == len(lengths):
            if sum(parts.values()) <= self.size:
                return
            fault = "longer than"
        said = " + ".join(f"{name}={length}" for name, length in parts.items())
        raise ConfigError(f"{said}: {fault} {self.owner}'s context of {self.size} tokens")


def _constitutional(config: ConstitutionalAI, context: _Context) -> ConstitutionalAI:
    data, response = config.data, 0
    given = max(data.max_prompt_length, data.max_history_length)
    if config.algorithm.samples_per_chain:
        sampling = config.rollout.sampling
        response = sampling.max_response_length or min(sampling.longest, context.room - given if given else context.room // 2)
    history = data.max_history_length or min(USUAL_HISTORY_LENGTH, context.room - response)
    prompt = data.max_prompt_length or history
    sampled = {RESPONSE: response} if config.algorithm.samples_per_chain else {}
    context.check({"data.max_history_length": history, **sampled})
    context.check({"data.max_prompt_length": prompt, **sampled})
    config = replace(config, data=replace(data, max_prompt_length=prompt, max_history_length=history))
    return _with_response(config, response) if sampled else config


def _with_response(config: J, response: int) -> J:
    sampling = replace(config.rollout.sampling, max_response_length=response)
    return replace(config, rollout=replace(config.rollout, sampling=sampling))
