"""`optimizer.kind=adam8bit`: bitsandbytes' own numbers, on shards that Megatron-Core cuts; the state resumes bit for bit."""

from __future__ import annotations

import sys

import pytest
import torch
from model_steps import train

from aligner.errors import ConfigError
from aligner.models.checkpoint import checkpoint
from aligner.models.config import Dtype
from aligner.models.modules.linear import operators
from aligner.models.training.adam8bit import SMALLEST, Adam8bit
from aligner.models.training.offload import optimizer_tensors
from aligner.models.training.optimizer import OptimizerConfig, OptimizerKind
from aligner.parallel import platform

pytestmark = pytest.mark.usefixtures("topology")
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.1}
WIDE = {"hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}


def plain_parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((96, 80), (64, 64), (5001,), (SMALLEST - 1,))  # a last block that is not full; one that keeps float32
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(platform.device())) for shape in shapes]


def gradients(step: int, parameters: list[torch.nn.Parameter]) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in parameters:
        p.grad = (torch.randn(p.shape, generator=generator) * 10.0 ** torch.randn(p.shape, generator=generator)).to(p.device)
        p.grad[:3] = 0.0


def test_the_numbers_are_those_of_bitsandbytes():
    operators()
    from bitsandbytes.optim import AdamW8bit

    ours, theirs = plain_parameters(), plain_parameters()
    mine, reference = Adam8bit(ours, **SETTINGS), AdamW8bit(theirs, **SETTINGS)
    for step in range(5):
        for optimizer, parameters in ((mine, ours), (reference, theirs)):
            gradients(step, parameters)
            optimizer.step()
    for own, other in zip(ours, theirs, strict=True):
        assert torch.equal(own, other)
        state = reference.state[other]
        for name, codes, scale in (("exp_avg", "state1", "absmax1"), ("exp_avg_sq", "state2", "absmax2")):
            assert torch.equal(mine.state[own][name], state[codes])
            assert own.numel() < SMALLEST or torch.equal(mine.state[own][f"{name}_scale"], state[scale])


def test_what_is_written_of_the_moments_makes_the_same_state():
    parameters = plain_parameters()
    optimizer = Adam8bit(parameters, **SETTINGS)
    for step in range(7):
        gradients(step, parameters)
        optimizer.step()
    again = Adam8bit(parameters, **SETTINGS)
    again.begin(7)
    for p in parameters:
        written = dict(optimizer.moments(p))
        assert {moment.dtype for moment in written.values()} == {torch.float32}
        again.fill(p, written)
        held, found = optimizer.state[p], again.state[p]
        assert held["step"] == found["step"] == 7
        for name in held.keys() - {"step"}:
            assert torch.equal(held[name], found[name]), name
        assert (held["exp_avg"] != 0).any()


def model_with(make_model, kind: OptimizerKind, dtype: str, model: str = "reward"):
    optimizer = OptimizerConfig(lr=1e-2, min_lr=1e-3, warmup_steps=1, kind=kind)
    return make_model(model, optimizer=optimizer, config={"dtype": Dtype(dtype)}, training={"micro_batch_size": 2}, architecture=WIDE)


@pytest.mark.parametrize(("saved", "then"), [("adam", "adam8bit"), ("adam8bit", "adam")])
def test_either_kind_continues_from_the_others_checkpoint(make_model, tmp_path, saved, then):
    model = model_with(make_model, OptimizerKind(saved), "float32", "policy")
    train(model, range(3), "policy")
    path = checkpoint.save(tmp_path, model.model, checkpoint.SaveRequest(step=3, state={}))
    expected = train(model, range(3, 5), "policy")
    other = model_with(make_model, OptimizerKind(then), "float32", "policy")
    checkpoint.load(other.model, path)
    for got, wanted in zip(train(other, range(3, 5), "policy"), expected, strict=True):
        assert got["sft/loss"] == pytest.approx(wanted["sft/loss"], rel=2e-2)


def test_moments_take_a_quarter_of_their_memory(make_model):
    model = model_with(make_model, OptimizerKind.adam8bit, "bfloat16")
    train(model, range(1), "reward")
    (part,) = model.model.optimizer.chained_optimizers
    assert isinstance(part.optimizer, Adam8bit)
    states = [(p.numel(), state) for p, state in part.optimizer.state.items()]
    large = [(count, state) for count, state in states if count >= SMALLEST]
    assert large and len(large) < len(states)
    for count, state in large:
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.uint8
        held = sum(tensor.nbytes for tensor in state.values() if isinstance(tensor, torch.Tensor))
        assert held == pytest.approx(2.03125 * count, abs=8)
    assert {tensor.dtype for tensor in optimizer_tensors(model.model.optimizer)} == {torch.uint8, torch.float32}


def test_what_does_not_go_with_it_is_said(make_model, monkeypatch):
    for options, name in (({"distributed": False}, "distributed=false"), ({"precision_aware": True}, "precision_aware=true")):
        with pytest.raises(ConfigError, match=rf"^optimizer\.kind=adam8bit: not with optimizer\.{name}; allowed beside it: "):
            OptimizerConfig(kind=OptimizerKind.adam8bit, **options)
    with pytest.raises(ConfigError, match=r"^optimizer\.kind=adam8bit: not with optimizer\.cpu_offload=true; allowed beside it: false$"):
        OptimizerConfig(kind=OptimizerKind.adam8bit, cpu_offload=True)
    operators.cache_clear()
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"optimizer\.kind=adam8bit: needs bitsandbytes .*aligner\[qlora\].*, or adam$"):
        model_with(make_model, OptimizerKind.adam8bit, "float32")
    operators.cache_clear()
