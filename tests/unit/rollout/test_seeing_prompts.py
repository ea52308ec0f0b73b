"""The built-in engine on prompts with images: greedy tokens and log-probs are those of plain `transformers`, whatever shares the cache."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from rollout_parts import sampled
from vision_models import picture
from vision_rows import Rows, greedy_tokens, reference, seeing_directory

from aligner.data.tokenizer import load_tokenizer
from aligner.errors import ConfigError, EngineError
from aligner.models.config import LoraConfig
from aligner.rollout.config import PAGE_SIZE, AsynchronousConfig, Kernels, RolloutConfig
from aligner.rollout.create import create_engine
from aligner.types import Images, Prompt, Rollout, SamplingConfig

directory = pytest.fixture(scope="module")(seeing_directory)
NAMES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5")
LENGTH = 10


def prompts_of(rows: Rows) -> list[Prompt]:
    return [
        Prompt(tokens=tuple(tokens), id=number, source="test", extras={"images": Images.of(images)} if images else {})
        for number, (tokens, images) in enumerate(zip(rows.tokens, rows.images, strict=True))
    ]


def responses(engine: Any, prompts: list[Prompt], temperature: float = 0.0) -> list[Rollout]:
    return sampled(engine, prompts, sampling=SamplingConfig(max_response_length=LENGTH, temperature=temperature))


def logprobs_of(rows: Rows, row: int, model: Any, response: tuple[int, ...]) -> torch.Tensor:
    before, length = rows.tokens[row], len(response)
    rows.tokens[row] = [*before, *response]
    with torch.no_grad():
        logits = model(**rows.given(row, model), use_cache=False).logits[0, -length - 1 : -1].float()
    rows.tokens[row] = before
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]


@pytest.mark.parametrize("kernels", Kernels)
@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_and_log_probs_are_those_of_transformers(name: str, kernels: Kernels, directory, load_policy) -> None:
    rows = Rows(name, directory(name))
    policy = load_policy(directory(name), config={"images": True}, training={"sees": rows.vision})
    # Few tokens in a pass: images are cut; few pages: responses lose their seats and come back.
    config = RolloutConfig(
        max_batch_size=3, prefill_chunk_tokens=7, kv_cache_tokens=64, kernels=kernels, sampling=SamplingConfig(max_response_length=LENGTH)
    )
    engine = create_engine(policy, config, tokenizer=load_tokenizer(directory("qwen3_vl")).seeing(rows.vision))
    model, prompts = reference(directory(name)), prompts_of(rows)
    found = responses(engine, prompts)
    for number, own in enumerate(found):
        assert list(own.response) == greedy_tokens(rows, number, model, LENGTH)
    found = responses(engine, prompts, temperature=1.0)
    for number, own in enumerate(found):
        assert not set(own.response) & set(rows.vision.slot_ids)
        assert torch.allclose(torch.tensor(own.logprobs), logprobs_of(rows, number, model, tuple(own.response)), atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_images_of_one_size_share_nothing_and_equal_ones_do(name: str, directory, load_policy) -> None:
    rows = Rows(name, directory(name))
    policy = load_policy(directory(name), config={"images": True}, training={"sees": rows.vision})
    config = RolloutConfig(max_batch_size=2, sampling=SamplingConfig(max_response_length=LENGTH))
    engine = create_engine(policy, config, eos_id=rows.end, decode=str)
    digests = []
    for seed in (1, 2):
        file = io.BytesIO()
        picture(40, 32, seed=seed).save(file, "PNG")
        digests.append(rows.vision.store.put(file.getvalue()))
    row = 0
    text = rows.tokens[1] + rows.tokens[1] + rows.tokens[1]  # longer than a page
    slots = [token for token in rows.tokens[2] if token in rows.vision.slot_ids][: rows.vision.num_slots(digests[0])]
    tokens = [*text, *slots, *text]
    images = [digests[0], digests[1], digests[0]]
    prompts = [Prompt(tokens=tuple(tokens), id=i, source="test", extras={"images": Images.of([own])}) for i, own in enumerate(images)]
    found = responses(engine, prompts, temperature=1.0)
    model = reference(directory(name))
    for number, digest in enumerate(images):
        rows.tokens[row], rows.images[row] = tokens, [digest]
        own = found[number]
        assert torch.allclose(torch.tensor(own.logprobs), logprobs_of(rows, row, model, tuple(own.response)), atol=1e-4)
    # The second shares the whole pages of text with the first, the third all of it.
    wanted = len(text) // PAGE_SIZE * PAGE_SIZE + len(tokens)
    assert engine.engine.generation.counters.shared_tokens == (0 if name == "qwen3_5" else wanted)


@pytest.mark.parametrize(("lora", "staleness"), [(LoraConfig(rank=2), 0), (LoraConfig(), 1)], ids=["merged weights", "a copy"])
def test_weights_of_its_own_see_too_and_follow_the_policy(lora: LoraConfig, staleness: int, directory, load_policy) -> None:
    rows = Rows("qwen3_vl", directory("qwen3_vl"))
    policy = load_policy(directory("qwen3_vl"), config={"images": True, "lora": lora}, training={"sees": rows.vision})
    ahead = AsynchronousConfig(max_staleness=staleness)
    config = RolloutConfig(max_batch_size=3, asynchronous=ahead, sampling=SamplingConfig(max_response_length=LENGTH))
    engine = create_engine(policy, config, eos_id=rows.end)
    prompts, model = prompts_of(rows), reference(directory("qwen3_vl"))
    before = responses(engine, prompts)
    assert list(before[0].response) == greedy_tokens(rows, 0, model, LENGTH)
    with torch.no_grad():
        for one in (policy.module, model.model):
            for parameter in one.visual.parameters():
                parameter.neg_()
    engine.refit(1)
    after = responses(engine, prompts)
    for number, own in enumerate(after):
        assert list(own.response) == greedy_tokens(rows, number, model, LENGTH)
    assert [list(after[i].response) for i in range(4)] != [list(before[i].response) for i in range(4)]


def test_a_policy_that_reads_no_images_refuses_them_by_name(directory, load_policy) -> None:
    rows = Rows("qwen3_vl", directory("qwen3_vl"))
    engine = create_engine(load_policy(directory("qwen3_vl")), RolloutConfig(max_batch_size=3), eos_id=rows.end)
    with pytest.raises(EngineError, match=r"request .: has images, which the policy's layers do not read; allowed: model\.images=true"):
        responses(engine, prompts_of(rows))


def test_engines_of_other_packages_are_refused(directory, load_policy) -> None:
    policy = load_policy(directory("qwen3_vl"), config={"images": True})
    with pytest.raises(ConfigError, match=r"rollout\.engine=tensorrt_llm: with model\.images=true the built-in engine reads the images"):
        create_engine(policy, RolloutConfig(engine="tensorrt_llm"), eos_id=1)
