"""The moving average of the weights: its numbers, where it is used, and that training does not see it."""

from __future__ import annotations

import pytest
import torch
from model_steps import adam, make_batch, same, save, train, weights_of

from aligner.errors import ConfigError
from aligner.models.checkpoint import checkpoint
from aligner.models.config import Dtype, LoraConfig
from aligner.models.training.adam import EMA, main_weights
from aligner.models.training.optimizer import OptimizerConfig, OptimizerKind


def average_of(policy) -> list[torch.Tensor]:
    states = [part.optimizer.state for part in policy.model.optimizer.chained_optimizers]
    return [state[weight][EMA].clone() for state in states for weight in state]


@pytest.fixture
def make(load_policy, hf_directory):
    def policy(decay: float = 0.75, **config):
        return load_policy(hf_directory("llama"), optimizer=adam(ema_decay=decay), config=config, training={"total_steps": 10})

    return policy


@pytest.mark.parametrize("dtype", [Dtype.float32, Dtype.bfloat16])
def test_three_steps_by_hand(dtype, make):
    """e = 0.75 e + 0.25 w after each update, from the weights before the first one; float32 also of a bfloat16 model."""
    policy, plain = make(dtype=dtype), make(0.0, dtype=dtype)
    seen = [[weight.clone() for weight in main_weights(policy.model.optimizer)]]
    for step in range(3):
        train(policy, range(step, step + 1))
        seen.append([weight.clone() for weight in main_weights(policy.model.optimizer)])
    shares = (0.75**3, 0.25 * 0.75**2, 0.25 * 0.75, 0.25)
    expected = [sum(share * own for share, own in zip(shares, each, strict=True)) for each in zip(*seen, strict=True)]
    found = average_of(policy)
    assert len(found) == len(expected) and {tensor.dtype for tensor in found} == {torch.float32}
    for own, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-5, atol=1e-7)
    train(plain, range(3))
    assert same(weights_of(policy), weights_of(plain))


@pytest.mark.parametrize("dtype", [Dtype.float32, Dtype.bfloat16])
def test_it_takes_the_weights_place_and_gives_it_back(dtype, make):
    policy, batch = make(dtype=dtype), make_batch()
    train(policy, range(3))
    raw, average, main = weights_of(policy), average_of(policy), [w.clone() for w in main_weights(policy.model.optimizer)]
    logprobs = policy.logprobs(batch)
    with policy.averaged():
        own = torch.cat([tensor.flatten() for tensor in average]).to(policy.module.config.params_dtype)
        shown = torch.cat([tensor.flatten() for tensor in weights_of(policy).values()])
        assert torch.equal(own.sort().values, shown.sort().values)
        assert (policy.logprobs(batch) - logprobs).abs().max() > 1e-3
    assert same(weights_of(policy), raw) and torch.equal(policy.logprobs(batch), logprobs)
    for before, after in zip((*average, *main), (*average_of(policy), *main_weights(policy.model.optimizer)), strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize("dtype", [Dtype.float32, Dtype.bfloat16])
def test_a_resumed_run_has_the_same_average(dtype, make, tmp_path):
    whole, first, resumed = (make(dtype=dtype) for _ in range(3))
    train(whole, range(4))
    train(first, range(2))
    checkpoint.load(resumed.model, save(first, tmp_path))
    assert all(map(torch.equal, average_of(resumed), average_of(first)))
    with resumed.averaged():
        resumed.logprobs(make_batch())
    train(resumed, range(2, 4))
    assert same(weights_of(whole), weights_of(resumed))
    assert all(map(torch.equal, average_of(resumed), average_of(whole)))


def test_it_is_of_adapters_alone(make):
    policy = make(lora=LoraConfig(rank=2))
    with policy.averaged():  # nothing is trained yet: the average is the weights
        assert same(weights_of(policy), before := weights_of(policy))
    train(policy, range(2))
    assert sum(tensor.numel() for tensor in average_of(policy)) == sum(p.numel() for p in policy.module.parameters() if p.requires_grad)
    with policy.averaged():
        inside = weights_of(policy)
    assert all(torch.equal(inside[name], before[name]) for name in inside if ".adapter." not in name)
    assert not same(inside, weights_of(policy))


@pytest.mark.parametrize("fields", [{"distributed": False}, {"precision_aware": True}, {"cpu_offload": True}])
def test_what_cannot_be_is_refused(fields):
    with pytest.raises(ConfigError, match="optimizer.ema_decay=0.9: needs optimizer.distributed=true"):
        OptimizerConfig(ema_decay=0.9, **fields)
    with pytest.raises(ConfigError, match="optimizer.ema_decay=0.9: not with optimizer.kind=adam8bit; allowed beside it: adam"):
        OptimizerConfig(ema_decay=0.9, kind=OptimizerKind.adam8bit)
    with pytest.raises(ConfigError, match="optimizer.ema_decay=1.0"):
        OptimizerConfig(ema_decay=1.0)
