"""Greedy decoding of a real pretrained model, token for token what transformers' generate gives; and where its text has a stop string."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import torch

from aligner.types import FinishReason, Prompt, Rollout, SamplingConfig

if TYPE_CHECKING:
    from aligner.data.tokenizer import Tokenizer

NUM_TOKENS = 48


def texts() -> list[str]:
    """200 beginnings of 4 to 40 tokens."""
    names, animals = ("Lily", "Tom", "Sara", "Ben", "Anna"), ("dog", "cat", "bird", "fish")
    frames = (
        "{name} had a",
        "Once upon a time, there was a {animal} named {name}.",
        "One day, {name} went to the park with a {animal}. They",
        "The {animal} was very",
        'Mom said, "{name}, look at the {animal}!" {name}',
        "{name} and the {animal} played all day. The sun was hot and they were tired. Then it started to rain and",
        "It was a cold day. The {animal} ran to {name} and",
        "{name} saw a big box. In the box was a {animal}.",
        "Once there was a little girl named {name}. She loved her {animal}",
        "Every night, the {animal} sat by the window. {name}",
    )
    return [frame.format(name=name, animal=animal) for frame, name, animal in itertools.product(frames, names, animals)]


@pytest.mark.shared
def test_200_prompts(shared_data, load_policy, topology):
    from transformers import AutoModelForCausalLM

    from aligner.data.tokenizer import load_tokenizer
    from aligner.rollout.config import RolloutConfig
    from aligner.rollout.create import create_engine

    path = shared_data / "stories260k"
    tokenizer = load_tokenizer(path)
    rows = [tokenizer.encode(text, add_special=True) for text in texts()]
    assert len(rows) == 200
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=NUM_TOKENS, eos_token_id=tokenizer.eos_id, pad_token_id=tokenizer.eos_id
    )[:, width:]

    policy = load_policy(path)
    engine = create_engine(policy, RolloutConfig(), eos_id=tokenizer.eos_id, decode=tokenizer.decode)
    prompts = [Prompt(id=i, tokens=tuple(row), source=f"texts:{i}") for i, row in enumerate(rows)]

    def generate(**settings) -> dict[int, Rollout]:
        sampling = SamplingConfig(temperature=0.0, max_response_length=NUM_TOKENS, **settings)
        return {rollout.prompt.id: rollout for part in engine.generate(prompts, [0] * 200, sampling) for rollout in part}

    rollouts = generate()
    for i, expected in enumerate(theirs.tolist()):
        end = expected.index(tokenizer.eos_id) + 1 if tokenizer.eos_id in expected else NUM_TOKENS
        assert list(rollouts[i].response) == expected[:end], prompts[i]
        assert (rollouts[i].finish_reason == FinishReason.stop) == (expected[end - 1] == tokenizer.eos_id)
    assert len({rollout.response for rollout in rollouts.values()}) > 100

    strings = [". She", "d to", "day"]
    ends = []
    for i, stopped in generate(stop_strings=strings).items():
        texts_so_far = [continuation(tokenizer, prompts[i], rollouts[i].response[:n]) for n in range(1, len(rollouts[i].response) + 1)]
        end = next((n for n, text in enumerate(texts_so_far, 1) if any(string in text for string in strings)), None)
        assert stopped.response == rollouts[i].response[:end]
        assert stopped.finish_reason == (rollouts[i].finish_reason if end is None else FinishReason.stop)
        ends.append(end)
    assert None in ends and len(set(ends)) > 10


def continuation(tokenizer: Tokenizer, prompt: Prompt, response: tuple[int, ...]) -> str:
    """What a response adds to the text of its prompt."""
    return tokenizer.decode(prompt.tokens + response)[len(tokenizer.decode(prompt.tokens)) :]
