"""Prompts that are computed once for all their responses: where tokens lie, and that nothing but the work changes."""

from __future__ import annotations

import pytest
import torch

from aligner.errors import ConfigError
from aligner.losses.preference import dpo_loss
from aligner.losses.sft import sft_loss
from aligner.losses.value import value_loss
from aligner.models.config import Architecture, ModelConfig, PositionEmbedding, Recompute
from aligner.models.modules.attention import shared_attention
from aligner.models.modules.build import build_model
from aligner.models.modules.shared_prompts import segments_of
from aligner.models.training.optimizer import OptimizerConfig
from aligner.models.training.placement import Splits, input_shape, place
from aligner.models.training.trainable import families
from aligner.parallel.micro_batches import Family
from aligner.parallel.topology import ParallelConfig
from aligner.types import LabeledBatch, PreferenceBatch, ValueBatch

VOCAB = 61


def rows(*parts: tuple[int, int, int], width: int = 0) -> LabeledBatch:
    """(number of the prompt, its length, response length) of each row; prompts of different numbers differ from their first token on."""
    generator = torch.Generator().manual_seed(4)
    width = width or max(prompt + response for _, prompt, response in parts)
    tokens, mask = torch.zeros(len(parts), width, dtype=torch.int64), torch.zeros(len(parts), width, dtype=torch.bool)
    for row, (number, prompt, response) in enumerate(parts):
        tokens[row, :prompt] = (torch.arange(prompt) * 7 + number * 11 + 3) % VOCAB
        tokens[row, prompt : prompt + response] = torch.randint(3, VOCAB, (response,), generator=generator)
        mask[row, prompt : prompt + response] = True
    return LabeledBatch(tokens=tokens, lengths=torch.tensor([p + r for _, p, r in parts]), loss_mask=mask)


GROUPS = rows((0, 9, 5), (1, 6, 4), (0, 9, 8), (0, 9, 5), (1, 6, 1), (2, 1, 7), (3, 12, 3), (1, 6, 4))


def test_families_keep_rows_of_a_prompt_together_up_to_the_capacity(topology):
    found = families(GROUPS, unit=1, capacity=28)
    assert found == [
        Family(rows=(0, 2), size=8 + 6 + 9),
        Family(rows=(3,), size=14),  # 23 + 6 would be more than 28
        Family(rows=(1, 4, 7), size=5 + 5 + 2 + 5),
        Family(rows=(5,), size=8),
        Family(rows=(6,), size=15),
    ]
    pairs = rows((0, 3, 1), (0, 3, 2), (1, 3, 1), (2, 3, 1), (0, 3, 3), (0, 3, 1))
    assert families(pairs, unit=2, capacity=99) == [Family(rows=(0, 1, 4, 5), size=2 + 2 + 3 + 4 + 2), Family(rows=(2, 3), size=8)]


def test_prompts_that_only_begin_alike_are_not_shared(topology):
    """The same first token and length, and others behind; and the same tokens of which a loss looks at some."""
    tokens = torch.tensor([[5, 6, 7, 9], [5, 6, 8, 9], [5, 6, 8, 9]])
    mask = torch.tensor([[False, False, False, True], [False, False, False, True], [False, False, True, True]])
    batch = LabeledBatch(tokens=tokens, lengths=torch.tensor([4, 4, 4]), loss_mask=mask)
    assert [(segment.start, segment.stop, segment.prefix) for segment in segments_of(batch, share=True)] == [(0, 4, None)] * 3
    assert [family.rows for family in families(batch, unit=1, capacity=99)] == [(0,), (1,), (2,)]


def test_slots_go_on_behind_the_prompt(topology):
    batch = rows((0, 3, 1), (0, 3, 2), width=6)
    placed = place(batch, Splits(packed=True, share_prompts=True, sequence_parallel_size=4))
    assert placed.positions.tolist() == [[0, 1, 2, 3, 2, 3, 4, 0]]
    assert placed.token_of.tolist() == [[0, 1, 2, 3, 8, 9, 10, -1]]
    assert placed.next_token_of.tolist() == [[1, 2, 3, -1, 9, 10, -1, -1]]
    assert placed.packed.segments == ((0, 2, -1), (2, 4, 0), (4, 7, 0), (7, 8, -1))
    assert placed.packed.cu_seqlens_q.tolist() == [0, 8] and placed.whole_shape == (1, 8)


def models(make_model, kind: str, *, architecture=None, tokens: int = 64, **config):
    """The same model without and with shared prompts."""
    optimizer = OptimizerConfig(lr=1e-2, min_lr=1e-2, warmup_steps=0, eps=1e-3)
    made = []
    for share in (False, True):
        training = {"packing": True, "micro_batch_tokens": tokens, "share_prompts": share, "temperature": 0.8}
        settings = config | {"packing": True, "micro_batch_tokens": tokens, "share_prompts": share}
        made.append(make_model(kind, optimizer=optimizer, architecture=architecture, config=settings, training=training))
    return made


def weights(model) -> list[torch.Tensor]:
    return [parameter.detach().clone() for chunk in model.model.chunks for parameter in chunk.parameters()]


