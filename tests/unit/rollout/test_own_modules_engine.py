"""The engine on `transformers`' own modules: greedy tokens are `generate`'s, log-probs the trainer's, samples reproducible."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from hf_models import VOCAB
from own_models import CONFIGS, make_directory

from aligner.errors import ConfigError, EngineError
from aligner.rollout.config import AsynchronousConfig, RolloutConfig
from aligner.rollout.create import create_engine
from aligner.types import LabeledBatch, Prompt, SamplingConfig

LENGTHS = (5, 9, 5, 3, 14, 9, 2)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory):
    return make_directory(tmp_path_factory)


def prompts() -> list[Prompt]:
    generator = torch.Generator().manual_seed(7)
    return [prompt(torch.randint(3, VOCAB, (length,), generator=generator).tolist()) for length in LENGTHS]


def prompt(tokens: list[int]) -> Prompt:
    return Prompt(tokens=tuple(tokens), id=len(tokens), source="test")


def engine_of(policy: Any, seats: int = 3, **sampling: Any) -> Any:
    config = RolloutConfig(max_batch_size=seats, sampling=SamplingConfig(**{"max_response_length": 12, "temperature": 1.0} | sampling))
    return create_engine(policy, config, eos_id=1, decode=lambda tokens: "".join(chr(97 + token % 26) for token in tokens))


def sampled(engine: Any, given: list[Prompt], sampling: SamplingConfig | None = None, copies: int = 1) -> list[Any]:
    pairs = [(prompt, 100 * number + copy) for number, prompt in enumerate(given) for copy in range(copies)]
    found = [one for part in engine.generate([p for p, _ in pairs], [s for _, s in pairs], sampling) for one in part]
    return sorted(found, key=lambda rollout: rollout.seed)


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_are_those_of_generate(name: str, directory, load_policy) -> None:
    """Rows of different lengths join and leave between steps: windows, experts and recurrent states follow."""
    policy = load_policy(directory(name))
    greedy = SamplingConfig(max_response_length=12, temperature=0.0)
    found = sampled(engine_of(policy), prompts(), greedy)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory(name), dtype=torch.float32).eval()
    settings = transformers.GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=1, pad_token_id=0)
    for rollout in found:
        ids = model.generate(torch.tensor([rollout.prompt.tokens]), generation_config=settings)[0, len(rollout.prompt.tokens) :]
        assert list(rollout.response) == ids.tolist()


@pytest.mark.parametrize("name", ["granite", "exaone4", "lfm2"])
def test_log_probs_are_the_trainers_and_samples_do_not_depend_on_the_batch(name: str, directory, load_policy) -> None:
    policy = load_policy(directory(name))
    found = sampled(engine_of(policy), prompts(), copies=3)
    alone = sampled(engine_of(policy, seats=1), prompts(), copies=3)
    assert [one.response for one in found] == [one.response for one in alone]
    assert len({one.response for one in found}) > len(LENGTHS)  # the copies differ
    width = max(len(one.prompt.tokens) + len(one.response) for one in found)
    tokens, mask = torch.zeros(len(found), width, dtype=torch.int64), torch.zeros(len(found), width, dtype=torch.bool)
    for row, one in enumerate(found):
        start, end = len(one.prompt.tokens), len(one.prompt.tokens) + len(one.response)
        tokens[row, :end], mask[row, start:end] = torch.tensor([*one.prompt.tokens, *one.response]), True
    lengths = torch.tensor([len(one.prompt.tokens) + len(one.response) for one in found])
    logprobs = policy.logprobs(LabeledBatch(tokens=tokens, lengths=lengths, loss_mask=mask))
    for row, one in enumerate(found):
        assert torch.allclose(logprobs[row][mask[row]], torch.tensor(one.logprobs), atol=1e-4)


def test_stops_limits_and_penalties(directory, load_policy) -> None:
    policy = load_policy(directory("granite"))
    plain = sampled(engine_of(policy), prompts())
    stopped = sampled(engine_of(policy, stop_token_ids=[plain[0].response[2]]), prompts())[0]
    assert stopped.response == plain[0].response[: plain[0].response.index(plain[0].response[2]) + 1]
    assert stopped.finish_reason.value == "stop" and {one.finish_reason.value for one in plain} == {"stop", "length"}
    assert all(len(one.response) == 12 for one in plain if one.finish_reason.value == "length")
    text = "".join(chr(97 + token % 26) for token in plain[1].response[1:3])
    cut = sampled(engine_of(policy, stop_strings=[text]), prompts())[1]
    assert cut.response == plain[1].response[:3]
    other = sampled(engine_of(policy, repetition_penalty=3.0), prompts())
    assert [one.response for one in other] != [one.response for one in plain]


def test_what_it_cannot_do_is_refused_by_name(directory, load_policy) -> None:
    policy = load_policy(directory("granite"))
    with pytest.raises(ConfigError, match=r"rollout.tp=2: granite has transformers' own modules; allowed: 0, 1"):
        create_engine(policy, RolloutConfig(tp=2), eos_id=1)
    with pytest.raises(ConfigError, match=r"rollout.asynchronous.max_staleness=1: granite"):
        create_engine(policy, RolloutConfig(asynchronous=AsynchronousConfig(max_staleness=1)), eos_id=1)
    with pytest.raises(EngineError, match="a prompt of 128 tokens leaves no room"):
        sampled(engine_of(policy), [prompt([3] * 128)])
