"""The engine on `transformers`' own modules: greedy tokens are `generate`'s, log-probs the trainer's, samples reproducible."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_models import VOCAB
from model_steps import adam, train
from own_models import CONFIGS, make_directory, write_vision
from rollout_parts import sampled

from aligner.errors import ConfigError, EngineError
from aligner.models.config import Implementation, LoraConfig, ModelConfig
from aligner.models.create import read_architecture
from aligner.rollout import create
from aligner.rollout.builtin.own_modules import OwnModulesEngine
from aligner.rollout.config import AsynchronousConfig, EngineKind, RolloutConfig, VerifyRefit
from aligner.rollout.create import create_engine
from aligner.rollout.engine import GenRequest, GenResult, ListedWork
from aligner.types import LabeledBatch, Prompt, SamplingConfig

LENGTHS = (5, 9, 5, 3, 14, 9, 2)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory):
    return make_directory(tmp_path_factory)


def prompts(copies: int = 1) -> list[Prompt]:
    generator = torch.Generator().manual_seed(7)
    made = [prompt(torch.randint(3, VOCAB, (length,), generator=generator).tolist()) for length in LENGTHS]
    return [one for one in made for _ in range(copies)]


def prompt(tokens: list[int]) -> Prompt:
    return Prompt(tokens=tuple(tokens), id=len(tokens), source="test")


def engine_of(policy: Any, seats: int = 3, **sampling: Any) -> Any:
    config = RolloutConfig(max_batch_size=seats, sampling=SamplingConfig(**{"max_response_length": 12} | sampling))
    return create_engine(policy, config, eos_id=1, decode=lambda tokens: "".join(chr(97 + token % 26) for token in tokens))


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_are_those_of_generate(name: str, directory, load_policy) -> None:
    """Rows of different lengths join and leave between steps: windows, experts and recurrent states follow."""
    policy = load_policy(directory(name))
    greedy = SamplingConfig(max_response_length=12, temperature=0.0)
    found = sampled(engine_of(policy), prompts(), sampling=greedy)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory(name), dtype=torch.float32).eval()
    settings = transformers.GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=1, pad_token_id=0)
    for rollout in found:
        ids = model.generate(torch.tensor([rollout.prompt.tokens]), generation_config=settings)[0, len(rollout.prompt.tokens) :]
        assert list(rollout.response) == ids.tolist()


@pytest.mark.parametrize("name", ["granite", "exaone4", "lfm2"])
def test_log_probs_are_the_trainers_and_samples_do_not_depend_on_the_batch(name: str, directory, load_policy) -> None:
    policy = load_policy(directory(name))
    found = sampled(engine_of(policy), prompts(3))
    alone = sampled(engine_of(policy, seats=1), prompts(3))
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


@pytest.mark.parametrize("name", ["deepseek_v4", "xlstm", "dory"])
def test_a_model_whose_cache_cannot_be_rearranged_samples_from_whole_rows(name: str, directory, load_policy, logprob_gap, capsys) -> None:
    policy = load_policy(directory(name))
    found = sampled(engine_of(policy), prompts(2))
    assert f"model_type={name}: its cache is not of use to the built-in engine" in capsys.readouterr().out
    assert float(logprob_gap(policy, found).max()) < 1e-4
    alone = sampled(engine_of(policy, seats=1), prompts(2))
    assert [one.response for one in found] == [one.response for one in alone]


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


@pytest.mark.parametrize("name", ["granite", "gemma4_text", "lfm2"])
@pytest.mark.parametrize("lora", [{}, {"lora": LoraConfig(rank=4)}], ids=["whole", "adapters"])
def test_a_copy_samples_while_the_policy_is_trained(name: str, lora: dict, directory, load_policy) -> None:
    """It takes new weights between two steps, and says which token is of which; until then training does not reach it."""
    policy = load_policy(directory(name), config=lora, optimizer=adam(), training={"total_steps": 10})
    ahead = {"asynchronous": AsynchronousConfig(max_staleness=1), "max_batch_size": 3}
    engine = OwnModulesEngine(policy.chunks[0], RolloutConfig(**ahead), eos_id=1)
    in_place = OwnModulesEngine(policy.chunks[0], RolloutConfig(max_batch_size=3), eos_id=1)
    copied = sum(p.nbytes for name, p in policy.chunks[0].named_parameters() if ".adapter." not in name)
    assert engine.refit(0) == copied and in_place.refit(0) == 0
    requests = [GenRequest(index=number, tokens=one.tokens, seed=number) for number, one in enumerate(prompts())]
    sampling = SamplingConfig(max_response_length=12, min_response_length=12)

    def run(one: Any) -> list[GenResult]:
        found = [result for part in one.generate(ListedWork(list(requests)), sampling) for result in part]
        return sorted(found, key=lambda result: result.index)

    before = run(in_place)
    train(policy, range(1))
    assert [one.tokens for one in run(engine)] == [one.tokens for one in before] != [one.tokens for one in run(in_place)]
    assert engine.refit(1) == copied
    after = run(in_place)
    found = run(engine)
    assert [one.tokens for one in found] == [one.tokens for one in after] and {one.weight_version for one in found} == {1}
    for own, one in zip(found, after, strict=True):
        assert own.logprobs == pytest.approx(one.logprobs, abs=1e-5) and own.versions == ()

    class Pauses:
        steps = 0

        def between_steps(self, settle: Any) -> int | None:
            self.steps += 1
            if self.steps != 6:
                return None
            train(policy, range(1, 2))
            engine.refit(2)
            return 2

    engine._pauses = Pauses()
    mixed, last = run(engine), run(in_place)
    assert {one.weight_version for one in mixed} == {2} and {one.versions for one in mixed if one.versions}
    for one, old, new in zip(mixed, after, last, strict=True):
        if not one.versions:
            assert one.tokens == new.tokens
            continue
        (first, version), (start, second) = one.versions
        assert (first, version, second) == (0, 1, 2) and 0 < start < 12
        assert one.tokens[:start] == old.tokens[:start] and one.logprobs[start] != old.logprobs[start]


def test_auto_takes_vllm_for_layers_without_states(directory, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(create.platform, "device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(create, "find_spec", lambda name: object() if name == "vllm" else None)
    write_vision("gemma3", tmp_path)
    expected = {"granite": "vllm", "minimax_m2": "vllm", "lfm2": "megatron; not vllm (the recurrent layers of lfm2 need"}
    expected |= {"falcon_h1": "megatron; not vllm (the recurrent layers", "gemma3": "megatron; not vllm (gemma3 is a model of images too"}
    for name, said in expected.items():
        path = tmp_path if name == "gemma3" else directory(name)
        config = ModelConfig(path=str(path), implementation=Implementation.transformers)
        own = create.only_built_in(read_architecture(config, vocab_size=0))
        found = str(create.choose(RolloutConfig(engine=EngineKind.auto), tp=1, own=own))
        assert found.startswith(f"rollout.engine=auto: {said}"), found


def test_what_it_cannot_do_is_refused_by_name(directory, load_policy) -> None:
    policy = load_policy(directory("granite"))
    with pytest.raises(ConfigError, match=r"rollout.tp=2: granite has transformers' own modules; allowed: 0, 1"):
        create_engine(policy, RolloutConfig(tp=2), eos_id=1)
    with pytest.raises(ConfigError, match=r"rollout.asynchronous.recompute=true: granite.*allowed: false"):
        create_engine(policy, RolloutConfig(asynchronous=AsynchronousConfig(max_staleness=1, recompute=True)), eos_id=1)
    with pytest.raises(ConfigError, match=r"rollout.engine=tensorrt_llm: granite has transformers' own modules.*allowed: auto, megatron"):
        create_engine(policy, RolloutConfig(engine=EngineKind.tensorrt_llm), eos_id=1)
    with pytest.raises(ConfigError, match=r"rollout.engine=vllm: the recurrent layers of lfm2 need the built-in engine"):
        create_engine(load_policy(directory("lfm2")), RolloutConfig(engine=EngineKind.vllm), eos_id=1)
    verified = RolloutConfig(verify_refit=VerifyRefit.checksum)
    with torch.no_grad():
        next(policy.chunks[0].hf.parameters())[0, 0] = float("inf")
    with pytest.raises(EngineError, match=r"the weights are not finite: hf.model.embed_tokens.weight \(1 of"):
        create_engine(policy, verified, eos_id=1)
    policy = load_policy(directory("granite"))
    with pytest.raises(EngineError, match="a prompt of 128 tokens leaves no room"):
        sampled(engine_of(policy), [prompt([3] * 128)])
