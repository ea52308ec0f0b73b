"""The records of a run: a wrong field fails at construction; slicing and trimming keep rows, pairs and columns together."""

from __future__ import annotations

import pytest
import torch

from aligner.types import (
    DistillationBatch,
    FinishReason,
    LabeledBatch,
    LossOutput,
    PolicyBatch,
    PreferenceBatch,
    Prompt,
    Rollout,
    RolloutBatch,
    StepBatch,
    TokenBatch,
    ValueBatch,
)
from aligner.types.rows import num_rows, take_rows, to_device, trim_columns

B, S = 4, 5


def fields_of(kind: type) -> dict[str, torch.Tensor]:
    common = {"tokens": torch.arange(B * S).reshape(B, S), "lengths": torch.tensor([5, 3, 4, 2])}
    mask = {"loss_mask": torch.arange(S).expand(B, S) > 1}
    x, y = torch.arange(B * S).reshape(B, S).float() + 0.5, -torch.arange(B * S).reshape(B, S).float()
    return {
        TokenBatch: common,
        RolloutBatch: common | mask | {"rollout_logprobs": x, "prompt_ids": torch.arange(B), "truncated": torch.arange(B) > 2},
        PolicyBatch: common | mask | {"old_logprobs": x, "advantages": y},
        ValueBatch: common | mask | {"old_values": x, "returns": y},
        PreferenceBatch: common | mask | {"margins": torch.tensor([0.25, 0.75])},
        LabeledBatch: common | mask | {"labels": torch.arange(B * 3).reshape(B, 3).float()},
        StepBatch: common | mask | {"step_labels": x},
        DistillationBatch: common
        | mask
        | {"teacher_tokens": torch.arange(B * S * 2).reshape(B, S, 2), "teacher_logprobs": torch.ones(B, S, 2)},
    }[kind]


KINDS = [TokenBatch, RolloutBatch, PolicyBatch, ValueBatch, PreferenceBatch, LabeledBatch, StepBatch, DistillationBatch]


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_is_checked(kind):
    good = fields_of(kind)
    kind(**good)
    for name, tensor in good.items():
        if name != "labels":  # the one that is optional
            with pytest.raises(TypeError, match=name):
                kind(**{key: value for key, value in good.items() if key != name})
        other = torch.int64 if tensor.dtype != torch.int64 else torch.int32
        with pytest.raises(ValueError, match=rf"{kind.__name__}\.{name} is torch.int"):
            kind(**(good | {name: tensor.to(other)}))
        if name != "tokens":
            with pytest.raises(ValueError, match=rf"{kind.__name__}\.{name} .*expected"):
                kind(**(good | {name: tensor[:-1]}))


def test_optional_fields_are_checked_where_given():
    good = fields_of(PolicyBatch)
    assert PolicyBatch(**good, ref_logprobs=torch.zeros(B, S)).rollout_logprobs is None
    with pytest.raises(ValueError, match="PolicyBatch.rollout_logprobs"):
        PolicyBatch(**good, rollout_logprobs=torch.zeros(B, S + 1))


def test_a_teacher_gives_as_many_tokens_as_logprobs():
    with pytest.raises(ValueError, match=r"DistillationBatch.teacher_logprobs .*expected torch.float32 \(4, 5, 2\)"):
        DistillationBatch(**(fields_of(DistillationBatch) | {"teacher_logprobs": torch.ones(B, S, 3)}))


def test_an_odd_number_of_preference_rows():
    odd = {name: tensor[:3] for name, tensor in fields_of(TokenBatch).items()}
    with pytest.raises(ValueError, match="PreferenceBatch.tokens has 3 rows"):
        PreferenceBatch(**odd, loss_mask=torch.ones(3, S, dtype=torch.bool), margins=torch.zeros(1))


