"""The paged, ragged decoder computes the logits of the Megatron-Core modules, however the tokens are cut into passes and pages."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import rollout_parts
import torch
import torch.nn.functional as F

from aligner.models.config import Activation, Normalization, PositionEmbedding
from aligner.parallel import platform
from aligner.rollout.config import Kernels

pytestmark = pytest.mark.usefixtures("topology")

MOE = {"num_experts": 5, "experts_per_token": 2, "expert_ffn_hidden_size": 24}
ARCHITECTURES = {
    "llama": {"qkv_bias": False},
    "multi_head_untied": {"num_key_value_heads": 4, "tied_embeddings": False},
    "multi_query": {"num_key_value_heads": 1},
    "gpt": {
        "position_embedding": PositionEmbedding.learned,
        "normalization": Normalization.layer_norm,
        "linear_bias": True,
        "gated_mlp": False,
        "activation": Activation.gelu,
    },
    "nemotron": {
        "rotary_fraction": 0.5,
        "normalization": Normalization.layer_norm_1p,
        "gated_mlp": False,
        "activation": Activation.squared_relu,
    },
    "biases_gelu_gated": {"linear_bias": True, "activation": Activation.gelu_tanh},
    "partial_rotary": {"rotary_fraction": 0.5},
    "qk_norm": {"qk_norm": True},
    "qk_layer_norm": {"qk_norm": True, "normalization": Normalization.layer_norm},
    "experts": MOE | {"qk_norm": True},
    "experts_unnormalized_ungated": MOE | {"normalize_expert_weights": False, "gated_mlp": False, "activation": Activation.squared_relu},
}
PAGE = 4
LENGTHS = (30, 5, 21, 8)


def decoder_of(policy, **options):
    return rollout_parts.decoder_of(policy, page_size=PAGE, **options)


@torch.no_grad()
def modules_logits(policy, decoder, tokens: list[int]) -> torch.Tensor:
    """[tokens, V] of the training modules."""
    module, device = policy.module.eval(), platform.device()
    rows = torch.tensor([tokens], device=device)
    options = {"padding_mask": torch.zeros_like(rows, dtype=torch.bool)} if module.config.num_moe_experts else {}
    hidden = module(rows, torch.arange(len(tokens), device=device)[None], None, packed_seq_params=None, **options)
    return F.linear(hidden.view(len(tokens), -1), decoder.weights.output)[:, : decoder.architecture.vocab_size]


def sequences(vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in LENGTHS]


def tables(num_pages: int, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    """Page tables in no order at all, one page of slack in all."""
    free = list(range(num_pages))
    random.Random(3).shuffle(free)
    return [[free.pop() for _ in range(-(-length // PAGE))] for length in lengths]


def decode_batch(tokens: Sequence[int], positions: Sequence[int], pages: list[list[int]]):
    from aligner.rollout.builtin.attention import DecodeBatch

    on = {"device": platform.device()}
    return DecodeBatch(
        tokens=torch.tensor(tokens, **on), positions=torch.tensor(positions, **on), pages=torch.tensor(pages, dtype=torch.int32, **on)
    )


def run(decoder, rows: list[list[int]], cuts: list[list[tuple[int, int, int]]]) -> dict[tuple[int, int], torch.Tensor]:
    """Logits by (sequence, position) of passes: a pass of one-token chunks past the first is a decode step, any other a prefill.

    cuts: for each pass (sequence, first token, end).
    """
    from aligner.rollout.builtin.attention import PrefillChunk

    cache = decoder.new_cache(20)
    cache.keys.fill_(1e6), cache.values.fill_(-1e6)  # what was left behind there must not matter
    pages, found = tables(20), {}
    for cut in cuts:
        if all(end == first + 1 and first for _, first, end in cut):
            width = max(len(pages[i][: first // PAGE + 1]) for i, first, _ in cut)
            tokens, positions = zip(*((rows[i][first], first) for i, first, _ in cut), strict=True)
            logits = decoder.decode(decode_batch(tokens, positions, [(pages[i] + [0] * width)[:width] for i, _, _ in cut]), cache).clone()
        else:
            chunks = [
                PrefillChunk(tokens=rows[i][first:end], start=first, pages=pages[i], wants_logits=end % 2 == 0) for i, first, end in cut
            ]
            logits, cut = decoder.prefill(chunks, cache), [part for part in cut if part[2] % 2 == 0]
        assert logits.dtype == torch.float32 and logits.shape == (len(cut), decoder.architecture.vocab_size)
        found |= {(i, end - 1): row for (i, _, end), row in zip(cut, logits, strict=True)}
    return found


PREFILLS = [
    [(0, 0, 10), (1, 0, 2), (2, 0, 9), (3, 0, 1)],  # all at once, three sizes of attention call
    [(0, 10, 17), (2, 9, 10), (3, 1, 4)],  # the second chunk of some
    [(0, 17, 22)],
]
DECODES = [[(i, first + step, first + step + 1) for i, first in ((2, 10), (0, 22), (3, 4))] for step in range(4)]
LATER = [[(1, 2, 3), (0, 26, 27)], [(2, 14, 20)], [(2, 20, 21), (1, 3, 4)], [(0, 27, 28)]]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_equal_the_modules(name, make_model):
    """In plain torch, and with the compiled kernels where there is a compiler."""
    policy = make_model("policy", architecture=ARCHITECTURES[name])
    rows = sequences(61)
    plain, decoder = (decoder_of(policy, kernels=kernels) for kernels in (Kernels.torch, Kernels.auto))
    assert plain.fused_draw is None
    expected = [modules_logits(policy, decoder, row) for row in rows]
    in_torch = run(plain, rows, PREFILLS + DECODES + LATER)
    found = run(decoder, rows, PREFILLS + DECODES + LATER)
    assert len(found) == 2 + 2 + 1 + 12 + 2 + 1 + 2 + 1
    for (i, position), logits in found.items():
        torch.testing.assert_close(logits, expected[i][position], rtol=0, atol=2e-4, msg=f"sequence {i}, position {position}")
        torch.testing.assert_close(logits, in_torch[i, position], rtol=0, atol=3e-5, msg=f"sequence {i}, position {position}")


def test_sequences_of_one_pass_share_a_prefix(make_model):
    """The second one's table names the first one's pages: what one chunk writes, another of the same pass reads."""
    from aligner.rollout.builtin.attention import PrefillChunk

    policy = make_model("policy")
    decoder = decoder_of(policy)
    row = sequences(61)[0]
    other = row[:8] + row[20:25]
    chunks = [
        PrefillChunk(tokens=row[:11], start=0, pages=[3, 1, 2], wants_logits=False),
        PrefillChunk(tokens=other[8:], start=8, pages=[3, 1, 7, 0], wants_logits=True),
    ]
    cache = decoder.new_cache(8)
    (logits,) = decoder.prefill(chunks, cache)
    torch.testing.assert_close(logits, modules_logits(policy, decoder, other)[-1], rtol=0, atol=2e-4)
    assert decoder.prefill(chunks[:1], cache).shape == (0, 61)


def test_copied_pages_continue_a_sequence(make_model):
    from aligner.rollout.builtin.attention import PrefillChunk

    policy = make_model("policy")
    decoder = decoder_of(policy)
    row = sequences(61)[1]
    cache = decoder.new_cache(6)
    decoder.prefill([PrefillChunk(tokens=row[:-1], start=0, pages=[0], wants_logits=False)], cache)
    cache.copy_pages([0], [5])
    (logits,) = decoder.decode(decode_batch(row[-1:], [4], [[5, 2]]), cache)
    torch.testing.assert_close(logits, modules_logits(policy, decoder, row)[-1], rtol=0, atol=2e-4)


def test_a_cache_is_as_large_as_it_says(make_model):
    decoder = decoder_of(make_model("policy"))
    cache = decoder.new_cache(7)
    assert cache.num_pages == 7 and cache.page_size == PAGE
