"""Windows, chunks, capped scores, sinks: against the whole matrix of scores, in blocks, packed, with shared prompts, prefilled in parts."""

from __future__ import annotations

import pytest
import torch

from aligner.models.modules import windowed_attention
from aligner.models.modules.attention import _attend_to_past
from aligner.models.modules.windowed_attention import Form, attend, with_sinks
from aligner.rollout.config import RolloutConfig
from aligner.rollout.create import create_engine
from aligner.types import LabeledBatch, Prompt, SamplingConfig


def reference(q, k, v, form: Form, scale: float, sinks: torch.Tensor | None) -> torch.Tensor:
    """Score by score: query i of L, at T - L + i, sees the keys j with i - W < j <= i, those of its chunk, and the sink of its head."""
    share, past = q.shape[1] // k.shape[1], k.shape[2] - q.shape[2]
    out = torch.zeros_like(q)
    for head in range(q.shape[1]):
        for i in range(q.shape[2]):
            seen = [j for j in range(past + i + 1) if not form.window or j > past + i - form.window]
            seen = [j for j in seen if not form.chunk or j // form.chunk == (past + i) // form.chunk]
            scores = (k[:, head // share, seen] @ q[:, head, i, :, None])[..., 0] * scale
            if form.softcap:
                scores = form.softcap * torch.tanh(scores / form.softcap)
            if sinks is not None:
                scores = torch.cat([scores, sinks[head].expand(len(q), 1)], dim=-1)
            out[:, head, i] = (scores.softmax(dim=-1)[:, : len(seen), None] * v[:, head // share, seen]).sum(dim=1)
    return out


FORMS = [Form(window=1), Form(window=4), Form(window=40), Form(softcap=1.5), Form(window=5, softcap=0.7), Form(window=4, sinks=True)]
FORMS += [Form(chunk=6), Form(chunk=1, softcap=0.7), Form(chunk=4, sinks=True)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", [1, 7, 13])
def test_attention_score_by_score(form, length, monkeypatch):
    monkeypatch.setattr(windowed_attention, "BLOCK", 5)
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, heads, size, 6, generator=generator).requires_grad_() for heads, size in ((4, length), (2, 13), (2, 13)))
    weights = torch.randn(2, 4, length, 6, generator=generator)
    sinks = torch.randn(4, generator=generator).requires_grad_() if form.sinks else None
    inputs = (q, k, v, sinks) if form.sinks else (q, k, v)
    found, expected = attend(q, k, v, form, 0.4, sinks), reference(q, k, v, form, 0.4, sinks)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    pairs = zip(*(torch.autograd.grad((out * weights).sum(), inputs) for out in (found, expected)), strict=True)
    for got, wanted in pairs:
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 6e-3)])
def test_a_sink_is_a_key_with_the_value_0(dtype, tolerance):
    """To a kernel without sinks. A sink of 9.99 is 10 in bfloat16; the scale is no power of 2."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, heads, size, 6, generator=generator).to(dtype).requires_grad_() for heads, size in ((4, 7), (2, 13), (2, 13)))
    sinks, weights = torch.tensor([9.99, -3.0, 0.5, 1.7]).requires_grad_(), torch.randn(2, 4, 7, 6, generator=generator)
    found = _attend_to_past(*with_sinks(q, k, v, sinks, 0.3), 0.3)[..., :6]
    expected = attend(q.float(), k.float(), v.float(), Form(sinks=True), 0.3, sinks)
    squares = ((x.square()).sum(dim=(0, 2, 3)) for x in (found - expected, expected))  # by head: beside a large sink weights are small
    assert torch.div(*squares).max() < tolerance**2
    pairs = zip(*(torch.autograd.grad((out * weights).sum(), (q, k, v, sinks)) for out in (found, expected)), strict=True)
    for got, wanted in pairs:
        torch.testing.assert_close(got.float(), wanted.float(), rtol=10 * tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("share_prompts", [False, True])
@pytest.mark.parametrize(
    "name",
    (
        "mistral qwen3_layer_types gemma2 gemma3_text opt gpt_neox olmo2 glm4 cohere cohere_plus cohere2 phi3_longrope olmo3 "
        "deepseek_v2 deepseek_v3 qwen2_moe llama4_text gpt_oss qwen3_next qwen3_next_tied qwen3_5_text"
    ).split(),
)
def test_packed_rows_give_the_same_logprobs(name, share_prompts, topology, hf_directory, load_policy):
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(3, 61, (4, 30), generator=generator)
    tokens[1, :12] = tokens[0, :12]  # the same prompt
    lengths = torch.tensor([30, 25, 9, 17])
    positions = torch.arange(30)
    mask = (positions >= torch.tensor([12, 12, 4, 3])[:, None]) & (positions < lengths[:, None])
    batch = LabeledBatch(tokens=torch.where(positions < lengths[:, None], tokens, 0), lengths=lengths, loss_mask=mask)
    packed = {"packing": True, "micro_batch_tokens": 96, "share_prompts": share_prompts}
    expected = load_policy(hf_directory(name)).logprobs(batch)
    found = load_policy(hf_directory(name), config=packed, training=packed).logprobs(batch)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["mistral", "qwen2_windows", "gpt_oss", "llama4_text", "qwen3_next"])
def test_the_engine_prefills_in_chunks(name, topology, hf_directory, load_policy):
    """Chunks that look back into the cache through the window, or go on from a state: the same greedy responses."""
    policy = load_policy(hf_directory(name))
    prompt = Prompt(id=0, tokens=tuple(torch.randint(3, 61, (40,), generator=torch.Generator().manual_seed(9)).tolist()), source="test:1")
    found = []
    for chunk in (7, 4096):
        engine = create_engine(policy, RolloutConfig(prefill_chunk_tokens=chunk), eos_id=99)
        ((rollout,),) = engine.generate([prompt], [0], SamplingConfig(temperature=0.0, max_response_length=20))
        found.append(rollout)
    assert found[0].tokens == found[1].tokens and found[0].logprobs == pytest.approx(found[1].logprobs, abs=1e-5)
