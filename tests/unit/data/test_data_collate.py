from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from aligner.data.collate import PreferencePair, SupervisedExample, preference_batch, rollout_batch, supervised_batch, token_batch
from aligner.types import FinishReason, Prompt, Rollout


def rollout(prompt: tuple[int, ...], response: tuple[int, ...], reason: FinishReason, prompt_id: int = 0) -> Rollout:
    return Rollout(
        prompt=Prompt(id=prompt_id, tokens=prompt, source="f:1"),
        response=response,
        logprobs=tuple(-0.5 * (i + 1) for i in range(len(response))),
        finish_reason=reason,
        policy_version=0,
        seed=0,
    )


def example(tokens: tuple[int, ...], learnt_from: int) -> SupervisedExample:
    return SupervisedExample(tokens=tokens, loss_mask=tuple(i >= learnt_from for i in range(len(tokens))), source="f:1")


def test_rollout_batch_by_hand():
    batch = rollout_batch([rollout((1, 7), (8, 2), FinishReason.stop, 5), rollout((1,), (9, 9, 9, 9), FinishReason.length, 6)], pad_id=0)
    assert batch.tokens.tolist() == [[1, 7, 8, 2, 0], [1, 9, 9, 9, 9]]
    assert batch.lengths.tolist() == [4, 5]
    assert batch.loss_mask.int().tolist() == [[0, 0, 1, 1, 0], [0, 1, 1, 1, 1]]
    assert batch.rollout_logprobs.tolist() == [[0, 0, -0.5, -1.0, 0], [0, -0.5, -1.0, -1.5, -2.0]]
    assert batch.prompt_ids.tolist() == [5, 6] and batch.truncated.tolist() == [False, True]


def test_what_a_tool_wrote_is_not_learnt():
    answered = replace(rollout((1, 7), (8, 3, 3, 9), FinishReason.stop), written=(True, False, False, True))
    batch = rollout_batch([answered, rollout((1,), (8, 8), FinishReason.length)], pad_id=0)
    assert batch.loss_mask.int().tolist() == [[0, 0, 1, 0, 0, 1], [0, 1, 1, 0, 0, 0]]


def test_supervised_and_token_batches():
    batch = supervised_batch([example((1, 5, 2), 1), example((1, 5, 6, 7, 2), 3)], pad_id=0)
    assert batch.tokens.tolist() == [[1, 5, 2, 0, 0], [1, 5, 6, 7, 2]]
    assert batch.loss_mask.int().tolist() == [[0, 1, 1, 0, 0], [0, 0, 0, 1, 1]] and batch.labels is None
    tokens = token_batch([[1, 2], [1, 2, 3]], pad_id=9)
    assert tokens.tokens.tolist() == [[1, 2, 9], [1, 2, 3]] and tokens.lengths.tolist() == [2, 3]


def test_preference_rows_are_interleaved():
    pairs = [
        PreferencePair(chosen=example((1, 3), 1), rejected=example((1, 4, 4), 1), margin=0.5),
        PreferencePair(chosen=example((1, 5), 1), rejected=example((1, 6), 1), margin=0.0),
    ]
    batch = preference_batch(pairs, pad_id=0)
    assert batch.tokens.tolist() == [[1, 3, 0], [1, 4, 4], [1, 5, 0], [1, 6, 0]]
    assert batch.lengths.tolist() == [2, 3, 2, 2] and batch.margins.tolist() == [0.5, 0.0] and batch.margins.dtype == torch.float32


def test_refusals():
    with pytest.raises(ValueError, match="at least one row"):
        rollout_batch([], pad_id=0)
    with pytest.raises(ValueError, match="prompt of f:1 has no token"):
        rollout_batch([rollout((), (3,), FinishReason.stop)], pad_id=0)