@pytest.mark.parametrize("kind", KINDS)
def test_select_rows_and_columns(kind):
    batch = kind(**fields_of(kind))
    part = take_rows(batch, slice(2, 4))
    assert type(part) is kind and num_rows(part) == 2
    assert part.tokens.tolist() == [[10, 11, 12, 13, 14], [15, 16, 17, 18, 19]] and part.lengths.tolist() == [4, 2]
    for name in ("old_logprobs", "advantages", "old_values", "returns", "rollout_logprobs", "labels"):
        if name in fields_of(kind):
            assert torch.equal(getattr(part, name), fields_of(kind)[name][2:4])
    assert num_rows(take_rows(batch, slice(2, 100))) == 2  # the last micro-batch may be short
    empty = take_rows(batch, slice(2, 2))
    assert num_rows(empty) == num_rows(take_rows(empty, slice(0, 3))) == 0
    optional = {"ref_logprobs": torch.zeros(B, S)} if kind in (PolicyBatch, PreferenceBatch) else {}
    for given in (batch, kind(**fields_of(kind), **optional)):  # the constructor raises where a [B, S] field kept its width
        assert trim_columns(given, 2).tokens.shape == (B, 2)


def test_select_rows_takes_one_margin_per_pair():
    batch = PreferenceBatch(**fields_of(PreferenceBatch))
    assert take_rows(batch, slice(0, 2)).margins.tolist() == [0.25]
    assert take_rows(batch, slice(2, 4)).margins.tolist() == [0.75]


def test_trim_and_pad_columns():
    batch = RolloutBatch(**fields_of(RolloutBatch))
    narrow = trim_columns(batch, 3)
    assert narrow.tokens[1].tolist() == [5, 6, 7] and narrow.rollout_logprobs[0].tolist() == [0.5, 1.5, 2.5]
    assert narrow.loss_mask[0].tolist() == [False, False, True]
    assert narrow.lengths.tolist() == batch.lengths.tolist() and narrow.prompt_ids.tolist() == batch.prompt_ids.tolist()
    wide = trim_columns(batch, 7)
    assert wide.tokens[1].tolist() == [5, 6, 7, 8, 9, 0, 0] and wide.tokens.dtype == torch.int64
    assert wide.loss_mask[0].tolist() == [False, False, True, True, True, False, False] and wide.loss_mask.dtype == torch.bool


def test_trim_leaves_labels_and_margins_alone():
    """K = 3 labels a row and P = 2 margins are no columns of tokens, though 2 < 3 would cut them."""
    assert trim_columns(LabeledBatch(**fields_of(LabeledBatch)), 2).labels.shape == (B, 3)
    assert trim_columns(PreferenceBatch(**fields_of(PreferenceBatch)), 1).margins.tolist() == [0.25, 0.75]


def test_to_device_keeps_absent_fields_absent():
    moved = to_device(PolicyBatch(**fields_of(PolicyBatch)), torch.device("meta"))
    assert moved.tokens.device.type == "meta" and moved.advantages.device.type == "meta" and moved.ref_logprobs is None


def test_rollout_wants_a_logprob_per_token():
    prompt = Prompt(id=0, tokens=(1, 2), source="f:1")
    common = {"prompt": prompt, "finish_reason": FinishReason.stop, "policy_version": 0, "seed": 0}
    assert Rollout(response=(3, 4), logprobs=(-1.0, -2.0), **common).tokens == (1, 2, 3, 4)
    with pytest.raises(ValueError, match="1 entries for 2 response tokens"):
        Rollout(response=(3, 4), logprobs=(-1.0,), **common)


def test_loss_output_is_a_scalar_sum_and_an_integer_count():
    LossOutput(total=torch.tensor(1.0), count=torch.tensor(3), metrics={})
    for total, count in (
        (torch.ones(1), torch.tensor(3)),
        (torch.tensor(1.0), torch.tensor(3.0)),
        (torch.tensor(1.0), torch.tensor([3])),
    ):
        with pytest.raises(ValueError, match="LossOutput needs a scalar total"):
            LossOutput(total=total, count=count, metrics={})
