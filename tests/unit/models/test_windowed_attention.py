"""Windows and capped scores: against the whole matrix of scores, in blocks, packed, with shared prompts, and in chunks in the engine."""

from __future__ import annotations

import pytest
import torch

from aligner.errors import ConfigError
from aligner.models import windowed_attention
from aligner.models.config import Architecture
from aligner.models.windowed_attention import Form, attend
from aligner.types import LabeledBatch, Prompt, SamplingConfig


def reference(q, k, v, form: Form, scale: float) -> torch.Tensor:
    """Score by score: query i of L, at T - L + i, sees the keys j with i - W < j <= i."""
    share, past = q.shape[1] // k.shape[1], k.shape[2] - q.shape[2]
    out = torch.zeros_like(q)
    for head in range(q.shape[1]):
        for i in range(q.shape[2]):
            seen = [j for j in range(past + i + 1) if not form.window or j > past + i - form.window]
            scores = (k[:, head // share, seen] @ q[:, head, i, :, None])[..., 0] * scale
            if form.softcap:
                scores = form.softcap * torch.tanh(scores / form.softcap)
            out[:, head, i] = (scores.softmax(dim=-1)[..., None] * v[:, head // share, seen]).sum(dim=1)
    return out


@pytest.mark.parametrize("form", [Form(window=1), Form(window=4), Form(window=40), Form(softcap=1.5), Form(window=5, softcap=0.7)])
@pytest.mark.parametrize("length", [1, 7, 13])
def test_attention_score_by_score(form, length, monkeypatch):
    monkeypatch.setattr(windowed_attention, "BLOCK", 5)
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, heads, size, 6, generator=generator).requires_grad_() for heads, size in ((4, length), (2, 13), (2, 13)))
    weights = torch.randn(2, 4, length, 6, generator=generator)
    found, expected = attend(q, k, v, form, 0.4), reference(q, k, v, form, 0.4)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    pairs = zip(*(torch.autograd.grad((out * weights).sum(), (q, k, v)) for out in (found, expected)), strict=True)
    for got, wanted in pairs:
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("share_prompts", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "mistral",
        "qwen3_layer_types",
        "gemma2",
        "gemma3_text",
        "opt",
        "gpt_neox",
        "olmo2",
        "glm4",
        "cohere",
        "cohere_plus",
        "cohere2",
        "phi3_longrope",
        "olmo3",
        "deepseek_v2",
        "deepseek_v3",
        "qwen2_moe",
    ],
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


@pytest.mark.parametrize("name", ["mistral", "qwen2_windows"])
def test_the_engine_prefills_in_chunks(name, topology, hf_directory, load_policy):
    """Chunks that look back into the cache through the window: the same greedy responses."""
    from aligner.rollout.config import RolloutConfig
    from aligner.rollout.create import create_engine

    policy = load_policy(hf_directory(name))
    prompt = Prompt(id=0, tokens=tuple(torch.randint(3, 61, (40,), generator=torch.Generator().manual_seed(9)).tolist()), source="test:1")
    found = []
    for chunk in (7, 4096):
        engine = create_engine(policy, RolloutConfig(prefill_chunk_tokens=chunk), eos_id=99)
        ((rollout,),) = engine.generate([prompt], [0], SamplingConfig(temperature=0.0, max_response_length=20))
        found.append(rollout)
    assert found[0].tokens == found[1].tokens and found[0].logprobs == pytest.approx(found[1].logprobs, abs=1e-5)


MIXTURE = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 8}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sliding_window": -1}, "sliding_window=-1: must not be negative"),
        ({"full_attention_layers": [0]}, r"full_attention_layers=\[0\]: needs sliding_window > 0; allowed without: \[\]"),
        ({"sliding_window": 4, "full_attention_layers": [1, 0]}, r"full_attention_layers=\[1, 0\]: must be rising numbers from 0 to .*=3"),
        ({"sliding_window": 4, "full_attention_layers": [4]}, r"full_attention_layers=\[4\]: must be rising numbers"),
        ({"attention_softcap": -2.0}, "attention_softcap=-2.0: must be finite and not negative"),
        ({"dense_layers": [0]}, r"dense_layers=\[0\]: needs num_experts > 0; allowed without: \[\]"),
        (MIXTURE | {"dense_layers": [4]}, r"dense_layers=\[4\]: must be rising numbers from 0 to num_layers-1=3"),
        (MIXTURE | {"router_bias": True}, "router_bias=True: .* allowed with router_sigmoid=True"),
        (MIXTURE | {"router_scale": 2.0}, "router_scale=2.0: allowed with router_sigmoid=True or normalize_expert_weights=False"),
        (MIXTURE | {"shared_expert_gate": True}, "shared_ffn_hidden_size=0: .* nor 0 with shared_expert_gate=True"),
        (MIXTURE | {"router_groups": 4, "router_groups_per_token": 1}, "router_groups_per_token=1: 1 groups of 1 experts have fewer than"),
        ({"value_head_dim": 8}, "value_head_dim=8: needs latent_size > 0"),
        ({"latent_size": 8, "value_head_dim": 33}, "value_head_dim=33: must be from 1 to head_dim=32"),
        ({"latent_size": 8, "value_head_dim": 8, "qk_norm": True}, "qk_norm=True: allowed with latent_size=8: False"),
    ],
)  # fmt: skip
def test_architectures_that_make_no_sense(fields, message):
    with pytest.raises(ConfigError, match=message):
        Architecture(**fields)