@pytest.mark.parametrize(
    ("architecture", "config", "tokens"),
    [
        ({"num_attention_heads": 4, "num_key_value_heads": 2}, {}, 64),
        ({"num_key_value_heads": 4, "qk_norm": True, "rotary_fraction": 0.5}, {"recompute": Recompute.full}, 40),
        ({"num_key_value_heads": 1, "position_embedding": "learned"}, {"recompute": Recompute.selective}, 4096),
    ],
)
def test_logprobs_and_updates_are_those_of_rows_apart(make_model, architecture, config, tokens):
    if "position_embedding" in architecture:
        architecture = architecture | {"position_embedding": PositionEmbedding.learned}
    apart, shared = models(make_model, "policy", architecture=architecture, tokens=tokens, **config)
    torch.testing.assert_close(shared.logprobs(GROUPS), apart.logprobs(GROUPS), rtol=0, atol=5e-6)
    expected, got = (model.train_step(GROUPS, sft_loss) for model in (apart, shared))
    assert {name: m.value() for name, m in got.items()} == pytest.approx({name: m.value() for name, m in expected.items()}, rel=1e-5)
    for one, other in zip(weights(shared), weights(apart), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    assert not torch.equal(apart.logprobs(GROUPS), models(make_model, "policy", architecture=architecture)[0].logprobs(GROUPS))


def test_pairs_share_their_prompt(make_model):
    batch = rows((0, 9, 5), (0, 9, 3), (1, 4, 2), (1, 4, 6), (0, 9, 1), (0, 9, 2), (2, 5, 2), (3, 5, 2))
    mask = batch.loss_mask
    pairs = PreferenceBatch(tokens=batch.tokens, lengths=batch.lengths, loss_mask=mask, margins=torch.zeros(4), ref_logprobs=-3.0 * mask)

    def loss(outputs, part):
        return dpo_loss(outputs, part, beta=0.3)

    apart, shared = models(make_model, "policy", tokens=48)
    expected, got = (model.train_step(pairs, loss) for model in (apart, shared))
    assert {name: m.value() for name, m in got.items()} == pytest.approx({name: m.value() for name, m in expected.items()}, rel=1e-5)


def test_the_value_model_learns_the_same_with_less_work(make_model):
    apart, shared = models(make_model, "value", tokens=4096)
    mask = GROUPS.loss_mask
    batch = ValueBatch(tokens=GROUPS.tokens, lengths=GROUPS.lengths, loss_mask=mask, old_values=0.1 * mask, returns=0.7 * mask)

    def loss(outputs, part):
        return value_loss(outputs, part, clip=0.2)

    expected, got = (model.train_step(batch, loss) for model in (apart, shared))
    assert {name: m.value() for name, m in got.items()} == pytest.approx({name: m.value() for name, m in expected.items()}, rel=1e-5)
    sizes = [model.model._micro_batches(batch, model.model._plan(batch))[0].placement.whole_shape[1] for model in (apart, shared)]
    assert sizes == [95, 95 - 2 * 8 - 2 * 5] and input_shape([3], shared.model.splits) == (1, 3)


def test_refusals(topology):
    with pytest.raises(ConfigError, match=r"model.share_prompts=true: needs model.packing=true"):
        ModelConfig(share_prompts=True)
    packed = {"packing": True, "micro_batch_tokens": 8, "share_prompts": True}
    with pytest.raises(ConfigError, match=r"auxiliary losses are means over tokens"):
        ModelConfig(**packed, router_z_loss_coef=0.1)
    with pytest.raises(ConfigError, match=r"split over parallel.cp=2 ranks cannot share prompts; allowed: cp=1"):
        build_model(Architecture(vocab_size=9), ModelConfig(**packed), ParallelConfig(cp=2), load=False)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_attention_and_its_gradients_are_the_plain_ones(dtype, tolerance):
    """Segments of 4, of 5 and 3 that go on from it, and of 3 alone, against a softmax over what a slot may see; relative to the largest."""
    segments = ((0, 4, -1), (4, 9, 0), (9, 12, 0), (12, 15, -1))
    visible = torch.zeros(15, 15, dtype=torch.bool)
    for start, stop, prefix in segments:
        visible[start:stop, start:stop] = torch.ones(stop - start, stop - start).tril() > 0
        if prefix >= 0:
            visible[start:stop, : segments[prefix][1]] = True
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(15, heads, 8, generator=generator) for heads in (4, 2, 2)]
    weight = torch.randn(15, 4, 8, generator=generator)
    q, k, v = (x.clone().requires_grad_() for x in made)
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, dim=1)) * 0.35
    expected = torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v.repeat_interleave(2, dim=1))
    (expected * weight).sum().backward()
    inputs = [x.to(dtype).requires_grad_() for x in made]
    got = shared_attention(*inputs, segments, 0.35)
    (got.float() * weight).sum().backward()
    for one, other in zip([got, *(x.grad for x in inputs)], [expected, q.grad, k.grad, v.grad], strict=True):
        assert (one.float() - other).abs().max() < tolerance * other.abs().max()
