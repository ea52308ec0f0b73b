"""The shift, the mask and the micro-batches: what a forward pass gives for token t, whatever it was computed together with."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from aligner.models.modules import heads
from aligner.models.training.forward import cut
from aligner.models.training.placement import Splits
from aligner.parallel import platform
from aligner.types import LabeledBatch, PreferenceBatch, TokenBatch, ValueBatch
from aligner.types.rows import trim_columns

pytestmark = pytest.mark.usefixtures("topology")

VOCAB, WIDTH = 61, 20
LENGTHS = (20, 6, 13, 9, 17)


def labeled(lengths=LENGTHS, width: int = WIDTH, prompt: int = 3) -> LabeledBatch:
    generator = torch.Generator().manual_seed(9)
    positions, rows = torch.arange(width), torch.tensor(lengths)[:, None]
    tokens = torch.randint(1, VOCAB, (len(lengths), width), generator=generator)
    mask = (positions >= prompt) & (positions < rows)
    return LabeledBatch(tokens=tokens * (positions < rows), lengths=torch.tensor(lengths), loss_mask=mask)


def test_fillers_hold_one_token_and_learn_nothing():
    batch = labeled(prompt=0)  # every token counts, the first one too
    parts = cut(batch, [[0, 1], [2]], Splits(), count=4, unit=2, fixed_shape=False)
    assert [part.filler for part in parts] == [False, False, True, True]
    for part in parts[2:]:
        assert part.batch.tokens.shape == (2, 1) and part.batch.lengths.tolist() == [1, 1] and not part.batch.loss_mask.any()


@torch.no_grad()
def hidden_states(module, tokens: torch.Tensor) -> torch.Tensor:
    """[B, S, H], in one pass without micro-batches."""
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    return module.eval()(tokens.to(platform.device()), positions.to(platform.device()), None).transpose(0, 1).cpu()


def direct_logprobs(policy, batch: LabeledBatch) -> torch.Tensor:
    """log pi(token t | tokens before t), one prefix at a time: nothing is shifted, padded or masked."""
    result = torch.zeros(batch.tokens.shape)
    weight = policy.module.vocabulary_weight()[0].cpu()
    for row, mask in enumerate(batch.loss_mask):
        for t in mask.nonzero()[:, 0].tolist():
            last = hidden_states(policy.module, batch.tokens[row : row + 1, :t])[0, -1]
            result[row, t] = torch.log_softmax(weight @ last / policy.temperature, dim=0)[batch.tokens[row, t]]
    return result


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprob_of_token_t_is_given_the_tokens_before_it(make_model, temperature):
    policy, batch = make_model("policy", training={"micro_batch_size": 2, "temperature": temperature}), labeled()
    logprobs = policy.logprobs(batch)
    assert logprobs.dtype == torch.float32 and logprobs.shape == batch.tokens.shape
    torch.testing.assert_close(logprobs, direct_logprobs(policy, batch), rtol=1e-5, atol=1e-5)
    assert not logprobs[~batch.loss_mask].any()
    assert (logprobs[batch.loss_mask] < 0).all()


def test_only_masked_positions_are_projected(make_model, monkeypatch):
    policy, batch = make_model("policy", training={"micro_batch_size": 2}), labeled(prompt=5)
    seen = []

    def recorded(hidden, weight, targets, projection):
        seen.append((hidden.shape[0], targets.shape[0], weight.shape[0]))
        return linear_logprobs(hidden, weight, targets, projection)

    linear_logprobs = heads.linear_logprobs
    monkeypatch.setattr(heads, "linear_logprobs", recorded)
    policy.logprobs(batch)
    assert seen == [(16, 16, VOCAB), (12, 12, VOCAB), (12, 12, VOCAB)]  # (20-5)+(6-5), (13-5)+(9-5), 17-5


@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, 8])
def test_micro_batches_give_the_numbers_of_one_pass(make_model, micro_batch_size):
    batch = labeled()
    one = make_model("policy", training={"micro_batch_size": 5}).logprobs(batch)
    many = make_model("policy", training={"micro_batch_size": micro_batch_size}).logprobs(batch)
    torch.testing.assert_close(many, one, rtol=1e-5, atol=1e-5)
    value = make_model("value", training={"micro_batch_size": micro_batch_size})
    tokens = TokenBatch(tokens=batch.tokens, lengths=batch.lengths)
    torch.testing.assert_close(value.values(tokens), make_model("value").values(tokens), rtol=1e-5, atol=1e-5)
    reward = make_model("reward", training={"micro_batch_size": micro_batch_size})
    torch.testing.assert_close(reward.scores(tokens), make_model("reward").scores(tokens), rtol=1e-5, atol=1e-5)
    four = {"tokens": batch.tokens[:4], "lengths": batch.lengths[:4], "loss_mask": batch.loss_mask[:4]}
    pairs = PreferenceBatch(**four, margins=torch.zeros(2))
    torch.testing.assert_close(reward.scores(pairs), reward.scores(tokens)[:4], rtol=1e-5, atol=1e-5)


def test_padding_does_not_matter(make_model):
    """Neither what stands in it nor how much of it there is."""
    policy, batch = make_model("policy", training={"micro_batch_size": 2}), labeled()
    expected = policy.logprobs(batch)
    positions = torch.arange(WIDTH)
    noisy = torch.where(positions < batch.lengths[:, None], batch.tokens, 7)
    torch.testing.assert_close(policy.logprobs(replace(batch, tokens=noisy)), expected, rtol=1e-5, atol=1e-5)
    wide = policy.logprobs(trim_columns(batch, WIDTH + 9))
    assert wide.shape == (5, WIDTH + 9) and not wide[:, WIDTH:].any()
    torch.testing.assert_close(wide[:, :WIDTH], expected, rtol=1e-5, atol=1e-5)


def test_micro_batches_are_cut_to_their_longest_row():
    def shapes(batch: LabeledBatch, splits: Splits) -> list[tuple[int, ...]]:
        rows = [list(range(start, min(start + 2, len(batch.lengths)))) for start in range(0, len(batch.lengths), 2)]
        return [tuple(part.placement.tokens.shape) for part in cut(batch, rows, splits, count=0, unit=1, fixed_shape=False)]

    assert shapes(labeled(), Splits()) == [(2, 20), (2, 13), (1, 17)]
    assert shapes(labeled(), Splits(sequence_parallel_size=4)) == [(2, 20), (2, 16), (1, 20)]
    assert shapes(labeled((5,), 5), Splits(sequence_parallel_size=8)) == [(1, 8)]
    assert shapes(labeled(), Splits(cp_size=2)) == [(2, 10), (2, 8), (1, 10)]  # multiples of 4, half of them here
    assert shapes(labeled(), Splits(packed=True)) == [(1, 26), (1, 22), (1, 17)]
    assert shapes(labeled(), Splits(packed=True, cp_size=2)) == [(1, 14), (1, 14), (1, 10)]  # (20 + 8) / 2, (16 + 12) / 2, 20 / 2


def test_rows_without_a_single_masked_token(make_model):
    """A micro-batch of prompts only (all its groups were dropped, say) gives zeros and no error."""
    policy, batch = make_model("policy", training={"micro_batch_size": 2}), labeled()
    mask = batch.loss_mask.clone()
    mask[2:4] = False
    logprobs = policy.logprobs(replace(batch, loss_mask=mask))
    assert not logprobs[2:4].any()
    torch.testing.assert_close(logprobs[:2], policy.logprobs(batch)[:2], rtol=1e-5, atol=1e-5)


def test_a_batch_without_rows(make_model):
    empty = TokenBatch(tokens=torch.zeros(0, 7, dtype=torch.int64), lengths=torch.zeros(0, dtype=torch.int64))
    assert make_model("value").values(empty).shape == (0, 7)
    assert make_model("reward").scores(empty).shape == (0, 1)


def test_values_are_of_the_state_in_which_the_token_was_chosen(make_model):
    """V[t] is the head on the hidden state after tokens[:t]; the same number for a TokenBatch and, where masked, a ValueBatch."""
    value, batch = make_model("value", training={"micro_batch_size": 2}), labeled()
    module = value.model.module
    values = value.values(TokenBatch(tokens=batch.tokens, lengths=batch.lengths))
    for row, length in enumerate(LENGTHS):
        assert values[row, 0] == 0 and not values[row, length:].any()
        for t in (1, length // 2, length - 1):
            before = hidden_states(module, batch.tokens[row : row + 1, :t])[0, -1]
            torch.testing.assert_close(
                values[row, t], module.score_head(before.to(platform.device())).detach()[0].cpu(), rtol=1e-5, atol=1e-5
            )
    zeros = torch.zeros(batch.tokens.shape)
    masked = value.values(
        ValueBatch(tokens=batch.tokens, lengths=batch.lengths, loss_mask=batch.loss_mask, old_values=zeros, returns=zeros)
    )
    torch.testing.assert_close(masked, values * batch.loss_mask, rtol=1e-5, atol=1e-5)


def test_a_failed_pass_leaves_the_module_as_it_was(make_model):
    policy = make_model("policy")
    policy.module.train()
    broken = labeled()
    broken.tokens[0, 0] = VOCAB + 1000
    with pytest.raises(IndexError):
        policy.logprobs(broken)
    assert policy.module.training
